"""Stop strings and logprobs: text, ids, counters and stream end together, however the tokens came in blocks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from specpipe.audit.tables import FixedProposer, TableProposer
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.settings import GenerationSettings
from tests.stand_ins import ToyTokenizer, constant, pipeline_of

WORDS = [" ha", " x", "ha", "!", "<a", "b>", "c", " end of", " text"]


class Words(ToyTokenizer):
    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(WORDS[i] for i in ids)


def saying(ids: list[int], blocks: tuple[int, ...] = (), **settings: Any) -> Pipeline:
    """A target that says `ids` and then 6 for ever; drafts of the given lengths are always right."""

    def rule(tokens: list[int]) -> torch.Tensor:
        logits = torch.zeros(len(WORDS), dtype=torch.float64)
        logits[[*ids, *[6] * 99][len(tokens) - 1]] = 9.0
        return logits

    lengths = itertools.cycle(blocks or (0,))
    guess = FixedProposer(lambda tokens, k: [*ids, *[6] * 99][len(tokens) - 1 :][: next(lengths)])
    pipeline = pipeline_of(rule, len(WORDS), guess, gamma=6, **{"max_new_tokens": 12} | settings)
    pipeline.text._tokenizer = Words()
    return pipeline


CUTS = [(0,), (1,), (2,), (3,), (5,), (1, 2), (3, 0)]


@pytest.mark.parametrize("blocks", CUTS)
@pytest.mark.parametrize("keep", [True, False])
def test_ids_and_text_end_where_the_stop_string_is_complete(blocks: tuple[int, ...], keep: bool) -> None:
    """C23: " ha" " ha" " ha" " x", stop "ha ha": two ids; " ha ha" kept, " " dropped; the same for each cut."""
    pipeline = saying([0, 0, 0, 1], blocks, stop="ha ha", include_stop_str_in_output=keep, logprobs=1)
    done = pipeline.generate([[0]])[0]
    assert (done.token_ids, done.finish_reason) == ([0, 0], "stop")
    assert done.text == (" ha ha" if keep else " ")
    assert "".join(piece.text for piece in pipeline.stream([0])) == done.text
    assert done.logprobs is not None
    assert len(done.logprobs) == 2
    assert done.spec_decode["num_accepted_draft_tokens"] <= 2


@pytest.mark.parametrize("blocks", CUTS)
@pytest.mark.parametrize(
    ("stop", "ids", "text"),
    [
        (["<ab>"], [2, 4, 5, 6], "ha"),  # spans two tokens
        (["b>c", "a"], [2, 4, 5, 6], "ha<"),  # the first to be complete wins, though another begins later
        (["d of te"], [7, 8, 3], " en"),  # ends inside a token
        (["!"], [3, 0], ""),  # at once
        (["zzz", "nope"], [2, 3], "ha!" + "c" * 10),  # never
    ],
)
def test_several_stop_strings(blocks: tuple[int, ...], stop: list[str], ids: list[int], text: str) -> None:
    pipeline = saying(ids, blocks, stop=stop)
    done = pipeline.generate([[0]])[0]
    assert done.text == ("h" if stop == ["b>c", "a"] else text)
    assert "".join(piece.text for piece in pipeline.stream([0])) == done.text


def test_the_stream_holds_back_what_may_become_a_stop_string() -> None:
    """ "<a" waits for what follows it: dropped with the stop, or shown once it cannot be one."""
    pieces = [piece.text for piece in saying([2, 4, 3, 4, 5], stop="<ab>").stream([0])]
    assert pieces == ["ha", "<a", "!"]


def test_a_stop_string_is_not_looked_for_before_min_new_tokens() -> None:
    done = saying([3, 3, 3, 3], stop="!", min_new_tokens=3).generate([[0]])[0]
    assert (done.token_ids, done.text) == ([3, 3, 3], "!!")
    # the tail that a longer stop string needs does not show an early "!" again
    done = saying([3, 0, 0, 0], stop=["!", "zzzzzzzz"], min_new_tokens=2).generate([[0]])[0]
    assert done.finish_reason == "length"


def test_a_stop_id_leaves_the_text_whole() -> None:
    pipeline = saying([2, 3, 2], stop="zzz", stop_token_ids=[3])
    assert pipeline.generate([[0]])[0].text == "ha!"


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], 5, False, 0, {"a": 1}])
def test_empty_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(UserError, match="stop"):
        GenerationSettings(stop=stop)


# ---- logprobs ----

P3, Q3 = constant([0.5, 0.3, 0.2]), constant([0.6, 0.3, 0.1])


def test_logprobs_are_of_the_targets_row_for_every_kind_of_token() -> None:
    """C41: accepted 0: ln .5, not ln .6; correction 2: ln .2, though the residual gives it 1; bonus 1: ln .3."""
    pipeline = pipeline_of(P3, 3, TableProposer(Q3, 3), gamma=2, temperature=1.0, max_new_tokens=200, logprobs=3)
    sequence = pipeline.sequences([[0]])[0]
    seen = set()
    for step in pipeline.decode(sequence):
        assert step.logprobs is not None
        for entry, token, kind in zip(step.logprobs, step.tokens, step.kinds, strict=True):
            assert entry.token == token
            assert entry.logprob == pytest.approx(math.log([0.5, 0.3, 0.2][token]))
            assert [i for i, _ in entry.top] == [0, 1, 2]
            seen.add(kind)
    assert seen >= {"accepted", "correction", "bonus"}


def test_logprobs_come_from_the_row_of_their_place() -> None:
    """C41: rows that differ, so a shift shows; accepted, rejected and bonus places, raw and processed."""

    def rule(ids: list[int]) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64).roll(len(ids))

    guess = FixedProposer(
        lambda tokens, k: [int(rule([*tokens, *[0] * i]).argmax()) if i != 1 else 0 for i in range(k)]
    )
    for mode, temperature in (("raw", 1.0), ("processed", 0.5)):
        pipeline = pipeline_of(
            rule, 4, guess, gamma=3, temperature=0.5, max_new_tokens=30, logprobs=1, logprobs_mode=mode
        )
        done = pipeline.generate([[1]])[0]
        assert done.logprobs is not None
        for place, (entry, token) in enumerate(zip(done.logprobs, done.token_ids, strict=True)):
            law = (rule([1, *done.token_ids[:place]]) / temperature).log_softmax(-1)
            assert entry.logprob == pytest.approx(law[token].item())
            assert entry.top == [(int(law.argmax()), pytest.approx(law.max().item()))]


def test_no_logprobs_unless_asked_for() -> None:
    assert pipeline_of(P3, 3, TableProposer(Q3, 3), max_new_tokens=5).generate([[0]])[0].logprobs is None
    done = pipeline_of(P3, 3, TableProposer(Q3, 3), max_new_tokens=5, logprobs=0).generate([[0]])[0]
    assert done.logprobs is not None
    assert [entry.top for entry in done.logprobs] == [[]] * 5
