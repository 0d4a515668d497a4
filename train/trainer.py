"""Lightning's trainer as this training needs it (config group `trainer`)."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from specpipe.errors import UserError, choice, integer, one_line

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true")
ROWS, WIDTH, LABELS = 1024, 576, 4096  # of the products that are timed


def trainer(
    *,
    max_steps: int,
    accelerator: str = "auto",
    devices: int | str = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    precision: str = "auto",
    max_time: str | None = None,
    val_every: int = 60,
    gradient_clip_val: float = 1.0,
    callbacks: Any = None,
    logger: Any = None,
    progress: bool = False,
) -> lightning.Trainer:
    """A trainer that counts in steps, validates every `val_every` of them and at the end, and leaves the order alone.

    Args:
        max_steps: of the optimizer.
        accelerator, devices, num_nodes, strategy, gradient_clip_val: Lightning's.
        precision: Lightning's, or `auto`: bf16-mixed where its products take less time here than float32's.
        max_time: DD:HH:MM:SS, after which training ends early; the schedule still counts in steps.
        val_every: steps.
        progress: show a bar.
    """
    integer("max_steps", max_steps, 1)
    integer("val_every", val_every, 1)
    kind = choice("precision", precision, PRECISIONS)
    try:
        return lightning.Trainer(
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=_strategy(strategy),
            precision=fastest_precision(accelerator) if kind == "auto" else kind,  # type: ignore[arg-type]
            max_steps=max_steps,
            max_time=max_time,
            val_check_interval=val_every,
            check_val_every_n_epoch=None,
            gradient_clip_val=gradient_clip_val,
            num_sanity_val_steps=0,
            log_every_n_steps=10,
            use_distributed_sampler=False,  # it would replace the order that a resumed run counts on
            callbacks=callbacks,
            logger=logger,
            enable_progress_bar=progress,
            enable_model_summary=False,
        )
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"Lightning refuses it: {one_line(error)}") from error


@lru_cache
def fastest_precision(accelerator: str) -> str:
    """`bf16-mixed` if a training step's products take less time so on this machine, else `32-true`."""
    device = "cuda" if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() else "cpu"
    seconds = {mixed: min(_timed(device, mixed) for _ in range(3)) for mixed in (False, True)}
    return "bf16-mixed" if seconds[True] < seconds[False] else "32-true"


def _strategy(name: str) -> Any:
    if name != "ddp":
        return name
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(broadcast_buffers=False)  # the target's matrices are buffers, and equal everywhere


def _timed(device: str, mixed: bool) -> float:
    """Seconds of one product with its gradient, the second one."""
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    weight = torch.randn(LABELS, WIDTH, device=device)
    for _ in range(2):
        start = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
            y = F.linear(x, weight)
        y.float().logsumexp(-1).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds
