"""Whether an artefact that was loaded back is the draft that it was made from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specpipe.verifier.support import difference


class NotTheSame(RuntimeError):
    """What was written is not what the proposer computes."""


@dataclass(frozen=True)
class Check:
    """Logits of an artefact beside those of the proposer, at `places` places of texts.

    difference: the largest on ids that the draft can say, as a share of their spread. allowed: what rounding explains.
    outside: the largest probability of all other ids together, at temperature 1 in float32. strays: places where the
    best id is one of those. same_law: whether the laws must agree; else the best ids.
    """

    places: int
    difference: float
    allowed: float
    outside: float
    strays: int
    same_law: bool

    def demand(self) -> None:
        """Raise NotTheSame for an artefact that would draft otherwise."""
        if not self.difference <= self.allowed:
            off = f"its logits are off by {self.difference:.2%} of their spread, {self.allowed:.2%} is rounding"
            raise NotTheSame(f"the artefact is not the proposer: {off}")
        if self.strays or (self.same_law and self.outside != 0):
            where = f"with up to {self.outside:.3g} of the probability, best of all at {self.strays} places"
            raise NotTheSame(f"the artefact drafts ids that the proposer cannot say, {where} of {self.places}")


def compare(own: Tensor, written: Tensor, ids: Tensor, *, allowed: float, same_law: bool) -> Check:
    """The two at the same N places.

    Args:
        own: [N, D] the proposer's logits for the ids that it can say.
        written: [N, V] the artefact's logits, float32.
        ids: [D] the artefact's numbers of those ids.
        allowed, same_law: as in `Check`.
    """
    others = written.softmax(-1).index_fill(1, ids, 0.0).sum(-1)
    best_kept = written[:, ids].amax(-1)
    return Check(
        places=len(own),
        difference=difference(written[:, ids], own),
        allowed=allowed,
        outside=others.max().item(),
        strays=int((written.amax(-1) > best_kept).sum()),
        same_law=same_law,
    )
