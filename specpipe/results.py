"""The files of a run folder: result.json (the contract of DESIGN section 6), trace.jsonl, provenance.json.

result.json is replaced as a whole, so a reader, or a run that dies, never leaves half of one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from hydra.core.hydra_config import HydraConfig

from specpipe import __version__
from specpipe.errors import UserError
from specpipe.paths import from_start

if TYPE_CHECKING:
    from specpipe.sequence import Step

RESULT = "result.json"
PROVENANCE = "provenance.json"
SAVE_EVERY_S = 2.0
SAVE_SHARE = 0.05  # of the time may go into saving; a long run has much to save
PACKAGES = ("torch", "transformers", "hydra-core", "omegaconf", "wandb", "lightning", "numpy", "tokenizers")


class RunFolder:
    """Writes what a run produces.

    While the run goes on, result.json is at most about SAVE_EVERY_S behind it: not even a killed run loses more.

    Args:
        folder: of the run; made if missing.
        head: command, seed, target, proposer, sampler, verifier, lossless: what stays the same during the run.
        summary: computes the `summary` block of what was decoded so far.
        trace: write trace.jsonl.

    Raises:
        UserError: if the folder cannot be written.
    """

    def __init__(
        self, folder: Path, head: Mapping[str, Any], summary: Callable[[], dict[str, Any]], *, trace: bool = False
    ) -> None:
        self.folder = folder
        self.result: dict[str, Any] = {
            "command": head["command"],
            "version": __version__,
            **head,
            "requests": [],
            "summary": {},
        }
        self._summary = summary
        self._unsaved = False
        self._lost: str | None = None
        self._trace: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_json(folder / PROVENANCE, provenance())
            if trace:
                self._trace = (folder / "trace.jsonl").open("w", buffering=1, encoding="utf-8")  # whole lines
            self._save()
        except OSError as error:
            raise UserError(f"{str(folder)!r} cannot be written: {error.strerror}.", key="hydra.run.dir") from error

    def step(self, request: int, number: int, step: Step) -> None:
        """One line of trace.jsonl, if it is kept; also the occasion to save what has been waiting for it."""
        if self._trace:
            line = {
                "request": request,
                "step": number,
                "asked": step.asked,
                "drafted": step.drafted,
                "accepted": step.accepted,
                "token_ids": step.tokens,
                "kinds": step.kinds,
                "overlaps": step.overlaps,
                "has_q": step.has_q,
                "source": step.source,
                "draft_token_ids": step.draft_token_ids,
                "log_p": step.log_p,
                "log_q": step.log_q,
                "seconds": step.seconds,
            }
            with self._told_at_the_end():
                self._trace.write(_json(line) + "\n")
        self._save_if_due()

    def request(self, record: dict[str, Any]) -> None:
        """Add a finished or interrupted request."""
        self.result["requests"].append(record)
        self._unsaved = True
        self._save_if_due()

    def put(self, **values: Any) -> None:
        """Add or replace what stands beside `requests` and `summary`."""
        self.result.update(values)
        self._unsaved = True
        self._save_if_due()

    def write(self, name: str, text: str) -> None:
        """Another file of the run, such as a page for people."""
        with self._told_at_the_end():
            (self.folder / name).write_text(text, encoding="utf-8")

    def written_by(self, write: Callable[[Path], object]) -> None:
        """Files that another part writes into the folder it is given."""
        with self._told_at_the_end():
            write(self.folder)

    def finish(self) -> str | None:
        """Save everything. A line that says what could not be saved, else None.

        A result that the folder has no room for goes to the machine's folder for temporary files, where there may be.
        """
        try:
            self._save()
        except OSError as error:
            place = self._saved_elsewhere()
            self._lost = self._loss(error) + (f"; result.json is {str(place)!r}." if place else ".")
        return self._lost

    def _save_if_due(self) -> None:
        if self._unsaved and time.monotonic() > self._next_save:
            with contextlib.suppress(OSError):  # at the end, all of it is written again
                self._save()

    @contextlib.contextmanager
    def _told_at_the_end(self) -> Iterator[None]:
        """A full disk does not stop the text; `finish` tells of it."""
        try:
            yield
        except OSError as error:
            self._lost = f"{self._loss(error)}."

    def _loss(self, error: OSError) -> str:
        return f"not all results could be saved in {str(self.folder)!r}: {error.strerror}"

    def _saved_elsewhere(self) -> Path | None:
        place: Path | None = None
        try:
            place = Path(tempfile.mkdtemp(prefix="specpipe-"))
            _write_json(place / RESULT, self.result)
        except OSError:
            if place:
                shutil.rmtree(place, ignore_errors=True)
            return None
        return place / RESULT

    def _save(self) -> None:
        start = time.monotonic()
        self._next_save = start + SAVE_EVERY_S
        self.result["summary"] = self._summary()
        _write_json(self.folder / RESULT, self.result)
        self._unsaved = False
        now = time.monotonic()
        self._next_save = now + max(SAVE_EVERY_S, (now - start) / SAVE_SHARE)


def folder_of_run(given: str | Path) -> Path:
    """The folder of an earlier run, from itself or its result.json, which every run names when it ends."""
    place = from_start(given)
    return place.parent if place.name == RESULT else place


def read_result(folder: str | Path, key: str) -> dict[str, Any]:
    """The content of result.json of an earlier run.

    Args:
        folder: as meant where the command was typed; or the file itself.
        key: the configuration key that named it, for the message.

    Raises:
        UserError: if it is not the folder of a run, or the one that this run writes to.
    """
    place = folder_of_run(folder)
    if HydraConfig.initialized() and place.resolve() == Path(HydraConfig.get().runtime.output_dir).resolve():
        raise UserError(f"{str(folder)!r} is where this run writes to; hydra.run.dir=... names another place.", key=key)
    try:
        result = json.loads((place / RESULT).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{str(folder)!r} has no {RESULT} that can be read: {error.strerror}.", key=key) from error
    except ValueError as error:
        raise UserError(f"{RESULT} in {str(folder)!r} is not JSON.", key=key) from error
    if not isinstance(result, dict):
        raise UserError(f"{RESULT} in {str(folder)!r} is not that of a run.", key=key)
    return result


def finite(value: Any) -> Any:
    """As result.json holds it: NaN and infinity, which JSON does not have, become None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the block is done; for the few milliseconds in which results are put away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            signal.signal(number, lambda *signal_and_frame: received.append(signal_and_frame))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        signal.raise_signal(received[0][0])


def provenance() -> dict[str, Any]:
    """What it takes to run this again: command line, code revision, versions, machine as far as the run used it."""
    torch = sys.modules.get("torch")  # a run that needs none must not wait for it
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command_line": _command_line(),
        "specpipe": __version__,
        "git": _git_revision(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "system": platform.platform(),
            "cpu": torch.backends.cpu.get_cpu_capability() if torch else None,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads() if torch else None,
            "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
        },
    }


def peak_memory() -> dict[str, int | None]:
    """Most bytes that this process has had so far: in main memory, and on a GPU; None where it cannot be told."""
    torch = sys.modules.get("torch")
    on_gpu = torch.cuda.max_memory_allocated() if torch and torch.cuda.is_available() else None
    try:
        import resource
    except ImportError:  # Windows
        return {"process": None, "gpu": on_gpu}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "gpu": on_gpu}


def _command_line() -> str:
    program, *words = sys.argv
    module = Path(program)  # of a package that was started with -m
    started = ["python", "-m", module.parent.name] if module.name == "__main__.py" else [module.name]
    return shlex.join([*started, *words])


def _git_revision() -> str | None:
    """Revision of the checkout this file lies in, with + if it was changed; None outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _write_json(file: Path, content: Any) -> None:
    half = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        # A prompt from the command line may hold bytes that are no UTF-8 (lone surrogates); JSON has escapes for them.
        half.write_bytes(f"{_json(content, indent=2)}\n".encode(errors="backslashreplace"))
        os.replace(half, file)
    except OSError:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise


def _json(content: Any, **layout: Any) -> str:
    """As JSON; NaN and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(finite(content), ensure_ascii=False, allow_nan=False, **layout)
