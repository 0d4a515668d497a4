"""The one clock: splits the wall time of a step into disjoint parts that sum to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import record_function

PARTS = ("prefill", "draft", "verify", "accept", "other")


class StepClock:
    """Runs from its creation; parts may not overlap.

    Args:
        device: where the work runs; work queued on a CUDA device is waited for at the end of each part.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time of the block goes to `name`, one of PARTS; a profiler that is running is told the name."""
        start = time.perf_counter()
        with record_function(name) if torch.autograd._profiler_enabled() else nullcontext():
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self.seconds[name] += time.perf_counter() - start

    def stop(self) -> dict[str, float]:
        """Seconds by part; what no part claimed is `other`."""
        wall = time.perf_counter() - self._start
        self.seconds["other"] = max(0.0, wall - sum(self.seconds.values()))
        return self.seconds
