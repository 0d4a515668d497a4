"""Greedy identity: every emitted token against plain passes over its own prefix; differences with their gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specpipe.audit.finding import FAILED, PASSED, TOO_LITTLE
from specpipe.audit.greedy import GreedyIdentity
from specpipe.audit.reading import Answer, all_logits, logits_of
from specpipe.audit.rounding import rounding_margin
from specpipe.audit.tables import TableVerifier
from specpipe.settings import GenerationSettings
from tests.stand_ins import context, greedy, pipeline_of, right_but_at, window

V = 11
RULE = context(V)
PROMPTS = [[1, 2, 3], [4], [5, 6]]


def answers_of(length: int = 40, **settings: Any) -> list[Answer]:
    pipeline = pipeline_of(RULE, V, right_but_at(RULE, 1, V), gamma=3, max_new_tokens=length, **settings)
    return [Answer(prompt, done.token_ids) for prompt, done in zip(PROMPTS, pipeline.generate(PROMPTS), strict=True)]


def finding(answers: list[Answer], width: int | None = 4, verifier: Any = None, **settings: Any) -> Any:
    verifier = verifier or pipeline_of(RULE, V, None).verifier
    identity = GreedyIdentity(verifier, GenerationSettings(**settings), frozenset(), width)
    identity.add(answers[:2])
    identity.add(answers[2:])
    return identity.finding()


def test_the_pipelines_greedy_tokens_are_the_plain_ones() -> None:
    found = finding(answers_of())
    assert (found.result, found.numbers["tokens"], found.numbers["differences"]) == (PASSED, 120, [])
    assert found.numbers["identical_requests"] == 3
    assert found.numbers["largest_move"] == 0


def test_penalties_and_bans_are_part_of_the_choice() -> None:
    settings = {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "banned_token_ids": [3]}
    answers = answers_of(**settings)
    assert finding(answers, **settings).result == PASSED
    assert finding(answers).result == FAILED


def test_a_wrong_token_is_listed_with_its_gap_and_those_behind_it_are_judged_on_their_own_prefix() -> None:
    """Texts are not compared past a first difference: one wrong token is one difference."""
    answers = answers_of()
    output = list(answers[1].output)
    output[5] = (output[5] + 1) % V
    output[6:] = greedy(RULE, [*answers[1].prompt, *output[:6]], len(output) - 6)
    found = finding([answers[0], Answer(answers[1].prompt, output), answers[2]])
    assert found.result == FAILED
    [difference] = found.numbers["differences"]
    assert (difference["request"], difference["position"], difference["emitted"]) == (1, 5, output[5])
    assert difference["best"] == answers[1].output[5]
    assert difference["gap"] == pytest.approx(10)
    assert not difference["near_tie"]


@pytest.mark.parametrize(("gap", "result"), [(1e-14, PASSED), (1e-3, FAILED)])
def test_a_difference_is_a_near_tie_only_within_rounding(gap: float, result: str) -> None:
    """Another engine chose the second best; the width of its passes is not known."""
    row = torch.tensor([1.0, 5.0, 5.0 - gap, 0.0], dtype=torch.float64)
    found = finding([Answer([0], [2] * 40), Answer([1], [1] * 80)], None, TableVerifier(lambda ids: row, 4))
    assert found.result == result
    assert len(found.numbers["differences"]) == 40


def test_near_ties_that_nearly_all_go_to_the_second_best_are_not_rounding() -> None:
    """Rounding favours neither: an engine that always takes the second of two close tokens is no greedy one."""
    row = torch.tensor([1.0, 5.0, 5.0 - 1e-14, 0.0], dtype=torch.float64)
    found = finding([Answer([0], [2] * 110), Answer([1], [1] * 10)], None, TableVerifier(lambda ids: row, 4))
    assert (found.result, found.numbers["near_ties"]) == (FAILED, 120)
    assert "110 of 120 near-ties" in found.reason


def test_a_gap_that_no_logit_moved_by_is_no_near_tie() -> None:
    """The same kernels at every width move no logit: then not even the last bit is excused."""
    row = torch.tensor([1.0, 5.0, 5.0 - 1e-14, 0.0], dtype=torch.float64)
    answers = [Answer([0], [2] * 60), Answer([1], [1] * 60)]
    assert finding(answers, 4, TableVerifier(lambda ids: row, 4)).result == FAILED


def test_few_tokens_are_not_enough() -> None:
    assert finding(answers_of(10)).result == TOO_LITTLE
    assert finding([Answer([1], []), Answer([2], [])]).result == TOO_LITTLE


@pytest.mark.parametrize("width", [1, 3, 64])
def test_reading_gives_the_logits_in_front_of_each_token_at_any_width(width: int) -> None:
    """Ragged answers together, an empty one among them, against the rule itself."""
    rule = window(V, 3)
    answers = [Answer([1, 2], [3, 4, 5, 6, 7]), Answer([9], []), Answer([8, 8, 8], [1])]
    verifier = pipeline_of(rule, V, None).verifier
    parts = list(logits_of(verifier, answers, width))
    for number, answer in enumerate(answers):
        rows = torch.cat([part[number] for part in parts])
        wanted = [rule([*answer.prompt, *answer.output[:t]]) for t in range(len(answer.output))]
        assert torch.equal(rows, torch.stack(wanted) if wanted else torch.zeros(0, V).double())
        if answer.output:
            assert torch.equal(rows, all_logits(verifier, answer, width))


def test_the_margin_is_a_few_steps_of_the_precision() -> None:
    """bf16: the spacing is .0625 in [8, 16) and .125 in [16, 32)."""
    assert rounding_margin(torch.tensor([9.0, 2.0]).bfloat16()) == 4 * 0.0625
    assert rounding_margin(torch.tensor([-20.0, 2.0, -torch.inf]).bfloat16()) == 4 * 0.125
    assert rounding_margin(torch.tensor([20.0])) < 0.003
