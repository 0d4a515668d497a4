"""Several proposers in order: the first that has a draft for a request drafts for it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import torch
from omegaconf import OmegaConf

from specpipe.config import build, option
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.proposers import Proposer
from specpipe.sequence import Sequence


class Cascade:
    """Asks its members one after another; each is asked only for the requests that still have no draft.

    Args:
        members: options of the group `proposer` by name, or mappings with a `_target_`; cheap and sure ones first.
    """

    def __init__(self, *, members: Items[str | Mapping[str, Any]] = ("suffix", "ngram")) -> None:
        if isinstance(members, (str, Mapping)) or not isinstance(members, Items) or not members:
            raise UserError(f"{members!r} is not a list of proposers such as [suffix,ngram].", key="members")
        self._members = dict(_member(each, number) for number, each in enumerate(members))
        if len(self._members) < len(members):
            raise UserError(f"{list(members)!r} names one proposer twice.", key="members")

    def bind(self, target: Any) -> None:
        """Hand the target to the members that want it."""
        for number, proposer in enumerate(self._members.values()):
            if hasattr(proposer, "bind"):
                try:
                    proposer.bind(target)
                except UserError as error:
                    raise error.under(f"members[{number}]") from error
        self._size = target.vocabulary

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        rows: list[tuple[list[int], torch.Tensor | None]] = [([], None) for _ in sequences]
        sources: list[str | None] = [None for _ in sequences]
        for name, proposer in self._members.items():
            waiting = [b for b, (x, _) in enumerate(rows) if not x and lengths[b]]
            if not waiting:
                break
            draft = proposer.propose([sequences[b] for b in waiting], [lengths[b] for b in waiting])
            for i, b in enumerate(waiting):
                rows[b] = draft.row(i)
                sources[b] = name if rows[b][0] else None
        return self._together(rows, sources)

    def _together(self, rows: list[tuple[list[int], torch.Tensor | None]], sources: list[str | None]) -> Draft:
        """One draft; beside rows with a q, deterministic ones get theirs, which is one-hot."""
        plain = Draft.of([x for x, _ in rows])
        some = next((q for _, q in rows if q is not None), None)
        if some is None:
            return Draft(plain.tokens, plain.lengths, None, sources)
        probs = some.new_zeros(*plain.tokens.shape, self._size)
        for b, (x, q) in enumerate(rows):
            if q is None:
                probs[b, range(len(x)), x] = 1
            else:
                probs[b, : len(x)] = q
        return Draft(plain.tokens, plain.lengths, probs, sources)


def _member(given: Any, number: int) -> tuple[str, Proposer]:
    key = f"members[{number}]"
    if isinstance(given, str):
        return given, build(option("proposer", given), key)
    if not isinstance(given, Mapping) or "_target_" not in given:
        raise UserError(f"{given!r} is neither a proposer's name nor a mapping with a _target_.", key=key)
    return str(given["_target_"]).rpartition(".")[2], build(OmegaConf.create(dict(given)), key)
