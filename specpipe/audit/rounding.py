"""How much of a difference is rounding: passes of different widths add in a different order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specpipe.distribution import Prefix, probabilities
from specpipe.settings import GenerationSettings

# By how much a logit may differ between two ways of reading, in units of the spacing of the largest one.
STEPS = {torch.bfloat16: 4, torch.float16: 8, torch.float32: 2**10, torch.float64: 2**10}


def rounding_margin(logits: Tensor) -> float:
    """By how much two readings of the best of these logits, [V], may differ from rounding alone."""
    largest = logits[logits.isfinite()].abs().max().item()
    return STEPS[logits.dtype] * torch.finfo(logits.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1.0)))


def nearly_possible(logits: Tensor, x: int, settings: GenerationSettings, prefix: Prefix) -> bool:
    """Whether x would get mass if its logit were read a margin higher or lower: it stood at a threshold."""
    margin = rounding_margin(logits)
    for shift in (margin, -margin):
        moved = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        moved[x] += shift
        if probabilities(moved, settings, prefix)[x] > 0:
            return True
    return False
