"""The hidden states that a model's head was given, for the requests of the last passes.

They are caught at the door of the head, so they are the final ones, behind the last norm, whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from specpipe.draft import Draft
from specpipe.sequence import Sequence


class States:
    """Of each request the states [k + 1, H] of the last pass that read it: at its last token and its k drafts.

    Args:
        model: of `transformers`; nothing is kept of one that names no head.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: WeakKeyDictionary[Sequence, _Kept] = WeakKeyDictionary()

    def watched(self) -> AbstractContextManager[list[Tensor]]:
        """What the head is given meanwhile."""
        return head_inputs(self._model)

    def keep(
        self, given: list[Tensor], sequences: list[Sequence], draft: Draft, columns: list[int], at: list[int]
    ) -> None:
        """Replace what is known of the sequences, and forget those that are finished.

        Args:
            given: as `watched` yields it: one tensor, [B, all columns of the pass or the kept ones, H].
            sequences: B of them, read up to their last token, with `draft` behind it.
            columns: the kept columns, ascending.
            at: for each row which of those holds its last token; its drafts' follow.
        """
        for old in [old for old in self._kept if old.finish_reason is not None]:
            del self._kept[old]
        if len(given) != 1 or given[0].dim() != 3:
            return
        states = _alone(given[0] if given[0].shape[1] == len(columns) else given[0][:, columns])
        for b, (sequence, i, k) in enumerate(zip(sequences, at, draft.lengths, strict=True)):
            self._kept[sequence] = _Kept(len(sequence.tokens) - 1, draft.tokens[b, :k], states[b, i : i + k + 1])

    def of(self, sequence: Sequence) -> Tensor | None:
        """[H] the state at the place before the last; None if it was not kept, or other tokens were read up to it."""
        kept = self._kept.get(sequence)
        if kept is None:
            return None
        beyond = len(sequence.tokens) - 2 - kept.start
        if not 0 <= beyond < len(kept.states):
            return None
        accepted = sequence.tokens[kept.start + 1 : kept.start + 1 + beyond]
        return kept.states[beyond] if accepted == kept.drafts[:beyond].tolist() else None


@contextmanager
def head_inputs(model: Any) -> Iterator[list[Tensor]]:
    """What the head of a model is given meanwhile; nothing, if it names none."""
    given: list[Tensor] = []
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        yield given
        return
    hook = head.register_forward_pre_hook(lambda head, inputs: given.extend(inputs[:1]))
    try:
        yield given
    finally:
        hook.remove()


class _Kept(NamedTuple):
    """States [k + 1, H] from the place `start` on, where the last committed token stood; drafts [k] behind it."""

    start: int
    drafts: Tensor
    states: Tensor


def _alone(states: Tensor) -> Tensor:
    """The same states, their own copy if they are a piece of a larger tensor, which would live as long as they do."""
    whole = states.untyped_storage().nbytes()
    return states if whole == states.numel() * states.element_size() else states.clone()
