"""Where a block ends: stops, limits, and what is counted."""

from __future__ import annotations

import pytest

from specpipe.audit.tables import FixedProposer
from specpipe.chance import Chance
from specpipe.errors import UserError
from specpipe.sequence import Sequence, Step
from specpipe.settings import GenerationSettings
from specpipe.stats import completion, pooled_interval, spec_decode, summarise
from tests.stand_ins import chain, greedy, pipeline_of, right_but_at


def sequence(cap: int | None = 5, stop: tuple[int, ...] = (), context: int | None = None, prompt: int = 1) -> Sequence:
    settings = GenerationSettings(max_new_tokens=cap)
    return Sequence([1] * prompt, settings, stop_ids=stop, context=context, chance=Chance(0))


S = 99


@pytest.mark.parametrize(
    ("block", "kept", "reason"),
    [
        ([10, 11, S, 20, 21, 22], [10, 11, S], "stop"),
        ([10, 11, 20, 21, 22, S], [10, 11, 20, 21, 22], "length"),
        ([10, 11, 20, 21, S, 22], [10, 11, 20, 21, S], "stop"),
    ],
)
def test_stop_and_length_inside_a_block(block: list[int], kept: list[int], reason: str) -> None:
    """C22: the stop is looked for before the cap, token by token."""
    one = sequence(5, (S,))
    one.commit(block, len(block) - 1, [1.0] * (len(block) - 1))
    assert (one.new_tokens, one.finish_reason) == (kept, reason)


@pytest.mark.parametrize("j", range(1, 7))
def test_eos_accepted_inside_a_block_ends_the_request(j: int) -> None:
    """C21."""
    rule = chain(32)
    pipeline = pipeline_of(rule, 32, right_but_at(rule, -1, 32), gamma=5, eos=3 + j, max_new_tokens=20)
    done = pipeline.generate([[3]])[0]
    assert done.token_ids == list(range(4, 4 + j))
    assert done.finish_reason == "stop"
    assert "".join(piece.text for piece in pipeline.stream([3])) == done.text


def test_eos_in_a_rejected_draft_ends_nothing() -> None:
    """C24."""
    pipeline = pipeline_of(chain(32), 32, FixedProposer(lambda tokens, k: [31] * k), gamma=3, eos=31, max_new_tokens=10)
    done = pipeline.generate([[3]])[0]
    assert done.token_ids == list(range(4, 14))
    assert done.finish_reason == "length"
    assert done.spec_decode["num_accepted_draft_tokens"] == 0


@pytest.mark.parametrize("eos", [None, 7, [7, 9]])
def test_end_of_text_ids_may_be_none_one_or_several(eos: int | list[int] | None) -> None:
    """C25."""
    done = pipeline_of(chain(32), 32, FixedProposer(lambda t, k: []), eos=eos, max_new_tokens=8).generate([[5]])[0]
    assert done.token_ids == ([6, 7] if eos else list(range(6, 14)))


def test_own_stop_ids_join_the_models_and_eos_can_be_ignored() -> None:
    plain = FixedProposer(lambda t, k: [])
    own = pipeline_of(chain(32), 32, plain, eos=9, stop_token_ids=[8], max_new_tokens=20).generate([[5]])[0]
    assert own.token_ids == [6, 7, 8]
    ignoring = pipeline_of(chain(32), 32, plain, eos=9, ignore_eos=True, max_new_tokens=6).generate([[5]])[0]
    assert ignoring.token_ids == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("cap", range(6))
def test_never_one_token_more_than_asked(cap: int) -> None:
    """C26: at 0 the result is empty and no decoding step is run."""
    from specpipe.proposers.ngram import NgramProposer

    pipeline = pipeline_of(chain(4), 4, NgramProposer(), gamma=3, max_new_tokens=cap)
    done = pipeline.generate([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]])[0]
    assert done.token_ids == [2, 3, 0, 1, 2][:cap]
    assert done.finish_reason == "length"
    assert bool(pipeline.verifier.target.model.calls) == (cap > 0)


@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
@pytest.mark.parametrize("prompt", [3, 9, 10])
def test_the_context_end_is_reached_exactly(prompt: int, gamma: int) -> None:
    rule = chain(32)
    pipeline = pipeline_of(rule, 32, right_but_at(rule, -1, 32), gamma=gamma, context=10, max_new_tokens=None)
    done = pipeline.generate([list(range(prompt))])[0]
    assert done.token_ids == list(range(prompt, 10))
    assert done.finish_reason == "context"
    positions = [i for call in pipeline.verifier.target.model.calls for i in call.positions[0]]
    assert max(positions, default=0) < 10


def test_prompts_that_cannot_be_decoded_are_refused() -> None:
    """C28: empty, or longer than the context; named by number before anything is decoded."""
    pipeline = pipeline_of(chain(32), 32, FixedProposer(lambda t, k: []), context=10)
    with pytest.raises(UserError, match="no tokens"):
        pipeline.generate([[]])
    with pytest.raises(UserError, match="number 2: 11 tokens do not fit the target's context of 10"):
        pipeline.generate([[1], [1] * 11])
    assert not pipeline.verifier.target.model.calls
    with pytest.raises(UserError, match="max_new_tokens"):
        pipeline_of(chain(32), 32, FixedProposer(lambda t, k: []), max_new_tokens=None).generate([[1]])


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5, 8])
def test_room_leaves_a_place_for_the_extra_token(gamma: int) -> None:
    assert sequence(4).room(gamma) == min(gamma, 3)
    assert sequence(None, context=4, prompt=2).room(gamma) == min(gamma, 1)
    assert sequence(1).room(gamma) == 0


def steps(*accepted: int, k: int = 4, stop_at: int | None = None) -> list[Step]:
    """Rounds of k drafts; the last one meets a stop as its `stop_at`-th token."""
    one = sequence(1000, (S,))
    for i, n in enumerate(accepted):
        block = [1] * (n + 1)
        if stop_at and i == len(accepted) - 1:
            block[stop_at - 1] = S
        one.commit(block, k, [1.0] * min(n + 1, k))
    return one.steps


def test_counters_of_the_worked_example() -> None:
    """theory.md section 1: k = 4, N = 4, 0, 2."""
    counts = spec_decode(steps(4, 0, 2), 4)
    assert (counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]) == (12, 6)
    assert counts["draft_acceptance_rate"] == 0.5
    assert counts["mean_acceptance_length"] == 3.0
    assert counts["acceptance_histogram"] == [1, 0, 1, 0, 1]
    assert counts["per_position_acceptance"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert counts["per_position_conditional"] == pytest.approx([2 / 3, 1, 1 / 2, 1])
    assert sum(len(step.overlaps) for step in steps(4, 0, 2)) == 8


@pytest.mark.parametrize(
    ("stop_at", "accepted", "tokens", "places", "verified", "length"),
    [(2, 6, 8, [2 / 3, 2 / 3, 1 / 3, 1 / 3], 7, 3.0), (1, 5, 7, [2 / 3, 1 / 3, 1 / 3, 1 / 3], 6, 8 / 3)],
)
def test_what_lies_behind_a_stop_is_not_counted(
    stop_at: int, accepted: int, tokens: int, places: list[float], verified: int, length: float
) -> None:
    """C43: the drafts were scored, so they stay drafted; what follows the stop leaves every numerator."""
    made = steps(4, 0, 2, stop_at=stop_at)
    counts = spec_decode(made, 4)
    assert (counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]) == (12, accepted)
    assert sum(len(step.tokens) for step in made) == tokens
    assert counts["per_position_acceptance"] == pytest.approx(places)
    assert counts["mean_acceptance_length"] == pytest.approx(length)
    assert sum(len(step.overlaps) for step in made) == verified


def test_nothing_drafted_means_no_rate() -> None:
    """C43: null, not 0 and not an error; plain steps are counted."""
    made = steps(0, 0, k=0)
    counts = spec_decode(made, 4)
    assert counts["draft_acceptance_rate"] is None
    assert counts["mean_acceptance_length"] is None
    assert (counts["num_spec_steps"], counts["num_plain_steps"]) == (0, 2)
    assert counts["per_position_acceptance"] == [None] * 4
    assert summarise([], 4)["alpha"] == {"mean": None, "low": None, "high": None}


def test_rates_are_pooled_not_averaged() -> None:
    """C44: seven requests with 1 of 10, one with 900 of 1000: 907/1070, not .2; one without drafts adds nothing."""
    requests = [(1.0, 10.0)] * 7 + [(900.0, 1000.0), (0.0, 0.0)]
    mean, low, high = pooled_interval(requests)
    assert mean == pytest.approx(907 / 1070)
    assert low is not None
    assert high is not None
    assert 0 <= low < mean < high <= 1
    assert sum(a / m for a, m in requests if m) / 8 == pytest.approx(0.2)


def test_interval_is_clustered_by_request() -> None:
    """theory.md section 7, by hand for three requests; none for fewer than two."""
    a, m = [8.0, 3.0, 6.0], [10.0, 6.0, 8.0]
    theta = 17 / 24
    se = (3 / 2 * sum((x - theta * n) ** 2 for x, n in zip(a, m, strict=True))) ** 0.5 / 24
    mean, low, high = pooled_interval(zip(a, m, strict=True))
    assert (mean, low, high) == pytest.approx((theta, theta - 4.302653 * se, min(1, theta + 4.302653 * se)), abs=1e-6)
    assert pooled_interval([(1, 2)]) == (0.5, None, None)


def test_alpha_is_the_mean_overlap_of_verified_places() -> None:
    """P3 drafted by its own q: every verified place has overlap .9."""
    from specpipe.audit.tables import TableProposer
    from tests.stand_ins import constant

    p, q = constant([0.5, 0.3, 0.2]), constant([0.6, 0.3, 0.1])
    done = pipeline_of(p, 3, TableProposer(q, 3), gamma=3, temperature=1.0, max_new_tokens=40).generate([[0]])[0]
    assert done.alpha == pytest.approx(0.9)


def test_an_unfinished_request_is_interrupted() -> None:
    one = sequence()
    assert completion("a", one, "", 4).finish_reason == "interrupted"


def test_kinds_name_where_each_token_came_from() -> None:
    assert [step.kinds for step in steps(2, 0, 4)] == [
        ["accepted", "accepted", "correction"],
        ["correction"],
        ["accepted"] * 4 + ["bonus"],
    ]
    assert steps(0, k=0)[0].kinds == ["plain"]
    assert steps(2, stop_at=1)[0].kinds == ["accepted"]


def test_greedy_helper_matches_the_anchors() -> None:
    """The stand-ins themselves, against the case book."""
    from tests.stand_ins import context, window

    assert greedy(chain(32), [3], 8) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert greedy(context(11), [1, 2, 3], 10) == [7, 3, 6, 1, 2, 4, 8, 5, 10, 9]
    assert greedy(window(11, 8), [1, 2, 3, 4, 5, 6], 20) == [
        0,
        0,
        0,
        10,
        7,
        0,
        7,
        9,
        1,
        2,
        4,
        8,
        6,
        5,
        10,
        2,
        6,
        0,
        9,
        3,
    ]
