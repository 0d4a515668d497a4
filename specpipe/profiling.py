"""Where the time of steps goes, operation by operation and beside them, by torch's profiler.

The parts of a step (`clock.PARTS`) are marked in what is recorded, so that what a part spends outside all operations,
in Python, is a number of its own. Recording makes every operation a few microseconds slower: read shares, not speed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from specpipe.clock import PARTS

FILE = "profile.json.gz"
SKIPPED, RECORDED = 4, 32  # steps; the first ones read the prompt and warm up
LISTED = 10  # operations


class Profiler:
    """Records some steps of a run; call `step` behind each of its steps.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=kinds)
        self._on_device = len(kinds) > 1
        self._seen, self._recording = 0, False
        self.steps = 0

    def step(self) -> None:
        """A step has ended."""
        self._seen += 1
        self.steps += self._recording
        if self._seen == SKIPPED:
            with _unsaid():
                self._profile.start()
            self._recording = True
        elif self.steps == RECORDED:
            self.stop()

    def stop(self) -> None:
        """No more steps are recorded."""
        if self._recording:
            with _unsaid():
                self._profile.stop()
            self._recording = False

    def write(self, folder: Path) -> None:
        """What was recorded, for a trace viewer (ui.perfetto.dev, chrome://tracing). Nothing if no step was."""
        if self.steps:
            self._profile.export_chrome_trace(str(folder / FILE))

    def summary(self) -> dict[str, Any]:
        """Milliseconds a step: by part all of it and what no operation took; the operations that took most.

        parts: name, ms, between_operations_ms. operations: name, ms without those that it calls, calls; on a CUDA
        device also device_ms. Empty if no step was recorded.
        """
        if not self.steps:
            return {}
        events = self._profile.key_averages()
        parts = {event.key: event for event in events if event.key in PARTS}
        operations = [event for event in events if event.key not in PARTS]
        device = "self_device_time_total" if self._on_device else "self_cpu_time_total"
        most = sorted(operations, key=lambda event: -getattr(event, device))[:LISTED]
        return {
            "steps": self.steps,
            "parts": [
                {
                    "name": name,
                    "ms": self._each(parts[name].cpu_time_total),
                    "between_operations_ms": self._each(parts[name].self_cpu_time_total),
                }
                for name in PARTS
                if name in parts
            ],
            "operations": [
                {"name": event.key, "ms": self._each(event.self_cpu_time_total), "calls": event.count / self.steps}
                | ({"device_ms": self._each(event.self_device_time_total)} if self._on_device else {})
                for event in most
            ],
        }

    def _each(self, microseconds: float) -> float:
        return microseconds / 1000 / self.steps


@contextmanager
def _unsaid() -> Iterator[None]:
    """Meanwhile nothing reaches standard error: the profiler of torch 2.13 announces itself there, below Python."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
