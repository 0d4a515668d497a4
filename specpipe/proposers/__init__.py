"""Proposers: one file each. See `Proposer` for what one must do."""

from __future__ import annotations

from typing import Protocol

from specpipe.draft import Draft
from specpipe.sequence import Sequence


class Proposer(Protocol):
    """Guesses the next tokens of each request. A class with this one method, named in a YAML file, is a proposer.

    One that must know the target also has `bind(target)`, called once before anything is proposed: its vocabulary, its
    device, its layers. It raises UserError for a target it cannot draft for.
    """

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        """At most `lengths[b]` tokens for `sequences[b]`; fewer, or none, is always allowed.

        `sequence.tokens` holds what was committed, prompt included: a proposer with a state of its own catches up
        by reading what it has not read yet. It must not change the sequence. If it draws tokens at random it does so
        with `sequence.chance.propose(q)` and returns those q as `Draft.probs`.
        """
        ...
