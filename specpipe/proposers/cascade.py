"""Several proposers in order: the first that has a draft for a request drafts for it; others may lengthen it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import torch

from specpipe.config import build, chosen
from specpipe.draft import Draft, asked_of
from specpipe.errors import UserError, flag, having
from specpipe.proposers import Extender, Proposer
from specpipe.sequence import Sequence

DEFAULT = ("suffix", "mlp")
TRAINED, OTHERWISE = "mlp", "ngram"

Row = tuple[list[int], torch.Tensor | None]  # a draft of one request, as `Draft.row` gives it


class Cascade:
    """Asks its members one after another; each is asked only for the requests that still have no draft.

    With `extend` a member that can is also asked to lengthen the drafts of those before it where there is room, unless
    they end the text. It goes on from the draft as if that had been committed, so that every token's law is that of its
    own member behind all tokens before it: the law of the text is kept.

    `Draft.sources` names who drafted first. `summary.members` counts a draft as a whole for that member: the tokens of
    another behind it are only reached if all of the first one's are accepted.

    Args:
        members: options of the group `proposer` by name, `{ngram: {max_ngram: 4}}` for one with other settings, or
            mappings with a `_target_`; cheap and sure ones first.
            None: `suffix`, and behind it `mlp` for a target that the shipped heads are for, `ngram` for any other.
        extend: let later members lengthen short drafts. Off, since the drafts of `suffix` end where one more token is
            not worth its scoring; on, it gives more tokens per pass, and is for members that stop for other reasons.
    """

    def __init__(self, *, members: Items[str | Mapping[str, Any]] | None = None, extend: bool = False) -> None:
        self._trained_if_it_fits = members is None
        members = DEFAULT if members is None else members
        if isinstance(members, (str, Mapping)) or not isinstance(members, Items) or not members:
            raise UserError(f"{members!r} is not a list of proposers such as [suffix,ngram].", key="members")
        if any(isinstance(each, str) and list(members).count(each) > 1 for each in members):
            raise UserError(f"{list(members)!r} names one proposer twice.", key="members")
        self._members: dict[str, Proposer] = {}
        for number, each in enumerate(members):
            name, proposer = _member(each, number)
            again = sum(known.partition(" ")[0] == name for known in self._members)
            self._members[f"{name} {again + 1}" if again else name] = proposer
        self._extends = flag("extend", extend)

    @property
    def keeps_nothing(self) -> bool:
        return all(getattr(proposer, "keeps_nothing", False) for proposer in self._members.values())

    def bind(self, target: Any) -> None:
        """Hand the target to the members that want it."""
        self._size = target.vocabulary
        if self._trained_if_it_fits and not _fits(self._members[TRAINED], target):
            del self._members[TRAINED]
            self._members[OTHERWISE] = _member(OTHERWISE, len(self._members))[1]
        for number, proposer in enumerate(self._members.values()):
            if hasattr(proposer, "bind"):
                try:
                    proposer.bind(target)
                except UserError as error:
                    raise error.under(f"members[{number}]") from error

    def attach(self, verifier: Any) -> None:
        """Hand the verifier to the members that can use it."""
        for proposer in self._members.values():
            if hasattr(proposer, "attach"):
                proposer.attach(verifier)

    def forget(self) -> None:
        """Have the members let go of what they can fill again."""
        for proposer in self._members.values():
            if hasattr(proposer, "forget"):
                proposer.forget()

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        rows: list[Row] = [([], None) for _ in sequences]
        sources: list[str | None] = [None for _ in sequences]
        for name, proposer in self._members.items():
            extender = proposer if self._extends and isinstance(proposer, Extender) else None
            asked = [b for b, (x, _) in enumerate(rows) if len(x) < lengths[b] and (not x or extender)]
            asked = [b for b in asked if sequences[b].stop_ids.isdisjoint(rows[b][0])]
            if not asked:
                continue
            askers, room = [sequences[b] for b in asked], [lengths[b] - len(rows[b][0]) for b in asked]
            given = [rows[b][0] for b in asked]
            ask = partial(extender.extend, askers, given) if extender else partial(proposer.propose, askers)
            draft = asked_of(name, partial(ask, room), room, self._size)
            for i, b in enumerate(asked):
                if draft.lengths[i]:
                    sources[b] = sources[b] or name
                    rows[b] = _in_one(rows[b], draft.row(i))
        return Draft.joined(rows, self._size, sources)


def _in_one(row: Row, more: Row) -> Row:
    """A draft and what lengthens it; beside tokens with a q, deterministic ones get theirs, which is one-hot."""
    (x, q), (y, r) = row, more
    if (like := r if q is None else q) is None:
        return [*x, *y], None
    return [*x, *y], torch.cat([_one_hot(x, like) if q is None else q, _one_hot(y, like) if r is None else r])


def _one_hot(x: list[int], like: torch.Tensor) -> torch.Tensor:
    """[k, V] for k tokens, of the kind of `like`."""
    q = like.new_zeros(len(x), like.shape[-1])
    q[range(len(x)), x] = 1
    return q


def _fits(proposer: Any, target: Any) -> bool:
    """Whether a trained draft is for this target."""
    try:
        proposer.bind(target)
    except UserError:
        return False
    return True


def _member(given: Any, number: int) -> tuple[str, Proposer]:
    """A member's name, of its option or its class, and the member."""
    key = f"members[{number}]"
    name, _, node = chosen("proposer", given, key)
    proposer = having(key, build(node, key), "propose")
    if isinstance(proposer, Cascade):
        raise UserError("is a cascade; name its members here.", key=key)
    return name, proposer
