"""The papers' formulas and the cost model reproduce the papers' numbers, and their own identities.

Figures that do not compute in their source are tested as what the source's own formula gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe import theory
from specpipe.theory import (
    alpha_for,
    best_gamma,
    best_of,
    break_even_alpha,
    expected_tokens,
    expected_tokens_by_position,
    operations_factor,
    prediction_error,
    speedup,
    speedup_by_batch,
    speedup_measured,
    speedup_mixed,
    step_cost,
    verify_cost,
)

Formula = Callable[..., Any]

# arXiv 2211.17192, Table 1 (c = c_ops = 0): (alpha, gamma) -> operations, speed
TABLE_1 = {
    (0.6, 2): (1.53, 1.96),
    (0.7, 3): (1.58, 2.53),
    (0.8, 2): (1.23, 2.44),
    (0.8, 5): (1.63, 3.69),
    (0.9, 2): (1.11, 2.71),
    (0.9, 10): (1.60, 6.86),
}

# The same paper, Tables 2 and 4: gamma, alpha, c -> what the formula gives, printed prediction, measured
TASKS = [
    (7, 0.75, 0.02, 3.2, 3.2, 3.4),
    (7, 0.80, 0.04, 3.3, 3.3, 2.8),
    (7, 0.82, 0.11, 2.5, 2.5, 1.7),
    (7, 0.62, 0.02, 2.3, 2.3, 2.6),
    (5, 0.68, 0.04, 2.3, 2.4, 2.4),
    (3, 0.71, 0.11, 1.9, 2.0, 1.4),
    (5, 0.65, 0.02, 2.4, 2.4, 3.1),
    (5, 0.73, 0.04, 2.6, 2.6, 3.0),
    (3, 0.74, 0.11, 2.0, 2.0, 2.2),
    (5, 0.53, 0.02, 1.9, 1.9, 2.3),
    (3, 0.55, 0.04, 1.8, 1.8, 2.2),
    (3, 0.56, 0.11, 1.5, 1.6, 1.7),
]

COST_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
BEST = {  # alpha -> best gamma and its speedup for each cost ratio; (.5, .2) ties with 2, (.5, .5) with 1
    0.50: [(5, 1.88), (4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.15), (0, 1.00)],
    0.60: [(7, 2.30), (6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40), (1, 1.23), (1, 1.07)],
    0.70: [(9, 2.97), (8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37), (1, 1.13)],
    0.75: [(11, 3.49), (9, 3.20), (7, 2.67), (5, 2.19), (3, 1.71), (2, 1.45), (1, 1.17)],
    0.80: [(14, 4.23), (11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (3, 1.55), (2, 1.22)],
    0.85: [(17, 5.39), (14, 4.75), (10, 3.70), (7, 2.85), (5, 2.08), (4, 1.69), (2, 1.29)],
    0.90: [(24, 7.49), (19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (5, 1.87), (3, 1.38)],
    0.95: [(40, 12.54), (31, 9.95), (21, 6.60), (15, 4.48), (10, 2.87), (8, 2.18), (5, 1.51)],
}
CELLS = [
    (alpha, c, gamma, gain) for alpha, row in BEST.items() for c, (gamma, gain) in zip(COST_RATIOS, row, strict=True)
]


def misses(tokens: Formula = expected_tokens, cost: Formula = step_cost) -> list[tuple[Any, ...]]:
    """The printed speedups and best gammas that tokens / cost does not give."""
    gammas = np.arange(101)
    wrong: list[tuple[Any, ...]] = [
        ("Table 1", *at) for at, (_, speed) in TABLE_1.items() if round(tokens(*at) / cost(at[1], 0.0), 2) != speed
    ]
    wrong += [
        ("tasks", gamma, alpha, c)
        for gamma, alpha, c, gives, *_ in TASKS
        if round(tokens(alpha, gamma) / cost(gamma, c), 1) != gives
    ]
    for alpha, c, gamma, gain in CELLS:
        speedups = tokens(alpha, gammas) / cost(gammas, c)
        if int(best_of(speedups)) != gamma or round(float(speedups[gamma]), 2) != gain:
            wrong.append(("best", alpha, c))
    return wrong


def test_the_founding_paper_s_tables_come_out_to_the_printed_digit() -> None:
    assert misses() == []
    for (alpha, gamma), (operations, speed) in TABLE_1.items():
        assert round(operations_factor(alpha, gamma, 0.0), 2) == operations
        assert round(speedup(alpha, gamma, 0.0), 2) == speed


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": lambda alpha, gamma: expected_tokens(alpha, gamma) - np.power(alpha, gamma)},
        {"tokens": lambda alpha, gamma: expected_tokens(alpha, gamma) - 1},
        {"tokens": lambda alpha, gamma: expected_tokens(alpha, np.add(gamma, 1))},
        {"cost": lambda gamma, c: step_cost(np.add(gamma, 1), c)},
        {"cost": lambda gamma, c: step_cost(gamma, c) - 1 + 1e-9},
    ],
    ids=["no bonus token", "accepted tokens only", "gamma counted from 0", "one more draft paid", "target pass free"],
)
def test_a_wrong_formula_misses_the_tables(wrong: dict[str, Formula]) -> None:
    assert {where for where, *_ in misses(**wrong)} >= {"tasks", "best"}


def test_three_printed_predictions_are_not_what_their_inputs_give() -> None:
    """They differ by one in the last digit: alpha and c are printed rounded."""
    differ = [(gives, printed) for *_, gives, printed, _ in TASKS if gives != printed]
    assert differ == [(2.3, 2.4), (1.9, 2.0), (1.5, 1.6)]


def test_the_paper_s_predictions_miss_its_measurements_by_17_6_percent() -> None:
    """By the measure that decides between the plain formula and measured costs."""
    *_, printed, measured = zip(*TASKS, strict=True)
    assert round(prediction_error(printed, measured), 3) == 0.176
    assert prediction_error(measured, measured) == 0


def test_best_gamma_is_the_table_s() -> None:
    alphas = np.array(list(BEST))
    found = best_gamma(alphas[:, None], np.array(COST_RATIOS))
    assert found.tolist() == [[gamma for gamma, _ in row] for row in BEST.values()]


@pytest.mark.parametrize(("alpha", "c", "gammas"), [(0.5, 0.2, (1, 2)), (0.5, 0.5, (0, 1))])
def test_an_exact_tie_goes_to_the_shortest_draft(alpha: float, c: float, gammas: tuple[int, int]) -> None:
    first, second = (speedup(alpha, gamma, c) for gamma in gammas)
    assert math.isclose(first, second, rel_tol=1e-15)
    assert best_gamma(alpha, c) == gammas[0]
    assert best_of([1.0, 1.25, np.nextafter(1.25, 2)]) == 1
    assert best_of([1.0, 1.25, 1.2500001]) == 2


def test_founding_example_of_seven_and_eight_tenths() -> None:
    """Its text says 3.08 -> 3.93 (28 %), which is no integer draft length; its formula gives this."""
    low, high = expected_tokens(0.7, 5), expected_tokens(0.8, 5)
    assert (low, high) == (pytest.approx(2.94117, abs=5e-6), pytest.approx(3.68928, abs=5e-6))
    assert high / low - 1 == pytest.approx(0.254, abs=5e-4)
    assert expected_tokens(0.7, 6) == pytest.approx(3.05882, abs=5e-6)
    assert expected_tokens(0.8, 6) == pytest.approx(3.95142, abs=5e-6)


def test_a_bigram_draft_of_alpha_two_tenths() -> None:
    assert expected_tokens(0.2, 3) == pytest.approx(1.248)


@pytest.mark.parametrize(
    ("milliseconds", "gain", "tokens", "alpha"), [(7.52, 1.875, 2.83, 0.71), (7.00, 2.01, 3.04, 0.75)]
)
def test_chinchilla_s_speedups_as_tokens_and_alpha(
    milliseconds: float, gain: float, tokens: float, alpha: float
) -> None:
    """arXiv 2302.01318: 14.1 ms a token, draft 1.8 ms, K = 4. Its 1.92 for 7.52 ms is 1.875."""
    c, measured = 1.8 / 14.1, 14.1 / milliseconds
    assert round(measured, 3 if gain == 1.875 else 2) == gain
    assert round(measured * step_cost(4, c), 2) == tokens
    assert round(alpha_for(measured * step_cost(4, c), 4), 2) == alpha
    assert round(speedup(1.0, 4, c), 2) == 3.31


def test_human_eval_s_speedup_as_tokens_and_alpha() -> None:
    """The same table; 2.46 is 14.1 ms over 5.73."""
    tokens = 14.1 / 5.73 * step_cost(4, 1.8 / 14.1)
    assert round(tokens, 2) == 3.72
    assert round(alpha_for(tokens, 4), 2) == 0.85


# ---- acceptance by position ----


def test_steps_of_two_kinds_are_predicted_by_position_and_by_no_single_alpha() -> None:
    """Half the steps at alpha = .5, half at .9, gamma = 5."""
    alphas, i = np.array([0.5, 0.9]), np.arange(1, 6)
    survival = (alphas[:, None] ** i).mean(axis=0)
    kappa = survival / np.concatenate([[1.0], survival[:-1]])
    tau = expected_tokens_by_position(survival)
    assert survival == pytest.approx([0.7, 0.53, 0.427, 0.3593, 0.31087], abs=5e-6)
    assert kappa == pytest.approx([0.7, 0.757, 0.806, 0.841, 0.865], abs=5e-4)
    assert tau[5] == pytest.approx(3.32717, abs=5e-6)
    assert tau[5] == pytest.approx(expected_tokens(alphas, 5).mean())
    assert expected_tokens_by_position(np.cumprod(kappa)) == pytest.approx(tau)
    pooled = survival.sum() / (1 + survival[:-1].sum())
    assert pooled == pytest.approx(0.771531, abs=5e-7)
    assert survival.sum() / 5 == pytest.approx(0.465434, abs=5e-7)
    assert expected_tokens(pooled, 5) == pytest.approx(3.453770, abs=5e-7)
    assert expected_tokens(0.7, 5) == pytest.approx(2.94117, abs=5e-6)


def test_equal_positions_are_one_alpha() -> None:
    survival = 0.8 ** np.arange(1, 7)
    assert expected_tokens_by_position(survival) == pytest.approx(expected_tokens(0.8, np.arange(7)))
    rows = expected_tokens_by_position(np.stack([survival, 0 * survival]))
    assert rows.shape == (2, 7)
    assert rows[1].tolist() == [1.0] * 7
    assert expected_tokens_by_position([]).tolist() == [1.0]


# ---- measured costs ----

SETTINGS = [(0.05, 1.0), (0.1, 1.0), (0.2, 1.0), (0.3, 1.0), (0.1, 1.25), (0.2, 1.5)]  # c, v
BREAK_EVEN = {
    1: [0.050, 0.100, 0.200, 0.300, 0.350, 0.700],
    3: [0.131, 0.233, 0.389, 0.509, 0.366, 0.576],
    5: [0.200, 0.334, 0.509, 0.624, 0.432, 0.624],
    8: [0.286, 0.445, 0.621, 0.721, 0.513, 0.689],
}


def test_break_even_alphas_are_the_table_s() -> None:
    c, v = np.array(SETTINGS).T
    found = break_even_alpha(np.array(list(BREAK_EVEN))[:, None], c, v)
    assert np.round(found, 3).tolist() == list(BREAK_EVEN.values())


def test_no_alpha_breaks_even_where_a_step_costs_more_than_it_can_yield() -> None:
    assert math.isnan(break_even_alpha(0, 0.1))
    assert math.isnan(break_even_alpha(1, 1.0))
    assert math.isnan(break_even_alpha(3, 0.1, verify_cost=3.7))
    assert break_even_alpha(3, 0.0) == 0
    assert break_even_alpha(3, 0.1, verify_cost=0.5) == 0


BATCH = {  # load -> speedup at k = 1, 2, 4, 8 and the best k of these, 0 included
    0.1: (1.71, 2.22, 2.80, 3.09, 8),
    0.2: (1.71, 2.22, 2.80, 1.97, 4),
    0.3: (1.71, 2.22, 1.98, 1.40, 2),
    0.5: (1.71, 1.52, 1.25, 0.88, 1),
    1.0: (0.88, 0.79, 0.65, 0.46, 0),
    4.0: (0.88, 0.79, 0.65, 0.46, 0),
}


def test_a_loaded_machine_wants_shorter_drafts() -> None:
    """alpha .8, c .05."""
    k = np.array([0, 1, 2, 4, 8])
    for load, (*gains, best) in BATCH.items():
        speedups = expected_tokens(0.8, k) / step_cost(k, 0.05, verify_cost(k, load))
        assert speedups[1:] == pytest.approx(gains, abs=0.005 + 1e-9)  # 1.525 is printed as 1.52
        assert k[best_of(speedups)] == best


def test_on_a_saturated_machine_speedup_is_the_inverse_of_the_operations() -> None:
    k = np.arange(9)
    speedups = expected_tokens(0.8, k) / step_cost(k, 0.05, verify_cost(k, 1.0))
    assert speedups == pytest.approx(1 / operations_factor(0.8, k, 0.05))


def test_seconds_and_ratios_are_one_model() -> None:
    t_target, t_other_plain = 0.02, 0.004
    k, tau = np.arange(1, 6), expected_tokens(0.7, np.arange(1, 6))
    t_draft, t_verify, t_other = 0.003 * k, 0.02 + 0.001 * k, 0.004 + 0.0005 * k
    by_seconds = speedup_measured(tau, t_draft, t_verify, t_target + t_other_plain, t_other)
    ratios = (0.003 / t_target, t_verify / t_target, t_other / t_target, t_other_plain / t_target)
    assert by_seconds == pytest.approx(tau / step_cost(k, *ratios))
    alphas = break_even_alpha(k, *ratios)
    assert expected_tokens(alphas, k) == pytest.approx(step_cost(k, *ratios))


def test_the_paper_s_formula_is_the_case_of_equal_passes_and_nothing_else() -> None:
    k = np.arange(9)
    assert speedup_measured(expected_tokens(0.8, k), 0.05 * k * 0.03, 0.03, 0.03) == pytest.approx(
        speedup(0.8, k, 0.05)
    )


def test_measured_passes_of_a_batch_are_held_against_its_own_plain_step() -> None:
    """Two batch sizes whose passes take max(1, load width) and the time of four requests' drafts."""
    k, loads = np.arange(9), np.array([[0.1], [0.3]])
    t_verify = np.maximum(1, loads * (k + 1))
    found = speedup_by_batch(expected_tokens(0.8, k), np.broadcast_to(0.05 * k, (2, 9)), t_verify)
    assert found[:, 0].tolist() == [1.0, 1.0]
    assert np.round(found[:, [1, 2, 4, 8]], 2).tolist() == [list(BATCH[0.1][:4]), list(BATCH[0.3][:4])]
    assert best_of(found).tolist() == [8, 2]
    with_rest = speedup_by_batch(expected_tokens(0.8, k), 0.05 * k, t_verify, 1.0)
    assert with_rest[0, 1] == pytest.approx(1.8 * 2.0 / 2.05)


def test_steps_of_different_length_are_totals_over_totals() -> None:
    """30 plain steps of 10 ms and 10 steps of 20 ms that give three tokens: 60 tokens in 500 ms instead of 600."""
    assert speedup_mixed([30, 0, 10], [1, 1.5, 3], [0.01, 0.015, 0.02], 0.01) == pytest.approx(1.2)
    assert speedup_mixed([0, 1], [1, 1.8], [1, 1.05], 1.0) == pytest.approx(speedup(0.8, 1, 0.05))
    assert speedup_mixed([1, 0], [1, 1.8], [1, 1.05], 1.0) == 1


# ---- identities ----

ALPHA = st.floats(0, 1)
GAMMA = st.integers(0, 40)
COST = st.floats(0, 2)
same_cases = settings(max_examples=30, deadline=None, derandomize=True, database=None)


@same_cases
@given(ALPHA, GAMMA)
def test_tokens_are_the_mean_over_how_many_drafts_are_accepted(alpha: float, gamma: int) -> None:
    chances = [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]
    tokens = expected_tokens(alpha, gamma)
    assert tokens == pytest.approx(sum(p * (n + 1) for n, p in enumerate(chances)), rel=1e-12)
    assert 1 <= tokens <= (gamma + 1) * (1 + 1e-15)


@same_cases
@given(ALPHA, GAMMA, COST)
def test_plain_decoding_is_one_of_everything(alpha: float, gamma: int, c: float) -> None:
    assert expected_tokens(alpha, 0) == speedup(alpha, 0, c) == operations_factor(alpha, 0, c) == 1
    assert expected_tokens(0.0, gamma) == 1
    assert expected_tokens(1.0, gamma) == gamma + 1
    assert speedup(1.0, gamma, 0.0) == gamma + 1
    assert step_cost(0, c) == 1


@same_cases
@given(st.floats(0, 0.999), GAMMA)
def test_more_alpha_and_more_drafts_give_more_tokens(alpha: float, gamma: int) -> None:
    tokens = expected_tokens(alpha, gamma)
    assert expected_tokens(alpha, gamma + 1) >= tokens
    assert expected_tokens(min(1.0, alpha + 0.001), gamma) >= tokens
    assert tokens <= (1 + 1e-12) / (1 - alpha)


@same_cases
@given(ALPHA, COST, st.integers(0, 60))
def test_best_gamma_is_found_by_trying_all(alpha: float, c: float, longest: int) -> None:
    tried = [speedup(alpha, gamma, c) for gamma in range(longest + 1)]
    best = best_gamma(alpha, c, longest)
    assert tried[best] >= max(tried) * (1 - 1e-11)
    assert all(gain < tried[best] for gain in tried[:best])
    if alpha <= c:
        assert best == 0


@same_cases
@given(st.integers(1, 40), COST, st.floats(0.5, 3))
def test_at_break_even_a_step_yields_what_it_costs(gamma: int, c: float, v: float) -> None:
    alpha, cost = break_even_alpha(gamma, c, v), step_cost(gamma, c, v)
    if cost >= gamma + 1:
        assert math.isnan(alpha)
    elif cost > 1:
        assert expected_tokens(alpha, gamma) == pytest.approx(cost, rel=1e-9)
    else:
        assert alpha == 0


@same_cases
@given(st.floats(0.001, 0.999))
def test_the_first_draft_pays_as_soon_as_any_does(c: float) -> None:
    assert break_even_alpha(1, c) == pytest.approx(c)
    assert np.all(np.diff(break_even_alpha(np.arange(1, 20), c)) > 0)


@same_cases
@given(st.floats(0, 0.99), st.integers(1, 20))
def test_alpha_is_found_again_from_the_tokens(alpha: float, gamma: int) -> None:
    assert alpha_for(expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize("near", [1 - 1e-9, 1 - 1e-15, 1e-300])
def test_the_ends_of_alpha_lose_no_digits(near: float) -> None:
    limit = 9 if near > 0.5 else 1
    assert expected_tokens(near, 8) == pytest.approx(limit, rel=1e-7)
    assert expected_tokens(near, 8) <= limit * (1 + 1e-15)


# ---- scalars and arrays ----

A, G, C = [0.0, 0.3, 0.8, 1.0], [0, 1, 5, 12], [0.0, 0.05, 0.4, 1.5]


@pytest.mark.parametrize(
    ("formula", "arguments"),
    [
        (expected_tokens, (A, G)),
        (step_cost, (G, C, [1.0, 1.2, 2.0, 3.0], C)),
        (speedup, (A, G, C)),
        (operations_factor, (A, G, C)),
        (best_gamma, (A, C)),
        (break_even_alpha, (G, C)),
        (alpha_for, ([1.0, 1.7, 3.0, 9.0], G)),
        (speedup_measured, ([1.0, 1.8, 2.5, 4.0], C, [1.0, 1.1, 1.2, 1.3], [1.0, 1.0, 1.1, 1.1], C)),
        (verify_cost, (G, C)),
    ],
)
def test_an_array_gives_what_its_elements_give(formula: Formula, arguments: tuple[list[Any], ...]) -> None:
    together = formula(*(np.array(values) for values in arguments))
    alone = [formula(*values) for values in zip(*arguments, strict=True)]
    assert isinstance(together, np.ndarray)
    assert all(type(value) is (int if formula is best_gamma else float) for value in alone)
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: expected_tokens(1.1, 3), "alpha"),
        (lambda: expected_tokens([0.5, -0.1], 3), "alpha"),
        (lambda: expected_tokens(math.nan, 3), "alpha"),
        (lambda: expected_tokens(0.5, -1), "gamma"),
        (lambda: speedup(0.5, 1, -0.1), "cost_ratio"),
        (lambda: operations_factor(0.5, 1, -0.1), "operations_ratio"),
        (lambda: best_gamma(0.5, 0.1, -1), "max_gamma"),
        (lambda: expected_tokens_by_position([0.5, 1.5]), "per_position_acceptance"),
        (lambda: speedup_measured(2, 1, 1, -1), "t_plain"),
        (lambda: verify_cost(1, -1), "load"),
    ],
)
def test_an_impossible_number_is_refused_by_name(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be from 0 "):
        call()


def test_every_formula_is_exercised_here() -> None:
    public = {name for name, value in vars(theory).items() if callable(value) and value.__module__ == theory.__name__}
    here = set(globals()) | {"expected_accepted"}  # of a real trace, in test_block.py
    assert {name for name in public if not name.startswith("_")} <= here


def test_the_tables_hold_every_combination() -> None:
    assert len(CELLS) == 56
    assert all(len(row) == len(SETTINGS) for row in BREAK_EVEN.values())
    assert len(list(itertools.product(BEST, COST_RATIOS))) == len(CELLS)
