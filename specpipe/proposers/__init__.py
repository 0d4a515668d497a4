"""Proposers: one file each. See `Proposer` for what one must do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from specpipe.draft import Draft
from specpipe.sequence import Sequence


class Proposer(Protocol):
    """Guesses the next tokens of each request. A class with this one method, named in a YAML file, is a proposer.

    One that can go on from a draft that was not committed is an `Extender`, which a cascade makes use of.

    One that must know the target also has `bind(target)`, called once before anything is proposed: its vocabulary, its
    device, its layers. It raises UserError for a target it cannot draft for.

    Two things that a class may say of itself as attributes, for `bench`. `keeps_nothing = True`: what it drafts depends
    on the request alone, never on those before it. `q_by_prefix = True`: the q of a drawn token depends on the text
    before it alone, not on where the draft began.

    One that can use what the verifier keeps of the pipeline's requests also has `attach(verifier)`, which the pipeline
    that it drafts for calls behind `bind`. It must draft without that call too, for requests that no verifier reads.

    One that holds memory which it can fill again has `forget()`, called when there is no memory for a batch.
    """

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        """At most `lengths[b]` tokens for `sequences[b]`; fewer, or none, is always allowed.

        `sequence.tokens` holds what was committed, prompt included: a proposer with a state of its own catches up
        by reading what it has not read yet. It must not change the sequence. If it draws tokens at random it does so
        with `sequence.chance.propose(q)` and returns those q as `Draft.probs`.
        """
        ...


@runtime_checkable
class Extender(Proposer, Protocol):
    """A proposer that can lengthen what another one drafted."""

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """At most `lengths[b]` tokens behind `sequences[b].tokens + drafts[b]`; the answer holds these tokens only.

        As `propose` would behind the drafts, had they been committed; where a draft is empty it is `propose`. No draft
        holds a stop id. Drafts may be rejected: they must not enter any state that outlives the call.
        """
        ...
