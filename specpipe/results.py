"""The files of a run folder: result.json (the contract of DESIGN section 6), trace.jsonl, provenance.json.

result.json is replaced as a whole, so a reader, or a run that dies, never leaves half of one.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from specpipe import __version__
from specpipe.sequence import Step

SAVE_EVERY_S = 2.0
PACKAGES = ("torch", "transformers", "hydra-core", "omegaconf", "wandb", "lightning", "numpy", "tokenizers")


class RunFolder:
    """Writes what a run produces.

    Args:
        folder: of the run; made if missing.
        head: command, seed, target, proposer, sampler, verifier, lossless: what stays the same during the run.
        trace: write trace.jsonl.
    """

    def __init__(self, folder: Path, head: dict[str, Any], *, trace: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.result: dict[str, Any] = {"command": head.pop("command"), "version": __version__, **head, "requests": []}
        self._trace: TextIO | None = (folder / "trace.jsonl").open("w", encoding="utf-8") if trace else None
        self._saved = 0.0
        _write_json(folder / "provenance.json", provenance())

    def step(self, request: int, number: int, step: Step) -> None:
        """One line of trace.jsonl, if it is kept."""
        if self._trace:
            line = {
                "request": request,
                "step": number,
                "drafted": step.drafted,
                "accepted": step.accepted,
                "token_ids": step.tokens,
                "kinds": step.kinds,
                "overlaps": step.overlaps,
                "seconds": step.seconds,
            }
            self._trace.write(json.dumps(line) + "\n")

    def request(self, record: dict[str, Any]) -> None:
        """Add a finished (or interrupted) request; saved at once, or with the next one if the last save is recent."""
        self.result["requests"].append(record)
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def save(self, **blocks: Any) -> None:
        """Write result.json with everything so far and the given blocks, such as `summary`."""
        self.result.update(blocks)
        _write_json(self.folder / "result.json", self.result)
        if self._trace:
            self._trace.flush()
        self._saved = time.monotonic()


def provenance() -> dict[str, Any]:
    """What it takes to run this again: command line, code revision, versions, machine."""
    import torch

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command_line": shlex.join(sys.argv),
        "specpipe": __version__,
        "git": _git_revision(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "system": platform.platform(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _git_revision() -> str | None:
    """Revision of the checkout this file lies in, with + if it was changed; None outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"], cwd=root, capture_output=True, text=True, timeout=10
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
    half.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(half, file)
