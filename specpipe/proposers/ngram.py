"""Prompt lookup: continue as the text did after the last occurrence of its final n tokens.

Longest n first, most recent occurrence, over prompt and output (github.com/apoorvumang/prompt-lookup-decoding). The
index grows with each committed token and is never rebuilt; rejected drafts do not enter it.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from specpipe.draft import Draft
from specpipe.errors import UserError, integer
from specpipe.sequence import Sequence

LONGEST = 1000  # suffix; each length has a dictionary of its own


class NgramProposer:
    """Looks the longest suffix of `max_ngram` down to `min_ngram` tokens up in the request's own text.

    Args:
        max_ngram: longest suffix looked up, in tokens.
        min_ngram: shortest suffix that may propose, in tokens.
    """

    keeps_nothing = True

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_ngram = integer("max_ngram", max_ngram, 1, LONGEST)
        self.min_ngram = integer("min_ngram", min_ngram, 1)
        if self.min_ngram > self.max_ngram:
            raise UserError(f"{min_ngram} is above max_ngram ({max_ngram}).", key="min_ngram")
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """As in `Extender`: what `propose` would give behind the drafts, had they been committed."""
        rows = zip(sequences, drafts, lengths, strict=True)
        return Draft.of([self._continue(sequence, draft, k) for sequence, draft, k in rows])

    def _continue(self, sequence: Sequence, draft: list[int], k: int) -> list[int]:
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = NgramIndex(self.min_ngram, self.max_ngram)
        index.catch_up(sequence.tokens)
        proposal = index.continuation(sequence.tokens, draft, k)
        stop = next((i for i, token in enumerate(proposal) if token in sequence.stop_ids), None)
        return proposal if stop is None else proposal[: stop + 1]  # nothing is worth guessing behind a stop


class NgramIndex:
    """Where each n-gram of one text last occurred: one dictionary per n, one entry per token and n."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(max_ngram, min_ngram - 1, -1)}
        self._read = 0

    def catch_up(self, tokens: Tokens[int]) -> None:
        """Index every n-gram that has a successor; the one at the very end has none and so cannot match itself."""
        for i in range(self._read, len(tokens)):
            for n, after in self._after.items():
                if i >= n:
                    after[tuple(tokens[i - n : i])] = i
        self._read = len(tokens)

    def continuation(self, tokens: Tokens[int], draft: list[int], k: int) -> list[int]:
        """Up to k tokens that followed the longest matching suffix of text and draft, or [] if none occurred before.

        The draft is searched beside the index, which knows the text alone.
        """
        longest = next(iter(self._after))
        start = max(0, len(tokens) - longest)
        end = [*tokens[start:], *draft]
        for n, after in self._after.items():
            if n > len(end):
                continue
            suffix = end[-n:]
            inside = (i for i in range(len(end) - 1, len(end) - len(draft) - 1, -1) if end[max(0, i - n) : i] == suffix)
            i = next((start + i for i in inside), after.get(tuple(suffix)))
            if i is not None:
                return [*tokens[i : i + k], *draft[max(0, i - len(tokens)) :]][:k]
        return []
