"""Block verification and exact match: the law, the values of theory.md sections 3 and 4, and wrong variants."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from specpipe.audit.exact import largest_difference, output_law, step_law, target_law, total_variation
from specpipe.audit.tables import FixedProposer, TableProposer, table
from specpipe.chance import Chance
from specpipe.distribution import Prefix, Rows, probabilities
from specpipe.samplers.block import Block, excess, running_log_ratios, stands
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from specpipe.theory import expected_accepted
from tests.stand_ins import constant, pipeline_of
from tests.wrong_rules import (
    BlockResidual,
    FirstFailure,
    LastBelowW,
    Redraw,
    TokenResidual,
    Unclipped,
    UniformProducts,
    WhileBelowW,
)

V = 3
PROMPT = [1, 0]
P, Q = table(V, seed=1), table(V, seed=2)
FULL = table(V, seed=3, zeros=0)
SAMPLE = {"temperature": 1.0}


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("sampler", [Block, ExactMatch])
@pytest.mark.parametrize(
    "proposer",
    [TableProposer(Q, V), FixedProposer(lambda t, k: [(sum(t) + i) % V for i in range(k)])],
    ids=["soft q", "one-hot q"],
)
def test_output_has_exactly_the_targets_law(sampler: type, proposer: Any, gamma: int) -> None:
    """C5, C7: joint law of the first four tokens, context-dependent p and q with zeros."""
    pipeline = pipeline_of(P, V, proposer, gamma=gamma, sampler=sampler(), **SAMPLE)
    wanted = target_law(P, PROMPT, 4, GenerationSettings(**SAMPLE))
    assert largest_difference(output_law(pipeline, PROMPT, 4), wanted) <= 1e-12


PAIRS = {
    "toy": ([1 / 3, 2 / 3], [2 / 3, 1 / 3]),
    "B3": ([0.3, 0.4, 0.3], [0.6, 0.3, 0.1]),
    "P3": ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]),
    "P4": ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]),
}


def expected_accepted_of(pair: str, sampler: Any, k: int) -> float:
    p, q = PAIRS[pair]
    pipeline = pipeline_of(
        constant(p), len(p), TableProposer(constant(q), len(p)), gamma=k, sampler=sampler, temperature=1.0
    )
    return sum(mass * (len(block) - 1) for block, mass in step_law(pipeline, [0]).items())


@pytest.mark.parametrize(
    ("pair", "token", "block", "match2"),
    [
        ("toy", [2 / 3, 10 / 9, 38 / 27], [2 / 3, 11 / 9, 5 / 3], 0.641975),
        ("B3", [0.7, 1.19, 1.533], [0.7, 1.25, 1.704], 0.4389),
        ("P3", [0.9, 1.71, 2.439], [0.9, 1.72, 2.476], 0.5781),
        ("P4", [0.6, 0.96, 1.176], [0.6, 1.03, 1.346], 0.24),
    ],
)
def test_expected_accepted_counts(pair: str, token: list[float], block: list[float], match2: float) -> None:
    """theory.md section 4, C7; both rules are the same at k = 1, and differ at k = 2 already."""
    for k in (1, 2, 3):
        assert expected_accepted_of(pair, Rejection(), k) == pytest.approx(token[k - 1], abs=5e-4)
        assert expected_accepted_of(pair, Block(), k) == pytest.approx(block[k - 1], abs=5e-4)
    assert expected_accepted_of(pair, ExactMatch(), 2) == pytest.approx(match2, abs=1e-4)


def test_one_hot_q_and_no_draft() -> None:
    """C7: (.5, .3, .2) with one-hot at 0 accepts .75 of 2 under both rules; k = 0 draws from row 0."""
    zeros = FixedProposer(lambda t, k: [0] * k)
    for sampler in (Rejection(), Block()):
        pipeline = pipeline_of(constant(PAIRS["P3"][0]), 3, zeros, gamma=2, sampler=sampler, temperature=1.0)
        accepted = sum(mass * (len(block) - 1) for block, mass in step_law(pipeline, [0]).items())
        assert accepted == pytest.approx(0.75)
    one = Rows(torch.tensor([[0.0, 1.0]]).log(), GenerationSettings(temperature=1.0))
    assert Block().accept([], one, torch.zeros(0, 2), Chance(0)) == (0, 1)


def test_block_never_accepts_fewer_on_any_path() -> None:
    """1,000 random pairs with a path of drafts each, k = 1..6, from the drafts' probabilities alone."""
    generator = torch.Generator().manual_seed(0)
    gains = []
    for k in torch.randint(1, 7, (1000,), generator=generator).tolist():
        log_p, log_q = (torch.rand(k, generator=generator).log().tolist() for _ in range(2))
        expected = expected_accepted(log_p, log_q)
        gains.append(expected["block"] - expected["rejection"])
    assert min(gains) >= 0
    assert max(gains) > 0.3


@pytest.mark.parametrize("pair", PAIRS)
def test_both_rules_are_scored_from_one_trace(pair: str) -> None:
    """theory.md section 4, noise-free comparison: its mean over drafts is E[N], whichever rule made the trace."""
    p, q = PAIRS[pair]
    for k in (1, 2, 3):
        mean = dict.fromkeys(("rejection", "block", "exact_match"), 0.0)
        for path in itertools.product(range(len(q)), repeat=k):
            log_p, log_q = ([math.log(law[x]) for x in path] for law in (p, q))
            for rule, value in expected_accepted(log_p, log_q).items():
                mean[rule] += math.exp(sum(log_q)) * value
        for rule, sampler in (("rejection", Rejection()), ("block", Block()), ("exact_match", ExactMatch())):
            assert mean[rule] == pytest.approx(expected_accepted_of(pair, sampler, k), abs=1e-12)


@pytest.mark.parametrize("sampler", [Rejection, Block])
def test_a_trace_holds_the_probabilities_of_every_draft(sampler: type) -> None:
    """Also of those behind a rejection, under the settings at its own prefix; a perfect draft is expected whole."""
    settings = {"temperature": 0.7, "frequency_penalty": 0.4, "max_new_tokens": 12}
    pipeline = pipeline_of(FULL, V, TableProposer(Q, V), gamma=3, sampler=sampler(), **settings)
    pipeline.score_drafts = True
    [sequence] = pipeline.sequences([PROMPT])
    before, seen = 0, 0
    for step in pipeline.decode(sequence):
        assert step.log_p is not None
        assert len(step.log_p) == step.drafted
        for i in range(min(step.accepted + 1, step.drafted, len(step.tokens))):
            emitted = sequence.new_tokens[: before + i]
            p = probabilities(FULL([*PROMPT, *emitted]), pipeline.settings, Prefix(PROMPT, emitted))
            if i < step.accepted:
                assert step.log_p[i] == pytest.approx(p[step.tokens[i]].log().item())
                seen += 1
        before += len(step.tokens)
    assert seen > 0
    same = pipeline_of(P, V, TableProposer(P, V), gamma=3, sampler=sampler(), temperature=1.0, max_new_tokens=12)
    same.score_drafts = True
    [sequence] = same.sequences([PROMPT])
    for step in same.decode(sequence):
        assert expected_accepted(step.log_p or [], step.log_q or [])["block"] == pytest.approx(step.drafted)


def test_without_probabilities_nothing_is_expected() -> None:
    """A draft that the target excludes stands for nothing behind it."""
    assert expected_accepted([], []) == {"rejection": 0, "block": 0, "exact_match": 0}
    assert expected_accepted([-math.inf, 0.0], [0.0, 0.0]) == {"rejection": 0, "block": 0, "exact_match": 0}


def test_thresholds_of_the_worked_example() -> None:
    """B3, k = 2: (h_1, h_2) by draft, read off by the coin that is asked for."""
    p, q = PAIRS["B3"]
    rows = Rows(torch.tensor([p] * 3, dtype=torch.float64).log(), GenerationSettings(temperature=1.0))
    laws = torch.tensor([q] * 2, dtype=torch.float64)

    class Coin(Chance):
        def passes(self, p: float, q: float) -> bool:
            self.h = min(1.0, p / q)
            return False

    for draft, wanted in {
        (0, 0): (1 / 11, 0.25),
        (0, 1): (1 / 11, 2 / 3),
        (0, 2): (1 / 11, 1),
        (1, 0): (1, 0.5),
    }.items():
        log_w = running_log_ratios(list(draft), rows, laws)
        for i in (1, 2):
            coin = Coin(0)
            h = 1.0 if stands(i, log_w[i], rows, laws, coin) else coin.h
            assert h == pytest.approx(wanted[i - 1])


# ---- wrong variants, on B3 with k = 2: total variation of the law of 1, 2 and 3 tokens ----


@pytest.mark.parametrize(
    ("rule", "wrong_by"),
    [
        (Block, (0, 0, 0)),
        (TokenResidual, (0, 0.0100, 0.0130)),
        (BlockResidual, (0, 0.0300, 0.0390)),
        (Unclipped, (0, 0.0600, 0.0630)),
        (WhileBelowW, (0, 0.0500, 0.0650)),
        (LastBelowW, (0.1350, 0.1350, 0.1485)),
        (UniformProducts, (0.17104, 0.2366, 0.2420)),
        (FirstFailure, (0.2455, 0.3057, 0.3264)),
    ],
)
def test_wrong_variants_are_off_by_what_theory_says(rule: type, wrong_by: tuple[float, ...]) -> None:
    """C7 and theory.md section 4: the first token alone is blind to most of them."""
    p, q = PAIRS["B3"]
    for n, wanted in enumerate(wrong_by, 1):
        pipeline = pipeline_of(constant(p), 3, TableProposer(constant(q), 3), gamma=2, sampler=rule(), temperature=1.0)
        law = output_law(pipeline, [0], n)
        right = target_law(constant(p), [0], n, GenerationSettings(temperature=1.0))
        assert total_variation(law, right) == pytest.approx(wanted, abs=6e-5)


def test_exact_match_that_redraws_on_a_mismatch_is_caught() -> None:
    """C5: emitting a fresh draw from p gives (.595, .267, .138)."""

    p, q = PAIRS["P3"]
    pipeline = pipeline_of(constant(p), 3, TableProposer(constant(q), 3), gamma=1, sampler=Redraw(), temperature=1.0)
    law = output_law(pipeline, [0], 1)
    assert [law[x,] for x in range(3)] == pytest.approx([0.595, 0.267, 0.138], abs=1e-12)


@pytest.mark.parametrize("sampler", [Block, ExactMatch, Rejection])
def test_every_rule_is_the_same_at_temperature_zero(sampler: type) -> None:
    """C7, C10: accept while the draft is the argmax."""
    laws = torch.tensor([[0.3, 0.5, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    for q in (None, torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])):
        rows = Rows(laws.log(), GenerationSettings(temperature=0.0))
        assert sampler().accept([1, 0], rows, q, Chance(0)) == (1, 2)


def test_numbers_hold_at_a_large_vocabulary_in_float32() -> None:
    """theory.md section 4: thresholds in float32 are within 3e-6 of float64 at V = 50,000, k = 16."""
    generator = torch.Generator().manual_seed(1)
    logits_p = torch.randn(17, 50_000, generator=generator) * 3
    logits_q = logits_p[:16] + 0.3 * torch.randn(16, 50_000, generator=generator)
    x = [int(torch.multinomial(row.softmax(-1), 1, generator=generator)) for row in logits_q]

    def thresholds(dtype: torch.dtype) -> list[float]:
        rows = Rows(logits_p.to(dtype), GenerationSettings(temperature=1.0))
        q = logits_q.to(dtype).softmax(-1)
        log_w = running_log_ratios(x, rows, q)
        masses = [excess(rows[i], q[i], log_w[i], or_p=False).sum(dtype=torch.float64).item() for i in range(1, 16)]
        return [1.0 if w == 0 else a / (a - math.expm1(w)) for a, w in zip(masses, log_w[1:16], strict=True)]

    assert thresholds(torch.float32) == pytest.approx(thresholds(torch.float64), abs=3e-6)
