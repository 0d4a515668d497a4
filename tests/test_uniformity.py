"""The transform and its battery: exact on laws of a few tokens, level and power on simulated ones."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from specpipe.audit import uniformity
from specpipe.audit.uniformity import ID, PROBABILITY, RATIO, Uniforms, anderson_darling_tail, battery

P = torch.tensor([0.1, 0.4, 0.2, 0.3])
Q = torch.tensor([0.4, 0.1, 0.2, 0.3])


def parts(q: torch.Tensor | int | None, ordering: str) -> list[float]:
    """Where each token's interval begins under the ordering: U less the auditor's share of p(x)."""
    starts = []
    for x in range(4):
        uniforms = Uniforms(0)
        uniforms._random = np.random.default_rng(0)
        share = float(np.random.default_rng(0).random()) * P[x].item()
        uniforms.add(x, P, q)
        starts.append(uniforms.u[ordering][0] - share)
    return starts


def test_orderings_put_each_token_behind_the_mass_before_it() -> None:
    """theory.md section 8c: by id; descending p; descending p/q, q = 0 first, ties by id."""
    assert parts(Q, ID) == pytest.approx([0, 0.1, 0.5, 0.7])
    assert parts(Q, PROBABILITY) == pytest.approx([0.9, 0, 0.7, 0.4])
    assert parts(Q, RATIO) == pytest.approx([0.9, 0, 0.4, 0.6])  # ratios .25, 4, 1, 1
    assert parts(torch.tensor([0.0, 0.9, 0.0, 0.1]), RATIO) == pytest.approx([0, 0.6, 0.1, 0.3])
    assert parts(2, RATIO) == pytest.approx([0, 0.1, 0.8, 0.5])  # one-hot at 2: all others first, by id


@pytest.mark.parametrize("q", [Q, 2, None], ids=["soft", "one-hot", "nobody"])
def test_tokens_of_the_law_give_uniform_numbers_under_every_ordering(q: torch.Tensor | int | None) -> None:
    """The intervals of the tokens tile [0, 1), so a draw from p is a uniform number."""
    for ordering in (ID, PROBABILITY, RATIO):
        starts = parts(q, ordering)
        ends = sorted((start, start + mass) for start, mass in zip(starts, P.tolist(), strict=True))
        assert ends[0][0] == pytest.approx(0, abs=1e-7)
        assert ends[-1][1] == pytest.approx(1)
        assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(ends))


def test_the_overlap_counts_tokens_where_the_draft_has_more() -> None:
    """L = {y : q(y) > p(y)}; a one-hot q leans towards its id alone; nobody: towards what p hardly holds."""
    uniforms = Uniforms(0)
    for x, q in ((0, Q), (1, Q), (2, 2), (1, 2), (0, None), (1, None)):
        uniforms.add(x, P, q)
    assert uniforms.inside == [True, False, True, False, True, False]
    flat = P.sqrt() / P.sqrt().sum()
    assert uniforms.mass == pytest.approx([0.1, 0.1, 0.2, 0.2, *[P[flat > P].sum().item()] * 2])
    centred = np.array(uniforms.inside) - np.array(uniforms.mass)
    spread = math.sqrt(sum(m * (1 - m) for m in uniforms.mass))
    assert uniformity.overlap(uniforms)[0] == pytest.approx(centred.sum() / spread)


def test_critical_values_of_anderson_darling() -> None:
    """theory.md section 8c: 2.492 at .05, 3.88 at .01, 5.97 at .001, 8.09 at .0001; no jump where formulas meet."""
    for value, p in ((2.492, 0.05), (3.88, 0.01), (5.97, 0.001), (8.09, 0.0001)):
        assert anderson_darling_tail(value) == pytest.approx(p, rel=0.01)
    assert anderson_darling_tail(1.999) == pytest.approx(anderson_darling_tail(2.001), rel=0.01)
    assert anderson_darling_tail(7.999) == pytest.approx(anderson_darling_tail(8.001), rel=0.03)
    assert anderson_darling_tail(0.0) == 1


def test_statistics_of_known_samples() -> None:
    """Numbers that are too even, too heavy in a bin, or that follow each other."""
    even = (np.arange(3200) + 0.5) / 3200
    assert uniformity.chi_square(even) == (0.0, 1.0)
    assert uniformity.anderson_darling(even)[1] > 0.999
    assert uniformity.chi_square(even**1.3)[1] < 1e-6
    assert uniformity.anderson_darling(even**1.2)[1] < 1e-6
    assert uniformity.lag_one(even, np.zeros(3200))[1] < 1e-12
    shuffled = np.random.default_rng(1).permutation(even)
    assert uniformity.lag_one(shuffled, np.zeros(3200))[1] > 1e-3
    assert uniformity.lag_one(even, np.arange(3200)) == (0.0, 1.0)  # neighbours of different requests are no pairs


def test_the_smallest_detectable_bias_is_the_one_theory_states() -> None:
    """5.17 sqrt(vbar / n) for ten tests: at most .082, .029, .026, .0082 for n = 1,000, 8,192, 10,000, 100,000."""
    for n, bound in ((1_000, 0.082), (8_192, 0.029), (10_000, 0.026), (100_000, 0.0082)):
        uniforms = Uniforms(0)
        uniforms.mass = [0.5] * n
        assert uniformity.smallest_detectable(uniforms, 10) == pytest.approx(bound, abs=6e-4)
        needed = uniformity.tokens_needed(uniforms, 10, uniformity.smallest_detectable(uniforms, 10))
        assert needed == pytest.approx(n, abs=1)


def test_laws_that_are_sure_of_themselves_do_not_make_a_few_tokens_a_proof() -> None:
    """Where q never exceeds p the variance is 0; a bias is still a number of tokens that must occur."""
    uniforms = Uniforms(0)
    uniforms.mass = [0.0] * 50
    assert uniformity.smallest_detectable(uniforms, 10) > 0.1
    assert uniformity.tokens_needed(uniforms, 10, 0.03) > 200
    assert uniformity.smallest_detectable(Uniforms(0), 10) == 1


def simulated(n: int, seed: int, per_request: int = 100) -> Uniforms:
    """What independent uniform numbers of the right law give, under all orderings."""
    generator = np.random.default_rng(seed)
    uniforms = Uniforms(seed)
    for ordering in uniforms.u:
        uniforms.u[ordering] = generator.random(n).tolist()
    mass = generator.uniform(0.05, 0.95, n)
    uniforms.mass, uniforms.inside = mass.tolist(), (generator.random(n) < mass).tolist()
    uniforms.request = (np.arange(n) // per_request).tolist()
    uniforms.drafted = n
    return uniforms


def test_false_alarms_stay_at_the_stated_level() -> None:
    """1,000 right samples of 1,000 tokens: eleven p-values, corrected, alarm with .05 at level .05, .001 at .001."""
    smallest = np.array([11 * min(each.p for each in battery(simulated(1000, seed))) for seed in range(1000)])
    assert (smallest < 0.05).mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert (smallest < 0.001).sum() <= 5
    assert (smallest < 0.5).mean() > 0.25  # and they are not asleep


def test_requests_that_share_their_random_numbers_are_seen() -> None:
    """The same stream in every request: each looks right alone."""
    uniforms = simulated(1000, 1)
    assert uniformity.shared_streams(uniforms)[1] > 0.01
    uniforms.u[ID] = uniforms.u[ID][:100] * 10
    assert uniformity.shared_streams(uniforms)[1] < 1e-9
    assert uniformity.shared_streams(simulated(100, 2)) == (0.0, 1.0)


@pytest.mark.parametrize(("requests", "tokens"), [(300, 1), (200, 5), (25, 64), (2, 200)])
def test_requests_of_their_own_do_not_look_shared(requests: int, tokens: int) -> None:
    """400 right samples of each shape, single tokens and pairs of requests among them: at most level .01 at .01."""
    alarms = sum(uniformity.shared_streams(simulated(requests * tokens, seed, tokens))[1] < 0.01 for seed in range(400))
    assert alarms <= 0.01 * 400 + 3 * math.sqrt(0.01 * 400)


@pytest.mark.parametrize(("n", "mass"), [(3000, 1e-5), (1000, 1e-3), (400, 0.02), (500, 0.999)])
def test_one_unlikely_token_is_no_alarm(n: int, mass: float) -> None:
    """Very sure laws: a lawful token in their tail has a huge z and is nothing special."""
    generator = np.random.default_rng(3)
    alarms = 0
    for _ in range(200):
        uniforms = Uniforms(0)
        uniforms.mass = [mass] * n
        uniforms.inside = (generator.random(n) < mass).tolist()
        alarms += uniformity.overlap(uniforms)[1] < 0.01
    assert alarms <= 2 + 3 * math.sqrt(2)


def test_the_tail_of_unequal_coins_is_exact() -> None:
    """Against all outcomes of a few, and against the normal tail where there are many."""
    masses = np.array([0.1, 0.5, 0.9, 0.0, 1.0])
    assert uniformity.rare_tail(masses, 1) == pytest.approx(0.9 * 0.5 * 0.1)  # only the sure one
    assert uniformity.rare_tail(masses, 4) == pytest.approx(0.1 * 0.5 * 0.9)
    assert uniformity.rare_tail(masses, 5) == 0
    uniforms = Uniforms(0)
    uniforms.mass, uniforms.inside = [0.2] * 600, [True] * 160 + [False] * 440
    z, p = uniformity.overlap(uniforms)
    assert z == pytest.approx(40 / math.sqrt(96))
    assert p == pytest.approx(2 * binom.sf(159, 600, 0.2), rel=1e-6)


def test_few_tokens_are_not_judged_by_their_bins() -> None:
    """Four tokens in 32 bins, or thirty pairs in 64 cells, say nothing."""
    for n in (4, 8, 30, 100):
        uniforms = simulated(n, 1)
        assert uniformity.chi_square(np.array(uniforms.u[ID])) == (0.0, 1.0)
        assert uniformity.lag_one(np.array(uniforms.u[ID]), np.array(uniforms.request)) == (0.0, 1.0)
