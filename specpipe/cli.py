"""The command line: `specpipe <command> key=value ...`, each command a Hydra application of its own.

Takes the command word out for Hydra and puts it back for the task, turns mistakes into one line, and decides the exit
code. Imports Hydra and nothing heavier, so that help, `--cfg` and mistakes answer at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from specpipe.config import CONF, explain, register_schemas
from specpipe.errors import UserError, nearest

COMMANDS = {"decode": "decode prompts with a proposer; the text, what was accepted, and where the time went"}

USAGE = """\
usage: specpipe <command> [key=value ...] [hydra flags]

{commands}

  specpipe decode proposer=ngram prompt="Write a haiku about rivers"
  specpipe <command> --help     every group, its options, and the keys
  specpipe <command> --cfg job  the config that would run
"""


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
    command, *rest = words
    if command not in COMMANDS:
        return _complain(UserError(f"no command {command!r}; there are {', '.join(COMMANDS)}.{nearest(command, COMMANDS)}"))
    return _run(command, program, rest)


def _run(command: str, program: str, overrides: list[str]) -> int:
    # Hydra prints mistakes in its own way unless asked to raise them; a person who asks for tracebacks gets them.
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own class, next to where the command is typed
    signal.signal(signal.SIGTERM, _interrupt)
    sys.argv = [program, *overrides]
    try:
        return _hydra(command, program, overrides)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (UserError, HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            traceback.print_exc()
        return _complain(error if isinstance(error, UserError) else explain(error, command))


def _hydra(command: str, program: str, overrides: list[str]) -> int:
    codes = [0]

    def task(config: DictConfig) -> None:
        sys.argv = [program, command, *overrides]  # as typed, for whoever starts this program again
        codes.append(importlib.import_module(f"specpipe.commands.{command}").run(config))

    register_schemas()
    hydra.main(version_base="1.3", config_path=CONF, config_name=command)(task)()
    return max(codes)


def _interrupt(number: int, frame: FrameType | None) -> Any:
    raise KeyboardInterrupt


def _complain(error: UserError) -> int:
    print(f"specpipe: {error}", file=sys.stderr)
    return 2
