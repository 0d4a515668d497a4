"""The law of what leaves the pipeline, by exploring every random decision: exactly the target's, or the test fails.

Each claim is also put to deliberately wrong samplers, which it must refuse.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe import distribution
from specpipe.audit.exact import (
    PROPOSALS,
    largest_difference,
    output_law,
    step_law,
    target_law,
    total_variation,
)
from specpipe.audit.tables import FixedProposer, Rule, TableProposer, table
from specpipe.chance import Chance
from specpipe.distribution import Rows
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from tests.stand_ins import constant, pipeline_of
from tests.wrong_rules import TOKEN_RULES, InPlace, ResidualOfAnotherRow, SecondChance, ShiftedRow, SoftRatio

V, N = 3, 4
PROMPT = [1, 0]
P = table(V, seed=1)
ONE_HOT, SOFT = PROPOSALS["one-hot q"], PROPOSALS["soft q"]
SAMPLE = {"temperature": 1.0}


def error(proposer: Any, sampler: Any, gamma: int, rule: Rule = P) -> float:
    """Of the joint law of four tokens, with the real verifier and its cache around the table model."""
    pipeline = pipeline_of(rule, V, proposer, gamma=gamma, sampler=sampler, **SAMPLE)
    return largest_difference(
        output_law(pipeline, PROMPT, N), target_law(rule, PROMPT, N, GenerationSettings(**SAMPLE))
    )


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("proposals", PROPOSALS)
def test_output_has_exactly_the_targets_law(proposals: str, gamma: int) -> None:
    """C1, C3, C9, C18, C19: every kind of q, context-dependent p and q with zeros, joint law of four tokens."""
    assert error(PROPOSALS[proposals], Rejection(), gamma) <= 1e-12


WRONG = {
    **{name: rule for name, rule in TOKEN_RULES.items() if name != "right"},
    "second chance": SecondChance(),
    "shifted row": ShiftedRow(),
    "residual of another row": ResidualOfAnotherRow(),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str) -> None:
    """theory.md sections 2 and 8d, on tables that differ from place to place."""
    assert error(SOFT, WRONG[name], 2) > 1e-3


@pytest.mark.parametrize("name", ["correction from p", "second chance", "shifted row", "bonus from the previous row"])
def test_a_wrong_rule_is_caught_without_q(name: str) -> None:
    """C3: with one-hot q the correction from p leaves the draft token in."""
    assert error(ONE_HOT, WRONG[name], 2) > 1e-3


def test_a_soft_ratio_for_a_deterministic_draft_is_caught() -> None:
    """C1."""
    soft = SoftRatio(lambda token: torch.full((V,), 0.2, dtype=torch.float64).index_fill(0, torch.tensor(token), 0.6))
    assert error(ONE_HOT, soft, 2) > 1e-3


def test_a_row_changed_in_place_is_caught() -> None:
    """C11: repeated drafts: the right rule leaves the second row whole, the wrong one does not."""
    p = constant([0.5, 0.3, 0.2])
    zeros = FixedProposer(lambda tokens, k: [0] * k)
    wanted = target_law(p, PROMPT, 2, GenerationSettings(temperature=1.0))
    laws = {
        sampler: output_law(pipeline_of(p, V, zeros, gamma=2, sampler=sampler(), temperature=1.0), PROMPT, 2)
        for sampler in (Rejection, InPlace)
    }
    assert total_variation(laws[Rejection], wanted) <= 1e-12
    assert total_variation(laws[InPlace], wanted) > 0.2


# ---- the worked examples ----

P3 = ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1])
P4 = ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])


def first_token_law(p: list[float], q: list[float], sampler: Rejection) -> list[float]:
    pipeline = pipeline_of(
        constant(p), len(p), TableProposer(constant(q), len(p)), gamma=1, sampler=sampler, temperature=1.0
    )
    law = output_law(pipeline, [0], 1)
    return [law.get((x,), 0.0) for x in range(len(p))]


@pytest.mark.parametrize(
    ("name", "on_p3", "on_p4"),
    [
        ("right", P3[0], P4[0]),
        ("correction from p", [0.55, 0.33, 0.12], [0.26, 0.32, 0.28, 0.14]),
        ("correction from q", [0.56, 0.33, 0.11], [0.14, 0.28, 0.32, 0.26]),
        ("correction = argmax of p", [0.6, 0.3, 0.1], [0.5, 0.2, 0.2, 0.1]),
        ("correction = argmax of the residual", P3[0], [0.5, 0.2, 0.2, 0.1]),
        ("residual |p-q|", [0.55, 0.3, 0.15], [0.25, 0.25, 0.25, 0.25]),
        ("accept everything", P3[1], P4[1]),
        ("min(1, q/p)", [0.6, 0.3, 0.1], [0.13125, 0.16875, 0.3, 0.4]),
        ("accept iff p >= q", [0, 0.3, 0.7], [0.625, 0.375, 0, 0]),
        ("accept with p(x), residual (p-q)+", [0.3, 0.09, 0.61], [0.64, 0.26, 0.06, 0.04]),
        ("min(1, 2p/q)", [0.6, 0.3, 0.1], [0.25, 0.25, 0.3, 0.2]),
    ],
)
def test_worked_examples_to_the_digit(name: str, on_p3: list[float], on_p4: list[float]) -> None:
    """theory.md section 2: the right rule gives p; each wrong one gives the law computed for it there."""
    assert first_token_law(*P3, TOKEN_RULES[name]) == pytest.approx(on_p3, abs=1e-12)
    assert first_token_law(*P4, TOKEN_RULES[name]) == pytest.approx(on_p4, abs=1e-12)
    if name == "right":
        assert first_token_law(*P3, Rejection()) == pytest.approx(on_p3, abs=1e-12)
        assert first_token_law(*P4, Rejection()) == pytest.approx(on_p4, abs=1e-12)


@pytest.mark.parametrize(
    ("pair", "soft_ratio", "x_left_in"),
    [
        (P3, [5 / 6, 0, 1 / 6], [0.75, 0.15, 0.1]),
        (P4, [0.5625, 0.1875, 0, 0.25], [0.36, 0.27, 0.18, 0.19]),
    ],
)
def test_worked_examples_of_an_argmax_draft(pair: Any, soft_ratio: list[float], x_left_in: list[float]) -> None:
    """C1, C3: always the argmax of q: right without q, wrong with a soft q or with x left in the residual."""
    p, q = pair
    best = FixedProposer(lambda tokens, k: [q.index(max(q))] * k)
    rules = {
        Rejection(): p,
        SoftRatio(lambda token: torch.tensor(q, dtype=torch.float64)): soft_ratio,
        TOKEN_RULES["correction from p"]: x_left_in,
    }
    for rule, wanted in rules.items():
        law = output_law(pipeline_of(constant(p), len(p), best, gamma=1, sampler=rule, temperature=1.0), [0], 1)
        assert [law.get((x,), 0.0) for x in range(len(p))] == pytest.approx(wanted, abs=1e-12)


def test_one_uniform_for_accepting_and_correcting() -> None:
    """theory.md section 2: blind on P3, (.325, .375, .2, .1) on P4; all borders of u are multiples of 1/12."""
    for (p, q), wanted in ((P3, P3[0]), (P4, [0.325, 0.375, 0.2, 0.1])):
        law = [0.0] * len(p)
        rows = Rows(torch.tensor([p, p], dtype=torch.float64).log(), GenerationSettings(temperature=1.0))
        for x, mass in enumerate(q):
            for u in ((i + 0.5) / 60 for i in range(60)):
                accepted, y = Rejection().accept([x], rows, torch.tensor([q], dtype=torch.float64), SameUniform(u))
                law[x if accepted else y] += mass / 60
        assert law == pytest.approx(wanted, abs=1e-12)


class SameUniform(Chance):
    """One number for every decision."""

    def __init__(self, u: float) -> None:
        self.u = u

    def passes(self, p: float, q: float) -> bool:
        return self.u * q < p

    def draw(self, law: Tensor) -> int:
        return distribution.draw(law, self.u)


def test_expected_acceptance_of_p3() -> None:
    """C5 and the case book's words: with k drafts .9, 1.71, 2.439, 3.0951 are accepted on average."""
    for k, wanted in enumerate([0.9, 1.71, 2.439, 3.0951], 1):
        pipeline = pipeline_of(constant(P3[0]), V, TableProposer(constant(P3[1]), V), gamma=k, temperature=1.0)
        assert expected_accepted(pipeline) == pytest.approx(wanted, abs=1e-12)


def expected_accepted(pipeline: object) -> float:
    return sum(mass * (len(block) - 1) for block, mass in step_law(pipeline, [0]).items())  # type: ignore[arg-type]


def test_founding_example() -> None:
    """A (p .30, q .10) always, B (p .20, q .25) with .80, C (p .50, q .65) with 10/13; resampling from p is caught."""
    p, q = [0.3, 0.2, 0.5], [0.1, 0.25, 0.65]
    assert first_token_law(p, q, Rejection()) == pytest.approx(p, abs=1e-12)
    assert first_token_law(p, q, TOKEN_RULES["correction from p"]) == pytest.approx([0.16, 0.24, 0.6], abs=1e-12)


def test_argmax_draft_with_one_hot_q() -> None:
    """C1: P3, always token 0: law p; with a soft q in the ratio (5/6, 0, 1/6)."""
    zeros = FixedProposer(lambda tokens, k: [0] * k)
    p = constant(P3[0])
    law = output_law(pipeline_of(p, V, zeros, gamma=1, temperature=1.0), [0], 1)
    assert [law[x,] for x in range(V)] == pytest.approx(P3[0], abs=1e-12)

    class Soft(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            return super().accept(x, p, torch.tensor([P3[1]] * len(x), dtype=torch.float64), chance)

    law = output_law(pipeline_of(p, V, zeros, gamma=1, sampler=Soft(), temperature=1.0), [0], 1)
    assert [law.get((x,), 0.0) for x in range(V)] == pytest.approx([5 / 6, 0, 1 / 6], abs=1e-12)


def test_q_must_be_the_law_drawn_from() -> None:
    """C2: drawn from the top 2 of q: right with that q, (.5, .5, 0) with the raw q."""
    p, raw, top = constant([0.4, 0.6, 0.0]), [0.5, 0.3, 0.2], [0.625, 0.375, 0.0]

    class RawHandedBack(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            return super().accept(x, p, torch.tensor([raw] * len(x), dtype=torch.float64), chance)

    for sampler, wanted in ((Rejection(), [0.4, 0.6, 0.0]), (RawHandedBack(), [0.5, 0.5, 0.0])):
        law = output_law(
            pipeline_of(p, V, TableProposer(constant(top), V), gamma=1, sampler=sampler, temperature=1.0), [0], 1
        )
        assert [law.get((x,), 0.0) for x in range(V)] == pytest.approx(wanted, abs=1e-12)


def test_temperature_reaches_the_verifier() -> None:
    """C14, C15: target (2,1,0), draft (1,2,0) at T = .5: (.8668, .1173, .0159); a verifier left at T = 1 does not."""
    target, draft = torch.tensor([2.0, 1.0, 0.0]).double(), torch.tensor([1.0, 2.0, 0.0]).double()
    proposer = TableProposer(lambda ids: draft / 0.5, V)
    right = output_law(pipeline_of(lambda ids: target, V, proposer, gamma=1, temperature=0.5), [0], 1)
    assert [right[x,] for x in range(V)] == pytest.approx([0.8668, 0.1173, 0.0159], abs=5e-5)
    wrong = output_law(pipeline_of(lambda ids: target, V, proposer, gamma=1, temperature=1.0), [0], 1)
    assert total_variation(right, wrong) == pytest.approx(0.2016, abs=5e-5)


def test_reduced_and_padded_draft_vocabularies() -> None:
    """C18, C19: a q with zeros on ids the draft lacks keeps the law; q read at draft ids is caught (.25, .1, .65)."""
    p = [0.5, 0.3, 0.2]
    scattered = [0.3, 0.1, 0.6]  # P3's q on draft ids that stand for target ids [2, 0, 1]
    assert first_token_law(p, scattered, Rejection()) == pytest.approx(p, abs=1e-12)

    class DraftIds(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            return super().accept(x, p, torch.tensor([P3[1]] * len(x), dtype=torch.float64), chance)

    assert first_token_law(p, scattered, DraftIds()) == pytest.approx([0.25, 0.1, 0.65], abs=1e-12)
    uniform = [1 / 8] * 8
    reduced = [0, 0.3, 0, 0, 0.6, 0, 0, 0.1]
    assert first_token_law(uniform, reduced, Rejection()) == pytest.approx(uniform, abs=1e-12)
