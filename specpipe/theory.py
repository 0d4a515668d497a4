"""The papers' formulas and the cost model, as pure functions of numbers.

Scalars or numpy arrays in, the same out; arrays are broadcast against each other. gamma is the number of drafted tokens
of a step, alpha the chance that a draft is accepted. Costs are relative to a plain step of the target unless a name
says seconds (`t_`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Number: TypeAlias = Any  # a float where all arguments are scalars, else an array of their common shape

TIE = 1e-12  # relative difference up to which two speedups are equal; rounding is some 1e-16
HALVINGS = 60  # of [0, 1], which leave nothing between two floats


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> Number:
    """tau, tokens of a step with its extra one: (1 - alpha^(gamma+1)) / (1 - alpha) (arXiv 2211.17192, equation 1).

    Each draft is taken to be accepted independently with probability alpha. gamma + 1 at alpha = 1.

    Raises:
        ValueError: for an alpha outside [0, 1] or a negative gamma.
    """
    a, g = _within("alpha", alpha, 1.0), _within("gamma", gamma)
    with np.errstate(divide="ignore", invalid="ignore"):
        series = -np.expm1((g + 1) * np.log(a)) / (1 - a)  # without cancellation near alpha = 1
    return _same(np.clip(np.where(a == 1, g + 1, series), 1, g + 1))  # rounding leaves gamma = 0 at exactly 1


def expected_tokens_by_position(per_position_acceptance: ArrayLike) -> NDArray[np.float64]:
    """tau(k) = 1 + sum_{i<=k} P(N >= i) for k = 0 .. K, along the last axis: exact, whatever the positions depend on.

    Args:
        per_position_acceptance: P(N >= i) for i = 1 .. K, unconditional; of conditional rates, `np.cumprod` of them.

    Raises:
        ValueError: for a probability outside [0, 1].
    """
    kept = _within("per_position_acceptance", per_position_acceptance, 1.0)
    return 1 + np.cumsum(np.concatenate([np.zeros((*kept.shape[:-1], 1)), kept], axis=-1), axis=-1)


def step_cost(
    gamma: ArrayLike,
    cost_ratio: ArrayLike,
    verify_cost: ArrayLike = 1.0,
    other_cost: ArrayLike = 0.0,
    plain_other_cost: ArrayLike = 0.0,
) -> Number:
    """Time of a step that drafts gamma tokens, in plain steps: (gamma c + v + o) / (1 + o_0).

    With v = 1 and o = 0 it is the gamma c + 1 of arXiv 2211.17192, theorem 3.8. It is also the number of tokens that a
    step must yield on average to be worth its time.

    Args:
        gamma: drafted tokens.
        cost_ratio: c, time of drafting one token.
        verify_cost: v, time of the target's pass over gamma + 1 tokens.
        other_cost: o, time of the rest of the step.
        plain_other_cost: o_0, the same of a plain step.

        The last four in units of the target's pass over one token.

    Raises:
        ValueError: for a negative argument.
    """
    g, c = _within("gamma", gamma), _within("cost_ratio", cost_ratio)
    v, o = _within("verify_cost", verify_cost), _within("other_cost", other_cost)
    return _same((g * c + v + o) / (1 + _within("plain_other_cost", plain_other_cost)))


def speedup(alpha: ArrayLike, gamma: ArrayLike, cost_ratio: ArrayLike) -> Number:
    """Tokens per second over those of plain decoding: tau / (gamma c + 1) (arXiv 2211.17192, theorem 3.8).

    Raises:
        ValueError: for an alpha outside [0, 1], or a negative gamma or cost_ratio.
    """
    return _same(np.divide(expected_tokens(alpha, gamma), step_cost(gamma, cost_ratio)))


def operations_factor(alpha: ArrayLike, gamma: ArrayLike, operations_ratio: ArrayLike) -> Number:
    """Arithmetic per token over that of plain decoding, (gamma c_ops + gamma + 1) / tau (2211.17192, theorem 3.11).

    Args:
        alpha: chance that a draft is accepted.
        gamma: drafted tokens.
        operations_ratio: c_ops, arithmetic of drafting a token over that of a token of the target.

    Raises:
        ValueError: for an alpha outside [0, 1], or a negative gamma or operations_ratio.
    """
    g, ratio = _within("gamma", gamma), _within("operations_ratio", operations_ratio)
    return _same((g * ratio + g + 1) / expected_tokens(alpha, gamma))


def best_gamma(alpha: ArrayLike, cost_ratio: ArrayLike, max_gamma: int = 100) -> Number:
    """The gamma in 0 .. max_gamma with the highest `speedup`, of equals the smallest; 0 where drafting does not pay.

    Raises:
        ValueError: for an alpha outside [0, 1], or a negative cost_ratio or max_gamma.
    """
    a, c = np.broadcast_arrays(_within("alpha", alpha, 1.0), _within("cost_ratio", cost_ratio))
    gammas = np.arange(int(_within("max_gamma", max_gamma)) + 1)
    return best_of(speedup(a[..., None], gammas, c[..., None]))


def best_of(speedups: ArrayLike) -> Number:
    """Index of the highest speedup along the last axis, of equals the first: its gamma where the axis begins at 0."""
    values = np.asarray(speedups, float)
    highest = values.max(axis=-1, keepdims=True)
    return _same(np.argmax(values >= highest * (1 - TIE), axis=-1))


def alpha_for(tokens: ArrayLike, gamma: ArrayLike) -> Number:
    """The alpha at which `expected_tokens(alpha, gamma)` is `tokens`; 0 for fewer than 1, NaN for gamma + 1 and more.

    Raises:
        ValueError: for a negative argument.
    """
    wanted, g = np.broadcast_arrays(_within("tokens", tokens), _within("gamma", gamma))
    low, high = np.zeros(wanted.shape), np.ones(wanted.shape)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = expected_tokens(middle, g) >= wanted
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return _same(np.where(wanted >= g + 1, np.nan, np.where(wanted <= 1, 0.0, high)))


def break_even_alpha(
    gamma: ArrayLike,
    cost_ratio: ArrayLike,
    verify_cost: ArrayLike = 1.0,
    other_cost: ArrayLike = 0.0,
    plain_other_cost: ArrayLike = 0.0,
) -> Number:
    """The alpha above which drafting gamma tokens is faster than plain decoding; NaN where no alpha is.

    Arguments and errors are those of `step_cost`. The smallest over all gamma is cost_ratio, at gamma 1.
    """
    return alpha_for(step_cost(gamma, cost_ratio, verify_cost, other_cost, plain_other_cost), gamma)


def speedup_measured(
    tokens: ArrayLike, t_draft: ArrayLike, t_verify: ArrayLike, t_plain: ArrayLike, t_other: ArrayLike = 0.0
) -> Number:
    """tau t_plain / (t_draft + t_verify + t_other): tokens per second over those of plain decoding, from seconds.

    Predict other prompts or another gamma than those that were measured: where tau and all times come from the run that
    is predicted, this is an identity.

    Args:
        tokens: tau of a step that drafts gamma tokens.
        t_draft: mean seconds of drafting them.
        t_verify: of the target's pass over gamma + 1 tokens.
        t_plain: of a whole plain step, its own rest included.
        t_other: of the rest of the step.

    Raises:
        ValueError: for a negative argument.
    """
    spent = _within("t_draft", t_draft) + _within("t_verify", t_verify) + _within("t_other", t_other)
    return _same(_within("tokens", tokens) * _within("t_plain", t_plain) / spent)


def speedup_mixed(shares: ArrayLike, tokens: ArrayLike, seconds: ArrayLike, t_plain: float) -> float:
    """t_plain sum_k f_k tau_k / sum_k f_k cost_k, of a run whose steps draft different numbers of tokens.

    Args:
        shares: f_k, of steps with k = 0 .. K drafts, in any unit.
        tokens: tau_k of such a step; 1 at k = 0.
        seconds: mean of such a step as a whole.
        t_plain: seconds of a plain step of the baseline.

    Raises:
        ValueError: for a negative argument.
    """
    f = _within("shares", shares)
    gained = np.sum(f * _within("tokens", tokens)) * _within("t_plain", t_plain)
    return float(gained / np.sum(f * _within("seconds", seconds)))


def speedup_by_batch(
    tokens: ArrayLike, t_draft: ArrayLike, t_verify: ArrayLike, t_other: ArrayLike = 0.0
) -> NDArray[np.float64]:
    """`speedup_measured` for each batch size and gamma = 0 .. K, each batch size against its own plain step, gamma 0.

    Args:
        tokens: [K + 1] tau by gamma, which no batch size changes.
        t_draft: [batches, K + 1] seconds of drafting gamma tokens for all requests; 0 at gamma 0.
        t_verify: [batches, K + 1] seconds of the target's pass of width gamma + 1 over all requests.
        t_other: [batches, K + 1] seconds of the rest of the step.

    Returns:
        [batches, K + 1]; 1 at gamma 0. `best_of` gives the best gamma of each batch size.

    Raises:
        ValueError: for a negative argument.
    """
    spent = _within("t_draft", t_draft) + _within("t_verify", t_verify) + _within("t_other", t_other)
    return _within("tokens", tokens) * spent[..., :1] / spent


def verify_cost(gamma: ArrayLike, load: ArrayLike) -> Number:
    """v = max(1, load (gamma+1)) / max(1, load): what wider passes cost where nothing was measured (roofline).

    Args:
        gamma: drafted tokens.
        load: rho, tokens of a plain step (the batch size) over the number of tokens from which on arithmetic takes
            longer than reading the weights.

    Raises:
        ValueError: for a negative argument.
    """
    g, rho = _within("gamma", gamma), _within("load", load)
    return _same(np.maximum(1, rho * (g + 1)) / np.maximum(1, rho))


def prediction_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Mean of |predicted / measured - 1|, by which predictions of a sweep are judged."""
    return float(np.mean(np.abs(np.divide(predicted, measured) - 1)))


def expected_accepted(log_p: Sequence[float], log_q: Sequence[float]) -> dict[str, float]:
    """E[N] of one step under each acceptance rule, given its drafts: no coin is thrown, so rules compare without noise.

    With r_i = p_i(x_i) / q_i(x_i) on the drafted path: sum_i prod_{j<=i} min(1, r_j) token by token (arXiv 2211.17192),
    sum_i w_i with w_i = min(1, w_{i-1} r_i) for block verification (arXiv 2403.10444), sum_i prod_{j<=i} p_j(x_j) for
    exact match. Averaged over the steps of a trace they are what each rule would accept from those steps' starts.

    Args:
        log_p: natural log of the target's probability of each scored draft, at its own place; -inf for 0.
        log_q: the same of the law it was drawn from; 0 for a deterministic draft.

    Returns:
        By rule, between 0 and the number of drafts; block is never below rejection.
    """
    token = block = match = 0.0  # log of the running products
    total = {"rejection": 0.0, "block": 0.0, "exact_match": 0.0}
    for p, q in zip(log_p, log_q, strict=True):
        token, block, match = token + min(0.0, p - q), min(0.0, block + p - q), match + p
        total["rejection"] += math.exp(token)
        total["block"] += math.exp(block)
        total["exact_match"] += math.exp(match)
    return total


def _within(name: str, value: ArrayLike, highest: float = math.inf) -> NDArray[np.float64]:
    array = np.asarray(value, float)
    if not np.all((array >= 0) & (array <= highest)):
        raise ValueError(f"{name} must be from 0 {'up' if highest == math.inf else f'to {highest:g}'}, is {value!r}")
    return array


def _same(values: Any) -> Number:
    array = np.asarray(values)
    return array.item() if array.ndim == 0 else array
