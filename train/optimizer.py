"""How weights are moved (config group `optimizer`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch.nn import Parameter

from specpipe.errors import UserError, number


class AdamW:
    """AdamW with a linear warm-up, and a cosine from there down to a share of the rate at the last step.

    Args:
        lr: the highest rate.
        betas: decay of the two running means.
        weight_decay: of matrices; vectors have none.
        warmup: share of the steps.
        final: share of the rate that is left at the end.
    """

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        betas: Items[float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        warmup: float = 0.03,
        final: float = 0.1,
    ) -> None:
        self.lr = number("lr", lr, 0, above=True)
        if isinstance(betas, (str, float, int)) or len(betas) != 2:
            raise UserError(f"{betas!r} is not a list of two numbers such as [0.9,0.95].", key="betas")
        self.betas = (number("betas", betas[0], 0, 1), number("betas", betas[1], 0, 1))
        self.weight_decay = number("weight_decay", weight_decay, 0)
        self.warmup, self.final = number("warmup", warmup, 0, 1), number("final", final, 0, 1)

    def configured(self, parameters: Iterable[Parameter], steps: int) -> dict[str, Any]:
        """Optimizer and schedule over so many steps, as Lightning takes them."""
        trained = [each for each in parameters if each.requires_grad]
        groups = [
            {"params": [each for each in trained if each.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [each for each in trained if each.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr, betas=self.betas)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.share(step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def share(self, step: int, steps: int) -> float:
        """Of the highest rate, at a step from 0."""
        warmup = max(1, round(self.warmup * steps))
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
