"""Logits to probabilities under a request's settings, and drawing from them.

This is the only place where either happens: target and draft, plain and speculative, every position of a block. It
knows tensors and settings; it does not know models, drafts or acceptance rules. Definitions and their order are those
of Hugging Face `generate`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specpipe.settings import GenerationSettings

# Nucleus sampling looks at this many of the largest probabilities before it pays for a full sort.
NUCLEUS_HEAD = 256
SPAN = 256  # tokens whose mass is summed first in drawing


@dataclass(frozen=True)
class Prefix:
    """What stands before a position, for the settings that look at it: ids of the prompt, ids emitted or drafted."""

    prompt: Sequence[int]
    output: Sequence[int]
    stop_ids: frozenset[int] = frozenset()

    def then(self, tokens: Sequence[int]) -> Prefix:
        """The prefix behind some more tokens."""
        return Prefix(self.prompt, [*self.output, *tokens], self.stop_ids) if tokens else self


NOWHERE = Prefix((), ())


def probabilities(logits: Tensor, settings: GenerationSettings, prefix: Prefix = NOWHERE) -> Tensor:
    """The law a token is drawn from.

    Args:
        logits: [V], any floating type; [..., V] if no setting depends on the prefix.
        settings: all that concern drawing. Temperature 0 gives all mass to the lowest-id argmax.
        prefix: what stands before the position.

    Returns:
        Probabilities of the logits' shape, float32 (float64 if the logits are).
    """
    if settings.depends_on_prefix:
        logits = adjusted(logits, settings, prefix)
    if settings.temperature == 0:
        p = torch.zeros_like(logits, dtype=_computing_dtype(logits))
        best = argmax(logits.to(p.dtype))[..., None]
        sound = logits.gather(-1, best).isfinite()  # a NaN counts as largest; it must surface, not be decoded
        return p.scatter_(-1, best, torch.where(sound, 1.0, torch.nan).to(p.dtype))
    scaled = logits.to(_computing_dtype(logits))
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / settings.temperature  # at most 0: no temperature overflows
    if 0 < settings.top_k < scaled.shape[-1]:
        kth = scaled.topk(settings.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    p = scaled.softmax(-1)
    if settings.top_p < 1:
        p = _nucleus(p, settings.top_p)
    if settings.min_p > 0:
        p = _renormalised(p, p >= settings.min_p * p.amax(-1, keepdim=True))
    return _typical(p, settings.typical_p) if settings.typical_p < 1 else p


def best_token(logits: Tensor, settings: GenerationSettings, prefix: Prefix = NOWHERE) -> int:
    """Where `probabilities` at temperature 0 has all mass, of logits [V], without making them.

    Raises:
        FloatingPointError: if there is no such place: NaN or infinity in the logits, or nothing left.
    """
    scores = adjusted(logits, settings, prefix) if settings.depends_on_prefix else logits.to(_computing_dtype(logits))
    best = int(argmax(scores))
    if not math.isfinite(scores[best].item()):
        raise FloatingPointError("a law without mass cannot be drawn from: NaN or overflow in the logits")
    return best


def in_vocabulary(logits: Tensor, size: int, ids: Tensor | None = None) -> Tensor:
    """Logits over a draft's own ids as logits over the target's, before any setting is applied to them.

    Args:
        logits: [..., D] over the draft's ids.
        size: V, ids of the target.
        ids: [D] int64, the target's id of each; ids from `size` up (padding) and below 0 (no counterpart) are dropped.
            None: the draft's ids are the target's, as far as both go.

    Returns:
        [..., V]; -inf where the draft has no such token, so that the q made from them is the law drafts are drawn from.
    """
    if ids is None and logits.shape[-1] >= size:
        return logits[..., :size]
    ids = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
    placed = logits.new_full((*logits.shape[:-1], size), -torch.inf)
    known = (ids >= 0) & (ids < size)
    if known.all():  # as for a trimmed vocabulary; picking all would take longer than looking
        return placed.index_copy_(-1, ids, logits)
    return placed.index_copy_(-1, ids[known], logits[..., known])


def draw(law: Tensor, v: float) -> int:
    """A token by inverse CDF: the first whose cumulative mass exceeds `v` times the total, so never one without mass.

    Args:
        law: [V] non-negative weights; they need not sum to one.
        v: uniform on [0, 1).

    Raises:
        FloatingPointError: if the total mass is zero, infinite or not a number.
    """
    return _draw_on_host(law.detach().numpy(), v) if law.device.type == "cpu" else _draw_on_device(law, v)


def argmax(x: Tensor) -> Tensor:
    """[...] places of the largest of [..., V], the first of equals; a NaN counts as largest.

    On a CPU by numpy, which takes a tenth of torch's time.
    """
    return torch.from_numpy(np.asarray(x.detach().numpy().argmax(-1))) if x.device.type == "cpu" else x.argmax(-1)


def log_probabilities(laws: Tensor, tokens: Sequence[int], top: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row its token's log-probability and the `top` best ids with theirs, best first.

    Args:
        laws: [n, V] log-probabilities.
        tokens: n ids.
    """
    own = laws[range(len(tokens)), list(tokens)].tolist()
    best = laws.topk(min(top, laws.shape[-1]), dim=-1)
    ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(value, list(zip(ids, values, strict=True))) for value, (ids, values) in zip(own, ranked, strict=True)]


class Rows:
    """The target's laws p_1 .. p_n of one step, each made when it is first asked for.

    A rejection at the first draft must not pay for the top-p of the positions behind it.

    Args:
        logits: [n, V].
        settings: of the request.
        prefix: what stands before the first row; `drafts[:i]` follow it before row i.
    """

    def __init__(
        self, logits: Tensor, settings: GenerationSettings, prefix: Prefix = NOWHERE, drafts: Sequence[int] = ()
    ) -> None:
        self._logits = logits
        self._settings = settings
        self._prefix, self._drafts = prefix, drafts
        self._made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._logits.shape[0]

    def __getitem__(self, i: int) -> Tensor:
        if i not in self._made:
            prefix = self._prefix.then(self._drafts[:i])
            self._made[i] = probabilities(self._logits[i], self._settings, prefix)
        return self._made[i]

    def all(self) -> Tensor:
        """Every row at once, [n, V]: for devices where waiting for one decision costs more than making all rows."""
        if self._settings.depends_on_prefix:
            return torch.stack([self[i] for i in range(len(self))])
        return probabilities(self._logits, self._settings)


def adjusted(logits: Tensor, settings: GenerationSettings, prefix: Prefix) -> Tensor:
    """[V] logits after bias, penalties and bans, a new tensor: what temperature 0 takes the largest of."""
    scores = logits.to(_computing_dtype(logits), copy=True)
    for token, bias in settings.logit_bias.items():
        scores[token] += bias
    if settings.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prefix.prompt, *prefix.output}), dtype=torch.long, device=scores.device)
        values, penalty = scores[seen], settings.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if prefix.output and (settings.frequency_penalty or settings.presence_penalty):
        counts = Counter(prefix.output)
        times = torch.tensor(list(counts.values()), device=scores.device, dtype=scores.dtype)
        scores[list(counts)] -= settings.frequency_penalty * times + settings.presence_penalty
    banned = settings.banned_token_ids
    if len(prefix.output) < settings.min_new_tokens:
        banned = (*banned, *prefix.stop_ids)
    if banned:
        scores[list(banned)] = -torch.inf
    return scores


def _draw_on_host(weights: NDArray[np.floating], v: float) -> int:
    """First the span that v falls into, then the token in it: a third of the time that all partial sums take."""
    ends = np.add.reduceat(weights, np.arange(0, len(weights), SPAN), dtype=np.float64).cumsum()
    mass = _share(v, float(ends[-1]))
    span = int(ends.searchsorted(mass, side="right"))
    inside = weights[span * SPAN : (span + 1) * SPAN]
    before = float(ends[span - 1]) if span else 0.0
    place = int(inside.cumsum(dtype=np.float64).searchsorted(mass - before, side="right"))
    last = int(inside.nonzero()[0][-1])  # where two ways of summing round differently
    return span * SPAN + min(place, last)


def _draw_on_device(law: Tensor, v: float) -> int:
    cdf = law.cumsum(-1, dtype=torch.float64)
    mass = torch.tensor(_share(v, cdf[-1].item()), dtype=torch.float64, device=law.device)
    return int(torch.searchsorted(cdf, mass, right=True))


def _share(v: float, total: float) -> float:
    """v of the total, always below it."""
    if not 0 < total < math.inf:
        raise FloatingPointError(f"a law with total mass {total} cannot be drawn from: NaN or overflow in the logits")
    return min(v * total, math.nextafter(total, 0.0))


def _computing_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Keep a token iff the mass ranked above it is below `top_p`; ties are ranked by id. Renormalised, [..., V]."""
    if p.device.type == "cpu":  # values alone are sorted in a fraction of the time
        head = p.topk(min(NUCLEUS_HEAD, p.shape[-1]), dim=-1).values
        kept = _cut(p, head, top_p)
        if kept is None and head.shape[-1] < p.shape[-1]:
            kept = _cut(p, torch.from_numpy(np.sort(p.detach().numpy())[..., ::-1].copy()), top_p)
        if kept is not None:
            return _renormalised(p, kept)
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    return _renormalised(p, torch.zeros_like(p, dtype=torch.bool).scatter_(-1, order, _mass_above(ranked) < top_p))


def _cut(p: Tensor, ranked: Tensor, top_p: float) -> Tensor | None:
    """Which of p are in the nucleus, by its largest values, [..., n] in their order; None if they do not decide it."""
    kept = _mass_above(ranked) < top_p  # true first
    count = kept.sum(-1, keepdim=True)
    whole = ranked.shape[-1]
    if whole < p.shape[-1] and kept[..., -1].any():
        return None
    last, border = ranked.gather(-1, count - 1), ranked.gather(-1, count.clamp(max=whole - 1))
    if ((border == last) & (count < whole)).any():  # equal ones on both sides: by id
        return None
    return p >= last


def _typical(p: Tensor, typical_p: float) -> Tensor:
    """The smallest set of mass `typical_p` by closeness of -log p to the entropy (arXiv 2202.00666), ties included."""
    surprise = -p.log()
    entropy = (p * surprise).nan_to_num(0.0).sum(-1, keepdim=True)
    distance = (surprise - entropy).abs()  # infinite where p is 0, so those come last
    ranked, order = distance.sort(dim=-1, stable=True)
    needed = (_mass_above(p.gather(-1, order)) < typical_p).sum(-1, keepdim=True)
    return _renormalised(p, distance <= ranked.gather(-1, needed - 1))


def _renormalised(p: Tensor, kept: Tensor) -> Tensor:
    p = p.masked_fill(~kept, 0.0)
    return p / p.sum(-1, keepdim=True)


def _mass_above(ranked: Tensor) -> Tensor:
    mass = ranked.cumsum(-1, dtype=torch.float64)
    return torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], -1)
