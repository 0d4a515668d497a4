"""Predictions of a bench: what is overheard beside plain decoding fixes the steps of every cell exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specpipe.audit.tables import TableProposer, table
from specpipe.bench.figures import Cost
from specpipe.bench.forecast import Guesses, Overhearing, _walked, expected_error, overhear, predicted
from specpipe.bench.record import Decoded
from specpipe.draft_length import Fixed
from specpipe.prompts import Prompts
from specpipe.proposers.layer_skip import LayerSkip
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.none import NoProposer
from specpipe.proposers.suffix import SuffixProposer
from specpipe.samplers.block import Block
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Step
from specpipe.walk import sampled_walk
from tests.stand_ins import chain, pipeline_of, right_but_at, window

SIZE = 5
TEXTS = Prompts(["abcabca", "aabbccd", "eda"], None)
UNIT = {k: Cost(1, 0.0, 1.0, 0.0) for k in range(9)}  # every step takes a second, whatever it drafts


def plainly(rule: Any, **settings: Any) -> Any:
    return pipeline_of(rule, SIZE, NoProposer(), gamma=0, max_new_tokens=24, **settings)


def told() -> None:
    pass


MAKERS = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "suffix without memory": lambda: SuffixProposer(max_cached_tokens=0),
    "right but at the third": lambda: right_but_at(chain(SIZE), 2, SIZE),
}


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("rule", [window(SIZE, 2), chain(SIZE), table(SIZE, 1)], ids=["window", "chain", "table"])
def test_greedy_steps_are_foretold_exactly(name: str, gamma: int, rule: Any) -> None:
    base = plainly(rule)
    guesses = overhear(base, {name: MAKERS[name]()}, 5, TEXTS, 1, told)[name]
    pipeline = base.drafting_with(MAKERS[name]()).variant(
        sampler=Rejection(), settings=base.settings, num_speculative_tokens=gamma, draft_length=Fixed()
    )
    for prompt, text in zip(TEXTS.texts, guesses, strict=True):
        sequence = pipeline.sequences([prompt])[0]
        steps = [step for step in pipeline.decode(sequence) if not step.prefill]
        tokens, seconds = _walked(text, gamma, "rejection", UNIT)
        assert tokens == sum(len(step.tokens) for step in steps)
        assert seconds == len(steps)
        shares = {k: Cost(1, 0.0, float(k), 0.0) for k in range(9)}
        assert _walked(text, gamma, "rejection", shares)[1] == sum(step.drafted for step in steps)


def test_what_is_overheard_does_not_change_the_text() -> None:
    base = plainly(table(SIZE, 1), temperature=1.0, seed=3)
    heard = {"a": NgramProposer(), "b": TableProposer(table(SIZE, 2), SIZE)}
    alone = [each.token_ids for each in base.generate(TEXTS.texts)]
    ears = Overhearing(heard, 4)
    pipeline = base.drafting_with(ears).variant(
        sampler=ears, settings=base.settings, num_speculative_tokens=4, draft_length=Fixed()
    )
    assert [each.token_ids for each in pipeline.generate(TEXTS.texts)] == alone


@pytest.mark.parametrize("rule", ["rejection", "block", "exact_match"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_drawn_laws_are_noted_at_each_place(rule: str, batch_size: int) -> None:
    p, q = table(SIZE, 1), table(SIZE, 2)
    base = plainly(p, temperature=1.0, seed=3)
    guesses = overhear(base, {"table": TableProposer(q, SIZE)}, 3, TEXTS, batch_size, told)["table"]
    for prompt, text in zip(TEXTS.texts, guesses, strict=True):
        sequence = base.sequences([prompt])[0]
        for _ in base.decode(sequence):
            pass
        start, ids = sequence.prompt_length, sequence.tokens
        laws = [
            (p(ids[:t]).softmax(0)[ids[t]].item(), q(ids[:t]).softmax(0)[ids[t]].item()) for t in range(start, len(ids))
        ]
        noted = list(zip(text.p, text.q, strict=True))
        assert noted[:-1] == [pytest.approx(each, rel=1e-5) for each in laws[:-1]]  # there is no draft of the last
        d = torch.tensor([b if rule == "exact_match" else b / a for a, b in laws])
        tokens, seconds = _walked(text, 3, rule, UNIT)
        whole = sampled_walk(d, 3, rule)
        assert seconds == pytest.approx(whole.steps - 1, rel=1e-4)
        assert tokens + 1 <= whole.tokens + 1e-9


def test_layers_of_the_target_are_overheard_without_harm_to_its_cache() -> None:
    base = plainly(window(SIZE, 2))
    proposer = LayerSkip(layers=1)
    pipeline = base.drafting_with(proposer)
    alone = [each.token_ids for each in base.generate(TEXTS.texts)]
    guesses = overhear(base, {"layers": pipeline.proposer}, 3, TEXTS, 1, told)["layers"]
    decoded = pipeline.variant(sampler=Block(), settings=base.settings, num_speculative_tokens=3, draft_length=Fixed())
    for prompt, ids, text in zip(TEXTS.texts, alone, guesses, strict=True):
        sequence = decoded.sequences([prompt])[0]
        steps = [step for step in decoded.decode(sequence) if not step.prefill]
        assert sequence.new_tokens == ids
        assert _walked(text, 3, "block", UNIT) == (sum(len(s.tokens) for s in steps), len(steps))


# ---- from steps to a speedup ----


def decoded(prompt: int, drafted: int, accepted: int, seconds: float, steps: int = 4) -> Decoded:
    made = []
    for _ in range(steps):
        step = Step(drafted, accepted, [0] * (accepted + 1), [])
        step.seconds = {"verify": seconds}
        made.append(step)
    return Decoded(0, prompt, prompt, None, made)


def text(prompt: int, places: int = 13, drafted: int = 2, kept: int = 2) -> Guesses:
    return Guesses(prompt, [0] + [drafted] * (places - 1), [0] + [kept] * (places - 1), [], [])


def test_each_half_is_predicted_with_the_costs_of_the_other() -> None:
    plain = [decoded(0, 0, 0, 1.0), decoded(1, 0, 0, 2.0)]
    ours = [decoded(0, 2, 2, 1.5), decoded(1, 2, 2, 2.5)]
    # 12 tokens of each text in 4 steps; prompt 0 takes prompt 1's seconds, and the other way round
    expected = (12 * 2.0 + 12 * 1.0) / (4 * 2.5 + 4 * 1.5)
    assert predicted([text(0), text(1)], 2, "rejection", ours, plain) == pytest.approx(expected)


def test_a_prediction_does_not_look_at_its_own_acceptance() -> None:
    plain = [decoded(p, 0, 0, 1.0) for p in (0, 1)]
    good, bad = ([decoded(p, 2, accepted, 1.5) for p in (0, 1)] for accepted in (2, 0))
    guesses = [text(0), text(1)]
    assert predicted(guesses, 2, "rejection", good, plain) == predicted(guesses, 2, "rejection", bad, plain)


def test_lengths_between_those_that_were_timed_are_interpolated() -> None:
    costs = {0: Cost(1, 0.0, 1.0, 0.0), 4: Cost(1, 0.0, 3.0, 0.0)}
    tokens, seconds = _walked(text(0, places=7, drafted=2, kept=2), 4, "rejection", costs)
    assert (tokens, seconds) == (6, 2.0 + 2.0)


def test_one_prompt_alone_is_not_predicted() -> None:
    assert predicted([text(0)], 2, "rejection", [decoded(0, 2, 2, 1.5)], [decoded(0, 0, 0, 1.0)]) is None


def test_errors_are_relative_and_unsigned() -> None:
    assert expected_error([(1.1, 1.0), (0.9, 1.0), (None, 1.0), (1.0, None)]) == (pytest.approx(0.1), 2)
    assert expected_error([]) == (None, 0)
