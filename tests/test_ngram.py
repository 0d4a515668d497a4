"""Prompt lookup: which match, how long, and no memory between requests."""

from __future__ import annotations

import random

import pytest

from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.proposers.ngram import NgramIndex, NgramProposer
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings


def propose(ids: list[int], k: int = 3, stop: tuple[int, ...] = (), **options: int) -> list[int]:
    sequence = Sequence(ids, GenerationSettings(), stop_ids=stop, chance=Chance(0))
    return NgramProposer(**options).propose([sequence], [k]).row(0)[0]


def test_the_most_recent_match_wins() -> None:
    """C40: the leftmost would give 3 9 1."""
    assert propose([1, 2, 3, 9, 1, 2, 4, 1, 2], max_ngram=2, min_ngram=2) == [4, 1, 2]


def test_the_longest_match_wins() -> None:
    assert propose([1, 2, 3, 9, 9, 2, 5, 9, 1, 2], k=1, max_ngram=3) == [3]
    assert propose([1, 2, 3, 9, 9, 2, 5, 9, 1, 2], k=1, max_ngram=1) == [5]


def test_no_shorter_match_than_asked() -> None:
    """C40."""
    assert propose([1, 2, 3, 9, 1, 2, 4, 1, 2], max_ngram=3, min_ngram=3) == []


def test_a_suffix_never_matches_itself() -> None:
    """C40, C28: nothing repeats, or a single token: no proposal, no index error."""
    assert propose([1, 2, 3]) == []
    assert propose([1], max_ngram=3, min_ngram=3) == []
    assert propose([5, 5], k=4) == [5]


@pytest.mark.parametrize(("stop", "wanted"), [((), [9, 4, 1]), ((7,), [9, 4, 1]), ((7, 9), [9])])
def test_a_proposal_ends_behind_a_stop(stop: tuple[int, ...], wanted: list[int]) -> None:
    """C25."""
    assert propose([1, 2, 9, 4, 1, 2], stop=stop, max_ngram=2, min_ngram=2) == wanted


class Keeping(NgramProposer):
    """Reads drafts into its index."""

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        answer = super().extend(sequences, drafts, lengths)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self._indexes[sequence].catch_up([*sequence.tokens, *draft])
        return answer


def test_no_memory_between_requests() -> None:
    """C40: two requests through one proposer give what two fresh ones give."""
    one = NgramProposer()
    texts = [[1, 2, 3, 1, 2], [1, 2, 9, 9, 1, 2], [4, 1, 2]]
    together = [one.propose([Sequence(t, GenerationSettings(), chance=Chance(0))], [3]).row(0)[0] for t in texts]
    assert together == [propose(t) for t in texts]
    sequences = [Sequence(t, GenerationSettings(), chance=Chance(0)) for t in texts]
    batch = one.propose(sequences, [3, 0, 2])
    assert [batch.row(b)[0] for b in range(3)] == [together[0], [], together[2][:2]]


def test_the_growing_index_finds_what_a_rescan_finds() -> None:
    """Tokens arrive in blocks; every lookup equals a search of the whole text, and nothing is read twice."""
    source = random.Random(5)
    for _ in range(50):
        index, tokens = NgramIndex(1, 3), Counting()
        for _ in range(20):
            tokens.extend(source.choices(range(4), k=source.randint(1, 4)))
            index.catch_up(tokens)
            assert index.continuation(tokens, [], 4) == rescan(tokens, 3, 4)
        assert tokens.sliced <= 3 * len(tokens) + 2 * 3 * 20 + 20


@pytest.mark.parametrize("proposer", [NgramProposer, Keeping])
def test_an_extension_is_what_would_be_proposed_had_the_draft_been_committed(proposer: type[NgramProposer]) -> None:
    """And the index stays that of the text alone; one that reads the draft is noticed."""
    source, kept = random.Random(9), 0
    for _ in range(200):
        text, draft = (
            source.choices(range(4), k=source.randint(1, 12)),
            source.choices(range(4), k=source.randint(0, 6)),
        )
        asked, sequence = proposer(), Sequence(text, GenerationSettings(), chance=Chance(0))
        assert asked.extend([sequence], [draft], [5]).row(0)[0] == rescan([*text, *draft], 3, 5)
        index = NgramIndex(1, 3)
        index.catch_up(text)
        kept += vars(asked._indexes[sequence]) != vars(index)
    assert (kept == 0) is (proposer is NgramProposer)


class Counting(list[int]):
    """Counts slices taken of it."""

    sliced = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        self.sliced += isinstance(key, slice)
        return super().__getitem__(key)


def rescan(tokens: list[int], longest: int, k: int) -> list[int]:
    tokens = list(tokens)
    for n in range(longest, 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if n <= len(tokens) and tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


@pytest.mark.parametrize(
    "options", [{"max_ngram": 0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}, {"max_ngram": "x"}]
)
def test_wrong_options_are_refused_by_name(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="ngram"):
        NgramProposer(**options)
