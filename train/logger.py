"""The curves of a training: from `self.log` of a Lightning module to a file, the run's result, and the wandb run.

Knows Lightning's logger and callback. Which figures there are is the module's business; what wandb does with them is
the tracker's.
"""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from specpipe.tracking import NoRun, WandbRun

FILE = "metrics.jsonl"

Point = dict[str, Any]  # "step": int, and figures by name: float, None for one that is not finite


class TrackerLogger(Logger, Callback):
    """Keeps one point for each optimizer step at which anything was logged, and tells the tracker each figure.

    It is both the trainer's `logger` and one of its `callbacks`: a logger alone is told the number of a batch, which
    is one less than `trainer.global_step` during a fit and the same after it. Points have `trainer.global_step`.

    A figure has one value per step, the first: a validation of other weights after the last step is not on the curve.
    When a fit goes on from a checkpoint, what an earlier part logged in this folder up to there is taken over; what it
    logged beyond is cut off, for it will be logged again. Of several processes only rank zero keeps anything.

    Args:
        tracker: the wandb run; may be started later, but before the fit.
        folder: the run's. `metrics.jsonl` in it holds one point per line; a step's line is whole after every call.
    """

    name = ""  # this and the next: Lightning's folders below the run's, of which there are none
    version = ""

    def __init__(self, tracker: WandbRun | NoRun, folder: Path) -> None:
        super().__init__()
        self._tracker = tracker
        self._file: Path | None = folder / FILE  # None after a write that failed
        self._begin = self._end = 0  # bytes before and including the last line
        self._points: list[Point] = []
        self._trainer: Trainer | None = None

    @property
    def points(self) -> list[Point]:
        """The curves so far, by step, those of earlier parts included."""
        return self._points

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's, when the checkpoint has been read, if there is one."""
        self._trainer = trainer
        self._on_file(lambda file: self._take_over(file, trainer.global_step))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Lightning's: figures by name. Its `step` is the batch's number and unused, its `epoch` left out."""
        if self._trainer is None:
            raise RuntimeError("a TrackerLogger must be among its trainer's callbacks; before a fit nothing is logged.")
        done = self._trainer.global_step
        point: Point = self._points[-1] if self._points and self._points[-1]["step"] == done else {"step": done}
        new = {name: value for name, value in metrics.items() if name != "epoch" and name not in point}
        if not new:
            return
        if len(point) == 1:
            self._points.append(point)
            self._begin = self._end
        point.update({name: value if math.isfinite(value) else None for name, value in new.items()})
        self._on_file(lambda file: self._write(file, point))
        self._tracker.log_metrics(new, done)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Lightning's. The whole config is in the run's folder and in the wandb run already."""

    def _take_over(self, file: Path, done: int) -> None:
        """The points of `file` up to step `done`; cuts off the rest, and from the first line that is damaged."""
        self._points, self._begin, self._end = [], 0, 0
        if not file.exists():
            return
        for line in file.read_bytes().splitlines(keepends=True):
            point = _parsed(line)
            if point is None or point["step"] > done:
                break
            self._points.append(point)
            self._begin, self._end = self._end, self._end + len(line)
        os.truncate(file, self._end)

    def _write(self, file: Path, point: Point) -> None:
        """The last point's line, in place of a shorter one for fewer figures."""
        line = json.dumps(point).encode() + b"\n"
        file.touch()
        with file.open("r+b") as stream:
            stream.seek(self._begin)
            stream.write(line)
        self._end = self._begin + len(line)

    def _on_file(self, work: Callable[[Path], None]) -> None:
        """A file that cannot be written costs the file, with one line on stderr, and not the training."""
        if self._file is None:
            return
        try:
            work(self._file)
        except OSError as error:
            print(f"{self._file}: {error.strerror}; training goes on without it", file=sys.stderr, flush=True)
            self._file = None


def _parsed(line: bytes) -> Point | None:
    """A whole line's point; None for a line that is cut short or otherwise no point."""
    try:
        point = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return point if isinstance(point, dict) and isinstance(point.get("step"), int) else None
