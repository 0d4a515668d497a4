"""The command line: `specpipe <command> key=value ...`, each command a Hydra application of its own.

Takes the command word out for Hydra and puts it back for the task, turns mistakes into one line, and decides the exit
code. Imports Hydra and nothing heavier, so that help, `--cfg` and mistakes answer at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from specpipe.config import CONF, check, explain, register_schemas
from specpipe.errors import UserError, nearest

COMMANDS = {"decode": "decode prompts with a proposer; the text, what was accepted, and where the time went"}

USAGE = """\
usage: specpipe <command> [key=value ...] [hydra flags]

{commands}

  specpipe decode proposer=ngram prompt="Write a haiku about rivers"
  specpipe <command> --help     every group, its options, and the keys
  specpipe <command> --cfg job  the config that would run
"""

# What Hydra and OmegaConf raise for a config that is not right.
CONFIG_ERRORS = (UserError, HydraException, OmegaConfBaseException)


def main() -> int:
    """Run the command of `sys.argv`. Returns 0, 1 (the answer is no), 2 (wrong input), 3 (not enough data) or 130."""
    program, *words = sys.argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())), end="")
        return 0 if words else 2
    if words[0] == "--version":
        from specpipe import __version__

        print(f"specpipe {__version__}")
        return 0
    if words[0] in ("-sc", "--shell-completion"):
        return _complete(program, words)
    command, *rest = words
    if command not in COMMANDS:
        hint = nearest(command, COMMANDS)
        return _complain(UserError(f"no command {command!r}; there is {', '.join(COMMANDS)}.{hint}"))
    return _run(command, program, rest)


def _run(command: str, program: str, overrides: list[str]) -> int:
    codes: list[int] = []

    def task(config: DictConfig) -> None:
        sys.argv = [program, command, *overrides]  # as typed, for whoever starts this program again
        codes.append(_job(command, config))

    register_schemas()
    with _surroundings():
        sys.argv = [f"specpipe {command}", *overrides]
        try:
            hydra.main(version_base="1.3", config_path=CONF, config_name=command)(task)()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (*CONFIG_ERRORS, ValueError, OSError, yaml.YAMLError) as error:
            if codes and not isinstance(error, CONFIG_ERRORS):
                raise
            return _complain(explain(error, command, overrides))
        finally:
            sys.argv = [program, command, *overrides]
    return max(codes, default=0)


def _job(command: str, config: DictConfig) -> int:
    """One job. Its mistakes end here: Hydra would add a line of its own, and a sweep goes on to its next job."""
    given = HydraConfig.get()
    try:
        check(config, command, given.overrides.task)
        return importlib.import_module(f"specpipe.commands.{command}").run(config)
    except CONFIG_ERRORS as error:
        where = f"job {given.job.num} ({given.job.override_dirname}): " if given.mode is RunMode.MULTIRUN else ""
        return _complain(explain(error, command, list(given.overrides.task)), where)
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise _Bug(error) from error


def _complete(program: str, words: list[str]) -> int:
    """Tab completion: Hydra's, without the command word, which Hydra does not know; and of the command word."""
    typed = os.environ.get("COMP_LINE", "").split(" ")
    if words[1:2] == ["query=bash"] or "COMP_LINE" in os.environ:
        if len(typed) < 3 and typed[1:] != []:
            print(" ".join(name for name in COMMANDS if name.startswith(typed[1])))
            return 0
        if len(typed) < 3 or typed[1] not in COMMANDS:
            return 0
        os.environ["COMP_LINE"] = " ".join([typed[0], *typed[2:]])
    return _run(typed[1] if len(typed) > 1 else next(iter(COMMANDS)), program, words)


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    yield
