"""Tokens per target pass of a draft, exactly, from one scoring pass over the target's own texts; nothing is decoded.

Knows numbers, not models: how each token of a text was guessed. A step begins where the one before it ended, which is
not at every place alike, so averages over all places are biased; a walk follows the steps (theory.md section 11).

Guesses have one of two shapes for a text of T tokens (the prompt not counted):

    [T]      of a model whose guess for place t depends on the text before t alone
    [T, n]   of one that also depends on where its step began, as heads do: [t, j] belongs to the step that begins at
             place t and to place t + j; what it holds where t + j is behind the text is not looked at

A place that would not be drafted (an id that the draft lacks, a draft that ends where it is unsure) counts as missed:
False, or 0. `start` is the first place that a draft may guess: 0 if the pass that reads the prompt carries a draft, as
in `Pipeline` with a draft model of its own, and 1 if it emits the first token alone, as with heads and borrowed layers,
which need what the target has read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specpipe.errors import UserError, choice, integer

RULES = ("rejection", "block", "exact_match")
ROUNDING = 1e-3  # how far it may carry a probability above 1

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """Texts and the target passes that they take; walks of several texts are pooled by adding them.

    tokens: emitted, all of them. steps: target passes, expected ones where drafts are drawn, the pass that reads the
    prompt included. plain: those of the steps that carry no draft: that pass if `start` is 1, and one with a single
    token left to emit.
    """

    tokens: int
    steps: float
    plain: float = 0.0

    @property
    def tau(self) -> float:
        """Tokens per step: `tokens_per_target_pass` of a decode of the same texts. Without any step there is none."""
        return self.tokens / self.steps

    @property
    def mean_acceptance_length(self) -> float | None:
        """The figure of that name in `spec_decode`: tokens per step that carries a draft; None without such steps.

        For texts that end at their length limit: before a stop the last step may still draft, with one token left too.
        """
        drafting = self.steps - self.plain
        return (self.tokens - self.plain) / drafting if drafting else None

    def __add__(self, other: Walk) -> Walk:
        return Walk(self.tokens + other.tokens, self.steps + other.steps, self.plain + other.plain)


def greedy_walk(match: Tensor, gamma: int, start: int = 0) -> Walk:
    """The steps that greedy decoding of a text takes.

    Args:
        match: bool [T] or [T, n], whether the guess is the text's token; the text is the target's at temperature 0.
        gamma: longest draft of a step, at most n.
        start: first place that a draft may guess, 0 or 1.

    Raises:
        UserError: for a shape, gamma or start other than these.
    """
    hits, room = _guesses("match", match.bool(), gamma, start)
    begun = _begun(hits)
    return Walk(len(hits), float(len(begun)), float((room[begun] == 0).sum()))


def greedy_visits(match: Tensor, gamma: int) -> Numbers:
    """[T], 1 where a step of greedy decoding begins, else 0. Arguments as of `greedy_walk`."""
    hits, _ = _guesses("match", match.bool(), gamma, 0)
    visits = np.zeros(len(hits))
    visits[_begun(hits)] = 1
    return visits


def _begun(hits: Numbers) -> list[int]:
    """The places where steps begin."""
    runs = hits.cumprod(1).sum(1).tolist()  # accepted drafts of a step that begins at t
    t, begun = 0, []
    while t < len(runs):
        begun.append(t)
        t += runs[t] + 1
    return begun


def sampled_walk(ratio: Tensor, gamma: int, rule: str = "rejection", start: int = 0) -> Walk:
    """The steps that sampling takes, expected over drafts and coins given that a text comes out.

    With d = q(x)/p(x), laws after all sampling settings, a step has at least i drafts accepted with probability

        rejection    prod_{j<i} min(1, d_j)
        block        min_{m<=i} prod_{j<m} d_j
        exact_match  prod_{j<i} q(x_j)

    Args:
        ratio: [T] or [T, n], d of the text's tokens, or q of them for `exact_match`; the text was drawn from p.
        gamma: longest draft of a step, at most n.
        rule: who accepts, by the name of the sampler.
        start: first place that a draft may guess, 0 or 1.

    Raises:
        UserError: for a shape, gamma, rule or start other than these, and for numbers that cannot be what they should:
            a ratio that is negative or not finite (the target cannot have written the token), a q above 1.
    """
    visits, _, room = _sampled(ratio, gamma, rule, start)
    return Walk(len(visits), float(visits.sum()), float(visits[room == 0].sum()))


def sampled_visits(ratio: Tensor, gamma: int, rule: str = "rejection", start: int = 0) -> tuple[Numbers, float]:
    """[T], the chance that a step of sampling begins at each place; tokens that the first step is expected to emit.

    Arguments as of `sampled_walk`.
    """
    visits, stand, _ = _sampled(ratio, gamma, rule, start)
    return visits, float(stand[0].sum())


def _sampled(ratio: Tensor, gamma: int, rule: str, start: int) -> tuple[Numbers, Numbers, npt.NDArray[np.int64]]:
    """Visits [T]; P(N >= i | start t), i = 0 .. gamma, [T, gamma + 1]; how many drafts a step may have, [T]."""
    choice("rule", rule, RULES)
    d, room = _guesses("ratio", ratio.double(), gamma, start)
    if not (np.isfinite(d) & (d >= 0)).all():
        raise UserError("holds a negative number, NaN or infinity; the text is not the target's.", key="ratio")
    if rule == "exact_match" and (d > 1 + ROUNDING).any():
        raise UserError(f"holds {d.max():g}; exact_match takes the draft's probabilities.", key="ratio")
    stand = np.pad(_standing(d, rule), ((0, 0), (1, 0)), constant_values=1.0)
    return _visits(-np.diff(stand, axis=1, append=0.0)), stand, room


def _guesses(key: str, values: Tensor, gamma: int, start: int) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """What a step from each place finds at its offsets, [T, gamma], 0 where it has no draft; how many it has, [T]."""
    if values.dim() not in (1, 2):
        raise UserError(f"has the shape {list(values.shape)}, not [T] or [T, n].", key=key)
    integer("gamma", gamma, 0, values.shape[1] if values.dim() == 2 else None)
    integer("start", start, 0, 1)
    given = values.detach().cpu().numpy()
    if given.ndim == 1:
        given = np.lib.stride_tricks.sliding_window_view(np.pad(given, (0, gamma)), gamma)[: len(given)]
    left = np.arange(len(given))[::-1]  # tokens behind the place: a step may emit one more than that, and draft as many
    room = np.minimum(left, gamma)
    room[:start] = 0
    return np.where(np.arange(gamma) < room[:, None], given[:, :gamma], 0), room


def _standing(d: Numbers, rule: str) -> Numbers:
    """P(N >= i | start t) for i = 1 .. gamma, [T, gamma]."""
    if rule != "block":
        return np.minimum(d, 1.0).cumprod(1)
    with np.errstate(divide="ignore"):
        log_products = np.log(d).cumsum(1)  # products of large ratios would overflow
    return np.exp(np.minimum.accumulate(np.minimum(log_products, 0.0), axis=1))


def _visits(accepted: Numbers) -> Numbers:
    """Probability that a step begins at each place, [T], from that of its accepted counts, [T, gamma + 1]."""
    count, width = accepted.shape
    visits = np.zeros(count + width)
    visits[0] = 1.0
    for t in range(count):
        visits[t + 1 : t + 1 + width] += visits[t] * accepted[t]
    return visits[:count]
