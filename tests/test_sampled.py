"""The sampled-law test end to end: what leaves the shipped pipeline, judged as another engine's output would be.

Wrong samplers must be called biased with the number of tokens that theory.md section 8c states for each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specpipe.audit.finding import FAILED, NOT_APPLICABLE, PASSED, TOO_LITTLE
from specpipe.audit.proposals import ProposerLaw, Watched
from specpipe.audit.reading import Answer
from specpipe.audit.sampled import SampledLaw
from specpipe.chance import Chance
from specpipe.proposers.none import NoProposer
from specpipe.samplers.block import Block
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from tests import contexts
from tests.contexts import ARGMAX, SOFT, ArgmaxDraws, HotDraws, judged, sample
from tests.wrong_rules import (
    TOKEN_RULES,
    BlockResidual,
    FirstFailure,
    LastBelowW,
    OneNoise,
    OtherSettings,
    Reused,
    Unclipped,
    WhileBelowW,
)


def test_the_world_is_the_one_of_the_theory() -> None:
    """V = 64, 997 contexts, mean overlap .69."""
    p, q = (rows.softmax(-1) for rows in contexts.logits())
    assert p.shape == (997, 64)
    assert torch.minimum(p, q).sum(-1).mean().item() == pytest.approx(0.69, abs=0.005)


WRONG: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
    "accept everything": (TOKEN_RULES["accept everything"], SOFT, 100, {}),
    "correction from p": (TOKEN_RULES["correction from p"], SOFT, 500, {}),
    "correction = argmax of p": (TOKEN_RULES["correction = argmax of p"], SOFT, 200, {}),
    "correction = argmax of the residual": (TOKEN_RULES["correction = argmax of the residual"], SOFT, 500, {}),
    "residual |p-q|": (TOKEN_RULES["residual |p-q|"], SOFT, 300, {}),
    "lenience .5": (TOKEN_RULES["min(1, 2p/q)"], SOFT, 200, {}),
    "argmax draft with soft q": (Rejection(), ArgmaxDraws(), 100, {}),
    "one-hot without exclusion": (TOKEN_RULES["correction from p"], ARGMAX, 1000, {}),
    "bonus from q": (TOKEN_RULES["bonus from q"], SOFT, 8000, {}),
    "bonus from the previous row": (TOKEN_RULES["bonus from the previous row"], SOFT, 1500, {}),
    "target at T = .9 instead of 1": (OtherSettings(temperature=0.9), SOFT, 1500, {}),
    "top-p on one side only": (OtherSettings(top_p=1.0), SOFT, 200, {"top_p": 0.9}),
    "drafts at T = 1.3 scored with q at T = 1": (Rejection(), HotDraws(1.3), 1000, {}),
    "one Gumbel noise for draft and correction": (Rejection(), SOFT, 20_000, {"chance": OneNoise}),
    "uniform reused for the next token": (Rejection(), NoProposer(), 5000, {"chance": Reused}),
    "block: stop at first failure": (FirstFailure(), SOFT, 200, {}),
    "block: last u < w": (LastBelowW(), SOFT, 1000, {}),
    "block: accept while u < w, token residual": (WhileBelowW(), SOFT, 2500, {}),
    "block: unclipped product": (Unclipped(), SOFT, 3000, {}),
    "token acceptance, block residual": (BlockResidual(), SOFT, 5000, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_is_biased_with_as_many_tokens_as_theory_states(name: str) -> None:
    """Nine runs in ten are caught; one of two must be here, so that one unlucky run in ten does not decide."""
    sampler, proposer, tokens, settings = WRONG[name]
    reference = proposer if proposer is ARGMAX else SOFT
    for seed in (1, 2):
        pipeline, answers = sample(sampler, proposer, tokens, seed=seed, **settings)
        if judged(pipeline, answers, reference, seed).result == FAILED:
            return
    pytest.fail("was not seen")


@pytest.mark.parametrize("proposer", [SOFT, ARGMAX], ids=["soft q", "one-hot q"])
@pytest.mark.parametrize("sampler", [Rejection, Block, ExactMatch])
def test_right_samplers_raise_no_alarm(sampler: type, proposer: Any) -> None:
    """Four runs each of 500 tokens, at a level of one alarm in a thousand runs."""
    for seed in range(4):
        pipeline, answers = sample(sampler(), proposer, 500, seed=seed)
        finding = judged(pipeline, answers, proposer, seed)
        assert finding.result == TOO_LITTLE, finding.reason
        assert "0.03" in finding.reason


def test_a_verdict_needs_enough_tokens_and_says_how_many() -> None:
    """A proposer that never drafts must not make the test look sharp: p flattened stands in for q."""
    pipeline, answers = sample(Rejection(), NoProposer(), 300, seed=1)
    finding = judged(pipeline, answers, NoProposer(), 1)
    assert finding.result == TOO_LITTLE
    assert finding.numbers["smallest_detectable_tv"] > 0.03
    assert finding.numbers["tokens_needed"] > 300
    assert len(finding.numbers["p_values"]) == 8  # p / q and p are one ordering
    enough = [
        Answer(answer.prompt, answer.output) for answer in answers * (finding.numbers["tokens_needed"] // 300 + 1)
    ]
    assert judged(pipeline, enough, NoProposer(), 1).numbers["smallest_detectable_tv"] <= 0.03


def test_the_same_stream_in_every_request_is_seen() -> None:
    """Each request looks right alone; together they move."""

    class SameForAll(Chance):
        def __init__(self, seed: int, prompt_ids: Any = (), repeat: int = 0) -> None:
            super().__init__(seed)

    pipeline, answers = sample(Rejection(), NoProposer(), 600, seed=1, per_request=60, chance=SameForAll)
    finding = judged(pipeline, answers, NoProposer(), 1)
    assert finding.result == FAILED
    assert "share" in finding.reason


def test_a_file_of_lines_written_twice_is_named_as_such() -> None:
    """Not independent, and the likelier reason is said."""
    pipeline, answers = sample(Rejection(), NoProposer(), 600, seed=1, per_request=60)
    finding = judged(pipeline, [*answers, *answers], NoProposer(), 1)
    assert finding.result == FAILED
    assert "10 of them repeat another" in finding.reason


def test_a_token_outside_the_truncated_law_fails_at_once() -> None:
    """theory.md section 8c, 1: p(x) = 0 beyond the rounding of a threshold."""
    pipeline, answers = sample(Rejection(), SOFT, 100, seed=1, top_k=5)
    p = contexts.target(answers[0].prompt)
    outside = Answer(answers[0].prompt, [int(p.argmin()), *answers[0].output[1:]])
    finding = judged(pipeline, [Answer([1, 2, 3], []), outside], SOFT)
    assert finding.result == FAILED
    assert finding.numbers["impossible"][0] == {"request": 1, "position": 0, "token": int(p.argmin())}


def test_a_token_at_a_threshold_is_a_matter_of_rounding() -> None:
    """The sixth of two nearly equal logits under top_k = 5: another kernel may well have ranked it fifth."""
    pipeline, _ = sample(Rejection(), SOFT, 1, seed=1, top_k=5)
    ranked = contexts.target([1, 2, 3]).sort(descending=True)
    near = contexts.target([1, 2, 3]).clone()
    near[ranked.indices[5]] = ranked.values[4] - 1e-13
    pipeline.verifier.rule = lambda ids: near
    finding = judged(pipeline, [Answer([1, 2, 3], [int(ranked.indices[5])])], NoProposer())
    assert (finding.numbers["impossible"], finding.numbers["outside_by_rounding"]) == ([], 1)


def test_at_temperature_zero_it_has_nothing_to_say() -> None:
    pipeline, answers = sample(Rejection(), SOFT, 50, seed=1, temperature=0.0)
    assert judged(pipeline, answers, SOFT).result == NOT_APPLICABLE


def test_nothing_emitted_is_not_enough_data() -> None:
    pipeline, _ = sample(Rejection(), SOFT, 1, seed=1)
    assert SampledLaw(pipeline.verifier, pipeline.settings, frozenset()).finding().result == TOO_LITTLE


# ---- the proposal contract ----


def watched(proposer: Any, tokens: int, **settings: Any) -> Any:
    watching = Watched(proposer, seed=3)
    sample(Rejection(), watching, tokens, seed=1, **settings)
    return watching.finding()


def test_drafts_that_follow_their_q_pass_and_others_fail() -> None:
    """C2: the histogram of proposals equals the q returned."""
    assert watched(SOFT, 1000).result == PASSED
    wrong = watched(HotDraws(1.3), 1000)
    assert wrong.result == FAILED
    assert len(wrong.numbers["p_values"]) == 6


def test_deterministic_drafts_have_no_q_to_match() -> None:
    finding = watched(ARGMAX, 100)
    assert finding.result == NOT_APPLICABLE
    assert "deterministic" in finding.reason
    assert watched(NoProposer(), 100).result == NOT_APPLICABLE


def test_few_drafts_are_not_enough() -> None:
    assert watched(SOFT, 50).result == TOO_LITTLE


def test_the_reference_depends_on_the_prefix_alone() -> None:
    """Not on where steps began: asked in any order it gives the same law, and never the answer's own tokens."""
    law = ProposerLaw(SOFT, GenerationSettings(temperature=1.0, max_new_tokens=None))
    answer = Answer([1, 2, 3], [4, 5, 6])
    first = [law(answer, t) for t in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, [law(answer, t) for t in range(3)], strict=True))  # type: ignore[arg-type]
    assert torch.allclose(first[1], contexts.draft([1, 2, 3, 4]).softmax(-1))  # type: ignore[arg-type]
    assert ProposerLaw(ARGMAX, GenerationSettings())(answer, 0) == int(contexts.draft([1, 2, 3]).argmax())
    assert ProposerLaw(NoProposer(), GenerationSettings())(answer, 0) is None
