"""Plain decoding: no drafts. The baseline of every speedup, through the same loop."""

from __future__ import annotations

from specpipe.draft import Draft
from specpipe.sequence import Sequence


class NoProposer:
    """Never proposes."""

    keeps_nothing = True

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return Draft.of([[] for _ in sequences])
