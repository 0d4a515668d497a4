"""Logits to probabilities under a request's settings, and drawing from them.

This is the only place where either happens: target and draft, plain and speculative, every position of a block. It
knows tensors and settings; it does not know models, drafts or acceptance rules. Definitions and their order are those
of Hugging Face `generate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specpipe.settings import GenerationSettings

# Nucleus sampling looks at this many of the largest probabilities before it pays for a full sort.
NUCLEUS_HEAD = 256


def probabilities(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """The law a token is drawn from.

    Args:
        logits: [..., V], any floating type.
        settings: temperature, top-k and top-p are used. Temperature 0 gives all mass to the lowest-id argmax.

    Returns:
        [..., V] probabilities, float32 (float64 if the logits are).
    """
    if settings.temperature == 0:
        p = torch.zeros_like(logits, dtype=_computing_dtype(logits))
        best = logits.argmax(-1, keepdim=True)  # the first of equals
        sound = logits.gather(-1, best).isfinite()  # a NaN counts as largest; it must surface, not be decoded
        return p.scatter_(-1, best, torch.where(sound, 1.0, torch.nan).to(p.dtype))
    scaled = logits.to(_computing_dtype(logits)) / settings.temperature
    if 0 < settings.top_k < scaled.shape[-1]:
        kth = scaled.topk(settings.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    p = scaled.softmax(-1)
    return _nucleus(p, settings.top_p) if settings.top_p < 1 else p


def draw(law: Tensor, v: float) -> int:
    """A token by inverse CDF: the first whose cumulative mass exceeds `v` times the total, so never one without mass.

    Args:
        law: [V] non-negative weights; they need not sum to one.
        v: uniform on [0, 1).

    Raises:
        FloatingPointError: if the total mass is zero, infinite or not a number.
    """
    cdf = law.cumsum(-1, dtype=torch.float64)
    total = cdf[-1].item()
    if not 0 < total < float("inf"):
        raise FloatingPointError(f"a law with total mass {total} cannot be drawn from: NaN or overflow in the logits")
    return int(torch.searchsorted(cdf, torch.tensor(v * total, dtype=torch.float64, device=law.device), right=True))


class Rows:
    """The target's laws p_1 .. p_n of one step, each made when it is first asked for.

    A rejection at the first draft must not pay for the top-p of the positions behind it.
    """

    def __init__(self, logits: Tensor, settings: GenerationSettings) -> None:
        self._logits = logits  # [n, V]
        self._settings = settings
        self._made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._logits.shape[0]

    def __getitem__(self, i: int) -> Tensor:
        if i not in self._made:
            self._made[i] = probabilities(self._logits[i], self._settings)
        return self._made[i]

    def all(self) -> Tensor:
        """Every row at once, [n, V]: for devices where waiting for one decision costs more than making all rows."""
        return probabilities(self._logits, self._settings)


def _computing_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Keep a token iff the mass ranked above it is below `top_p`; ties are ranked by id. Renormalised, [..., V]."""
    if p.device.type == "cpu" and p.shape[-1] > NUCLEUS_HEAD:
        top = p.topk(NUCLEUS_HEAD + 1, dim=-1).values
        kept = _mass_above(top) < top_p  # [..., NUCLEUS_HEAD + 1], true first
        border = top.gather(-1, kept.sum(-1, keepdim=True).clamp(max=NUCLEUS_HEAD))  # the first value left out
        last = top.gather(-1, kept.sum(-1, keepdim=True) - 1)
        if not kept[..., -1].any() and bool((border < last).all()):  # the head decides, and no tie straddles the cut
            p = p.masked_fill(p < last, 0.0)
            return p / p.sum(-1, keepdim=True)
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, order, _mass_above(ranked) < top_p)
    p = p.masked_fill(~kept, 0.0)
    return p / p.sum(-1, keepdim=True)


def _mass_above(ranked: Tensor) -> Tensor:
    mass = ranked.cumsum(-1, dtype=torch.float64)
    return torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], -1)
