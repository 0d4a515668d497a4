"""A model with a cache that follows a set of requests: it reads the tokens it has not read yet.

One rule for targets and draft models alike, so whoever was idle for some steps, or has not seen the last accepted
token, catches up by itself. It knows tokens and rows; it does not know who is asking or why.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from specpipe.draft import Draft
from specpipe.sequence import Sequence
from specpipe.verifier.cache import RowCache
from specpipe.verifier.states import States
from specpipe.verifier.windows import LookBack

PIECE = 1024  # tokens of a text that are read in one pass, so that the memory of a pass does not grow with the prompt


class Call:
    """A pass of a model with a cache, in that model's words.

    Args:
        model: a decoder-only causal LM of `transformers`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        takes = inspect.signature(model.forward).parameters
        self._narrow_head = "logits_to_keep" in takes
        self._cache_word = "cache" if "cache" in takes else "past_key_values"  # its name before transformers 5.24

    def __call__(self, ids: Tensor, masks: Any, position_ids: Tensor, cache: RowCache, keep: int | Tensor) -> Tensor:
        """[B, kept columns, V] logits.

        Args:
            ids, position_ids: [B, W].
            masks: as `LookBack` makes them.
            keep: how many last columns have logits, 0 for all, or which, [n].
        """
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=position_ids,
            use_cache=True,
            **{self._cache_word: cache},
            **({"logits_to_keep": keep} if self._narrow_head else {}),
        ).logits
        return logits if self._narrow_head else logits[:, columns_of(keep)]


def columns_of(keep: int | Tensor) -> slice | Tensor:
    """What to index with: how many last columns, 0 for all, or which."""
    return slice(-keep, None) if isinstance(keep, int) else keep


class Reader:
    """Reads requests with `model` and remembers what it has read of each until it is finished or forgotten.

    `width`, if it is set, is that of every pass behind prompts, whatever it needs, and all passes reach over as many
    places as the texts will have at most: so a token is read in the same shapes, drafts or none. The last token of a
    prompt is not read with the others then.

    Args:
        model: a decoder-only causal LM of `transformers`, in eval mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.width: int | None = None
        self._call = Call(model)
        self._owners: list[ref[Sequence]] = []  # of the cache's rows
        self._rows: list[int] = []  # of the sequences of the last call
        self._least = 0  # entries that its passes see, masked or not
        self._look_back = LookBack(model) if getattr(model, "takes_masks", True) else None
        self._states = States(model)
        self.cache = self._empty()

    def read(self, sequences: list[Sequence], draft: Draft) -> list[Tensor]:
        """Read what each sequence has that its row has not, and the draft behind it, in one pass or, much, in several.

        Returns:
            For row b the logits of its last `draft.lengths[b] + 1` positions, [k_b + 1, V]: the laws at the places
            of the k_b drafts and the one behind them.
        """
        self._seat(sequences)
        self._least = self.width + max(sequence.longest for sequence in sequences) if self.width else 0
        self._read_pieces(sequences)
        fresh = [s.tokens[self.cache.lengths[row] :] for s, row in zip(sequences, self._rows, strict=True)]
        widths = [len(tokens) + k for tokens, k in zip(fresh, draft.lengths, strict=True)]
        first = [width - k - 1 for width, k in zip(widths, draft.lengths, strict=True)]
        wide = max(self.width or 0, *widths)
        columns = _union(first, widths) if self.width is None else list(range(wide))
        with self._states.watched() as given:
            inputs = self._inputs(fresh, draft, wide)
            logits = self._forward(inputs, self._rows, widths, columns)  # [B, len(columns), V]
        for row, width in zip(self._rows, widths, strict=True):
            self.cache.lengths[row] += width
        at = [columns.index(start) for start in first]
        self._states.keep(given, sequences, draft, columns, at)
        return [logits[b, i : i + k + 1] for b, (i, k) in enumerate(zip(at, draft.lengths, strict=True))]

    def state(self, sequence: Sequence) -> Tensor | None:
        """[H] what the model's head was given at the place before the last: what the last token was drawn from.

        None where the last `read` of the sequence did not come that far, or the model has no head of its own.
        """
        return self._states.of(sequence)

    def extend(self, tokens: list[int | None]) -> Tensor:
        """Read one more token for each sequence of the last `read`, or none; the next forgets those not committed.

        Returns:
            [B, V] logits behind each token; where there was none they mean nothing.
        """
        ids = torch.tensor([[token or 0] for token in tokens], dtype=torch.long, device=self.device)
        logits = self._forward(ids, self._rows, [1] * len(tokens), [0])[:, 0]
        for row, token in zip(self._rows, tokens, strict=True):
            self.cache.lengths[row] += token is not None
        return logits

    def roll_back(self, sequences: list[Sequence]) -> None:
        """Forget what was read and not committed: a row keeps the committed tokens but the last, pending one."""
        for sequence, row in zip(sequences, self._rows_of(sequences), strict=True):
            self.cache.lengths[row] = min(self.cache.lengths[row], len(sequence.tokens) - 1)

    def copy_rows(self, copies: list[tuple[Sequence, Sequence]]) -> None:
        """Seat the second of each pair, which is new, with what was read of the first; so far their texts are one."""
        at = self._rows_of([source for source, _ in copies])
        self.cache.rearrange([*range(len(self._owners)), *at])
        self._owners += [ref(copy) for _, copy in copies]

    def cut(self, sequence: Sequence, length: int) -> None:
        """Forget what the row of a sequence, if it has one, holds behind its first `length` tokens."""
        for row, owner in enumerate(self._owners):
            if owner() is sequence:
                self.cache.lengths[row] = min(self.cache.lengths[row], length)

    def forget(self) -> None:
        """Let go of all that was read, and of its memory; it is read again when it is asked for."""
        self.cache, self._owners = self._empty(), []
        if hasattr(self.model, "forget"):
            self.model.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def has_read(self, sequence: Sequence) -> bool:
        """Whether only the last, pending token of the sequence is unread."""
        known = any(owner() is sequence for owner in self._owners)
        return known and self.cache.lengths[self._rows_of([sequence])[0]] >= len(sequence.tokens) - 1

    def _empty(self) -> RowCache:
        return RowCache(self.model.config.get_text_config().num_hidden_layers, rows=0)

    def _rows_of(self, sequences: list[Sequence]) -> list[int]:
        rows = {id(owner): row for row, kept in enumerate(self._owners) if (owner := kept()) is not None}
        return [rows[id(sequence)] for sequence in sequences]

    def _seat(self, sequences: list[Sequence]) -> None:
        """A row for each: the one it has, else an empty one. Rows of requests that ended, or are gone, are given up."""
        asked = {id(sequence) for sequence in sequences}
        kept: list[Sequence] = []
        rows: list[int | None] = []
        for row, owner in enumerate(owner() for owner in self._owners):
            if owner is not None and (owner.finish_reason is None or id(owner) in asked):
                kept.append(owner)
                rows.append(row)
        known = {id(owner) for owner in kept}
        new = [sequence for sequence in sequences if id(sequence) not in known]
        if new or len(kept) < len(self._owners):
            self._owners = []  # if there is no memory for the rows, nothing counts as read
            self.cache.rearrange([*rows, *[None] * len(new)])
            self._owners = [ref(sequence) for sequence in (*kept, *new)]
        self._rows = self._rows_of(sequences)
        self.roll_back(sequences)  # a step that was interrupted could not

    def _read_pieces(self, sequences: list[Sequence]) -> None:
        """Read on where much is unread, until no more than one piece is; with a fixed width, one token."""
        left = PIECE if self.width is None else 1
        unread = [(row, s.tokens[self.cache.lengths[row] :]) for s, row in zip(sequences, self._rows, strict=True)]
        while unread := [(row, tokens) for row, tokens in unread if len(tokens) > left]:
            rows = [row for row, _ in unread]
            pieces = [tokens[: PIECE if self.width is None else min(PIECE, len(tokens) - 1)] for _, tokens in unread]
            widths = [len(piece) for piece in pieces]
            self._forward(self._inputs(pieces, None, max(widths)), rows, widths, [max(widths) - 1])
            for row, width in zip(rows, widths, strict=True):
                self.cache.lengths[row] += width
            unread = [(row, tokens[width:]) for (row, tokens), width in zip(unread, widths, strict=True)]

    def _inputs(self, fresh: list[list[int]], draft: Draft | None, width: int) -> Tensor:
        """[B, width] ids: unread tokens, then drafts, then padding that no real token can see."""
        padded = [tokens + [0] * (width - len(tokens)) for tokens in fresh]
        ids = torch.tensor(padded, dtype=torch.long, device=self.device)
        if draft is not None:
            for b, (tokens, k) in enumerate(zip(fresh, draft.lengths, strict=True)):
                if k:
                    ids[b, len(tokens) : len(tokens) + k] = draft.tokens[b, :k]
        return ids

    def _forward(self, ids: Tensor, rows: list[int], widths: list[int], columns: list[int]) -> Tensor:
        """[B, len(columns), V] logits at some columns of `ids` [B, W], of which row b reads the first `widths[b]`."""
        positions = self.cache.place(ids.shape[1], self.device, rows, self._least)
        ends = [self.cache.lengths[row] + width - 1 for row, width in zip(rows, widths, strict=True)]
        last = torch.tensor(ends, device=self.device)
        keep: int | Tensor = len(columns)
        if columns != list(range(ids.shape[1] - len(columns), ids.shape[1])):
            keep = torch.tensor(columns, device=self.device)
        masks = self._look_back and self._look_back.masks(self.cache, positions)
        inside = torch.minimum(positions, last[:, None])  # padding stays inside the context
        with torch.inference_mode():
            return self._call(ids, masks, inside, self.cache, keep)


class Borrower(Reader):
    """Reads on behind what another reader has read, in that one's rows, and leaves it as it is.

    What it writes lies behind the lender's lengths, where the lender's next pass writes in its turn.

    Args:
        model: the first layers of the lender's model; their entries are the ones that it needs.
        lender: whose requests these are; `has_read` must hold for each that is read here.
    """

    def __init__(self, model: Any, lender: Reader) -> None:
        super().__init__(model)
        self._lender = lender

    def has_read(self, sequence: Sequence) -> bool:
        return self._lender.has_read(sequence)

    def _seat(self, sequences: list[Sequence]) -> None:
        """The lender's rows as they are now, under lengths of its own."""
        self.cache, self._owners = self._lender.cache.twin(), self._lender._owners
        self._rows = self._rows_of(sequences)
        self.roll_back(sequences)


def _union(first: list[int], widths: list[int]) -> list[int]:
    """The columns that any row needs, ascending."""
    return sorted({column for start, width in zip(first, widths, strict=True) for column in range(start, width)})
