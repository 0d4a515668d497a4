"""The command line: `specpipe <command> key=value ...`, each command a Hydra application of its own.

Takes the command word out for Hydra and puts it back for the task, turns mistakes into one line, and decides the exit
code. Imports Hydra and nothing heavier, so that help, `--cfg` and mistakes answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specpipe.config import CONF, PACKAGE, check, explain, register_schemas
from specpipe.errors import ContractError, ProposerFailed, UserError, nearest, one_line, ran_out_of_memory

COMMANDS = {
    "decode": "decode prompts with a proposer; the text, what was accepted, and where the time went",
    "bench": "is it faster for my prompts, by how much, how sure is that: proposers and plain decoding in turns",
    "audit": "prove that nothing is lost: exact law, greedy identity, sampled law; also of another engine's output",
    "plan": "expected tokens, speedup and the best draft length, from alpha and costs alone",
    "train": "train a proposer on what the target writes itself; from a checkout, also as python -m train",
    "export": "a proposer as files that vLLM and other engines load, checked, with the command that serves it",
    "report": "one page from several runs: specpipe report outputs/bench/*",
    "dashboard": "the wandb workspace of a project, as code",
}

USAGE = """\
usage: specpipe <command> [key=value ...] [hydra flags]

{commands}

  specpipe decode proposer=ngram prompt="Write a haiku about rivers"
  specpipe <command> --help     every group, its options, and the keys
  specpipe <command> --cfg job  the config that would run
"""

SEVERITY = [0, 3, 2, 1]  # of a sweep's exit codes: one job that found a bias outweighs those without an answer

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's switch: raise mistakes instead of printing them in its own way

# Hydra's parser wants all overrides in one row; its flags are brought before them, wherever they were typed.
BARE_FLAGS = ("-m", "--multirun", "-r", "--run", "--resolve", "-h", "--help", "--hydra-help")
VALUE_FLAGS = ("-cd", "--config-dir", "-cn", "--config-name", "-cp", "--config-path", "-p", "--package", "-c", "--cfg")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a disk that takes no more

# What Hydra and OmegaConf raise for a config that is not right.
CONFIG_ERRORS = (UserError, HydraException, OmegaConfBaseException)


class EndedElsewhere(Exception):
    """How the code of a job comes back from a launcher's process, if it is not 0."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def main(command: str | None = None) -> int:
    """Run the command of `sys.argv`, or `command` with the words there.

    Returns 0, 1 (the answer is no), 2 (wrong input, not saved), 3 (not enough data for an answer), 130 (interrupted)
    or 141 (pipe closed).
    """
    _open_missing()
    program, *words = sys.argv
    if command:
        return _run(command, program, words, typed=words)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())), end="")
        return 0 if words else 2
    if words[0] == "--version":
        from specpipe import __version__

        print(f"specpipe {__version__}")
        return 0
    if "-sc" in words or "--shell-completion" in words:
        return _complete([word for word in words if word not in COMMANDS])
    command, *rest = words
    if command not in COMMANDS:
        hint = nearest(command, COMMANDS)
        return _complain(UserError(f"no command {command!r}; there is {', '.join(COMMANDS)}.{hint}"))
    return _run(command, program, rest, typed=words)


def _open_missing() -> None:
    """A service may start with its standard streams closed: what would be said is not, and the run goes on."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _run(command: str, program: str, overrides: list[str], *, typed: list[str], shown_as: str | None = None) -> int:
    traced = os.environ.get(FULL_ERROR, "0") not in ("", "0")
    codes: list[int] = []
    crashed: list[Exception] = []
    here = os.getpid()

    def task(config: DictConfig) -> None:
        sys.argv = [program, *typed]  # for whoever starts this program again
        elsewhere = os.getpid() != here  # a launcher's process: the lists are copies there
        try:
            codes.append(_job(command, config, traced))
        except Exception as error:
            crashed.append(error)
            if not elsewhere:
                raise
            traceback.print_exc()
            codes.append(1)
        if elsewhere and codes[-1]:
            raise EndedElsewhere(codes[-1])

    register_schemas()
    words = _flags_first(_folders_named(overrides) if command == "report" else overrides)
    with _surroundings([shown_as or f"specpipe {command}", *words]):
        try:
            _check_flags(words)
            hydra.main(version_base="1.3", config_path=CONF, config_name=command)(task)()
        except EndedElsewhere as ended:
            return ended.code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (*CONFIG_ERRORS, ValueError, OSError, yaml.YAMLError) as error:
            if crashed:
                raise
            return _complain(explain(error, command, overrides), traced)
    return max(codes, key=SEVERITY.index, default=0) if set(codes) <= set(SEVERITY) else max(codes)


def _folders_named(words: list[str]) -> list[str]:
    """The bare words of `report` are run folders, which Hydra wants as the value of a key."""
    folders: list[str] = []
    rest: list[str] = []
    before = ""
    for word in _flags_first(words):
        is_folder = "=" not in word or Path(word).is_dir()
        (folders if is_folder and not word.startswith("-") and before not in VALUE_FLAGS else rest).append(word)
        before = word
    quoted = ("'" + folder.replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in folders)
    return [*rest, f"folders=[{','.join(quoted)}]"] if folders else rest


def _flags_first(words: list[str]) -> list[str]:
    flags: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word in VALUE_FLAGS:
            flags += [word, *itertools.islice(remaining, 1)]
        else:
            (flags if word in BARE_FLAGS else rest).append(word)
    return flags + rest


def _check_flags(words: list[str]) -> None:
    """Refuse what Hydra's parser would answer with its own usage, which nobody asked for."""

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}.")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    given, unknown = parser.parse_known_args(words)
    for word in unknown:
        if word.startswith("-"):
            raise UserError(f"no flag {word!r}; --hydra-help lists them.{nearest(word, (*BARE_FLAGS, *VALUE_FLAGS))}")
    if given.experimental_rerun is not None:
        raise UserError("--experimental-rerun reads a pickle, which could run anything; give the run's words again.")


def _job(command: str, config: DictConfig, traced: bool) -> int:
    """One job. Its mistakes end here: Hydra would add a line of its own, and a sweep goes on to its next job."""
    given = HydraConfig.get()
    # Unresolved: a `${...}` in a prompt stays as typed.
    overrides = cast("list[str]", OmegaConf.to_container(given.overrides.task, resolve=False))
    try:
        if command == "train" and importlib.util.find_spec("train") is None:
            raise UserError("training runs from a checkout of specpipe: python -m train, in its folder.")
        check(config, command, overrides)
        return int(importlib.import_module(f"specpipe.commands.{command}").run(config))
    except Exception as error:
        if (said := _for_people(error)) is None:
            raise
        job = f"job {given.job.num}: " if given.mode is RunMode.MULTIRUN else ""
        return _complain(explain(said, command, overrides), traced, job)


def _for_people(error: Exception) -> Exception | None:
    """An error as it is said in one line, where people can do something about it; None for a mistake of the program."""
    if isinstance(error, CONFIG_ERRORS):
        return error
    if isinstance(error, ProposerFailed):
        line = f"{error}; {FULL_ERROR}=1 shows where."
    elif isinstance(error, (FloatingPointError, ContractError)):  # no token is left, or the weights are broken
        line = f"{error}."
    elif ran_out_of_memory(error):
        line = f"there is not enough memory: {one_line(error)}"
    elif isinstance(error, OSError) and error.errno in NO_ROOM:
        line = f"{error.filename!r} could not be written: {error.strerror}." if error.filename else f"{error.strerror}."
    else:
        return None
    said = UserError(line)
    said.__cause__ = error
    return said


def _complete(words: list[str]) -> int:
    """Tab completion: Hydra's for all that follows the command word, which Hydra does not know; ours for that word."""
    typed = os.environ.get("COMP_LINE", "").split(" ")
    if len(typed) == 2:
        print(" ".join(name for name in COMMANDS if name.startswith(typed[1])))
        return 0
    command = next(iter(COMMANDS))
    if len(typed) > 2:
        if typed[1] not in COMMANDS:
            return 0
        command = typed.pop(1)
        os.environ["COMP_LINE"] = " ".join(typed)
    return _run(command, "specpipe", words, typed=words, shown_as="specpipe")


@contextlib.contextmanager
def _surroundings(arguments: list[str]) -> Iterator[None]:
    """While Hydra runs: its arguments, mistakes raised, not printed, warnings in one line, SIGTERM like Ctrl-C."""
    argv, wished, around = sys.argv, os.environ.get(FULL_ERROR), HydraConfig.instance().cfg
    show_warning, warnings.showwarning = warnings.showwarning, _one_line_warning
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's own class, next to where the command is typed
    before = signal.signal(signal.SIGTERM, _interrupt)
    sys.argv, os.environ[FULL_ERROR] = arguments, "1"
    try:
        yield
    finally:
        sys.argv, warnings.showwarning = argv, show_warning
        HydraConfig.instance().cfg = around  # `--cfg` and `--help` leave theirs behind
        signal.signal(signal.SIGTERM, before)
        if wished is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = wished


def _one_line_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Ours as they are meant for people; those of other libraries as Python shows them."""
    ours = Path(filename).is_relative_to(PACKAGE)
    text = f"specpipe: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno)
    sys.stderr.write(text)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _complain(error: UserError, traced: bool = False, where: str = "") -> int:
    if traced:
        traceback.print_exception(error)
    # One write: `print` makes two of an unbuffered line, and jobs side by side would break each other's.
    sys.stderr.write(f"specpipe: {where}{' '.join(str(error).split())}\n")
    return 2
