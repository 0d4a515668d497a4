"""A key/value cache with a length per row.

Preallocated; new entries are written in place behind what a row has; rolling a row back is setting its length. Entries
beyond a row's length are stale: the 4-D mask hides them and the next write replaces them. It plugs into any
`transformers` model as `cache=`, and knows nothing of tokens or requests.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SMALLEST = 256  # positions allocated at first; doubled whenever they do not suffice


class RowCache(Cache):
    """Keys and values of R rows, of which any may take part in a forward.

    Args:
        layers: attention layers of the model.
        rows: R.
    """

    def __init__(self, layers: int, rows: int = 1) -> None:
        self._row_layers = [RowLayer() for _ in range(layers)]
        super().__init__(layers=list(self._row_layers))
        self.lengths = [0] * rows

    def rearrange(self, rows: Sequence[int | None]) -> None:
        """New row b is old row `rows[b]`, or an empty one where that is None."""
        self.lengths = [0 if row is None else self.lengths[row] for row in rows]
        for layer in self._row_layers:
            layer.rearrange(rows)

    def place(self, width: int, device: torch.device, rows: Sequence[int], least: int = 0) -> Tensor:
        """Announce a forward over `width` new tokens in each of `rows`; the other rows rest.

        It sees as many entries as the longest row has then, or `least`, if that is more; its mask hides the rest.

        Returns:
            [len(rows), width] positions of the new tokens, to be passed as `position_ids`.
        """
        lengths = [self.lengths[row] for row in rows]
        positions = torch.tensor(lengths, device=device)[:, None] + torch.arange(width, device=device)
        self.rows = list(rows)
        self.announce(
            Place.of(positions, max(least, *(n + width for n in lengths)), self.rows, lengths, len(self.lengths))
        )
        return positions

    def place_within(self, positions: Tensor, end: int) -> Place:
        """For forwards over new tokens at whatever `positions` [rows, W] hold when they run, in the rows of the last.

        They reach over the places before `end`, which `reserve` gives: the same operations over the same memory each
        time, so that they can be recorded.
        """
        return Place.of(positions, end, self.rows, None, len(self.lengths))

    def announce(self, place: Place) -> None:
        """The next forward writes there."""
        self.end, self.positions = place.end, place.positions
        for layer in self._row_layers:
            layer.place = place

    def reserve(self) -> int | None:
        """Make room for the forward that was announced; None before the first forward, when that cannot be done yet.

        Layers that hold nothing are none of the model's, which may have some of them only.

        Returns:
            That many places or a few more, which a row has in each layer: the same for a text whatever else was read.
        """
        held = [(layer, layer.keys, layer.values) for layer in self._row_layers]
        rooms = [layer.room(keys, values) for layer, keys, values in held if keys is not None and values is not None]
        return capacity(self.end) if rooms else None

    def memory(self) -> tuple[Any, ...]:
        """Where keys and values are, and of what shape: as long as it is the same, what was recorded holds."""
        held = (each for layer in self._row_layers for each in (layer.keys, layer.values))
        return tuple(None if each is None else (each.data_ptr(), each.shape[1:]) for each in held)

    def room(self, like: Tensor, layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Of each of the `layers` all keys and values [R, H, C, D], with room for the forward that was announced.

        For whoever writes them himself, at `positions` of `rows`; like: [.., H, .., D], of their type.
        """
        return [self._row_layers[layer].room(like, like) for layer in layers]

    def mask(self, positions: Tensor, window: int | None = None) -> Tensor:
        """[rows, 1, W, L] bool: a token sees the entries at its own position and before, of its own row only.

        Of those the last `window`, if one is given; its own is always among them, so no row of the mask is empty.
        """
        at, entries = positions[:, None, :, None], torch.arange(self.end, device=positions.device)
        seen = entries <= at
        return seen if window is None else seen & (entries > at - window)

    def twin(self) -> RowCache:
        """The same keys and values under lengths of its own.

        What is written behind them is stale to this cache, which stays as it is whatever becomes of the twin. A twin is
        good until the rows are rearranged.
        """
        twin = copy.copy(self)
        twin.lengths = list(self.lengths)
        return twin


class Place(NamedTuple):
    """Where the next entries go: `positions` [rows, W] of some rows, out of `total`; they see those before `end`.

    rows: [rows] int64, None if they are all in their order; alone: the only one and its first position, if known.
    """

    positions: Tensor
    end: int
    total: int
    rows: Tensor | None
    alone: tuple[int, int] | None

    @classmethod
    def of(cls, positions: Tensor, end: int, rows: Sequence[int], lengths: Sequence[int] | None, total: int) -> Place:
        """lengths: of the rows, if they are known."""
        whole = list(rows) == list(range(total))
        which = None if whole else torch.tensor(rows, device=positions.device)
        alone = (rows[0], lengths[0]) if len(rows) == 1 and lengths is not None else None
        return cls(positions, end, total, which, alone)


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, H, C, D] each; `place` says where the next update writes."""

    is_sliding = False
    place: Place
    _most: tuple[Tensor, Tensor] | None = None  # keys and values with the rows that there is memory for

    def rearrange(self, rows: Sequence[int | None]) -> None:
        """New row b holds what old row `rows[b]` held, or anything; where it was, if there is memory for so many."""
        if self._most is not None:
            with torch.inference_mode():
                keys, values = (_rearranged(each, rows) for each in self._most)
            self._hold(keys, values, len(rows))

    def _hold(self, keys: Tensor, values: Tensor, rows: int) -> None:
        self._most = keys, values
        self.keys, self.values = keys[:rows], values[:rows]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `update` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [rows, H, W, D] new entries; return everything up to the longest row, [rows, H, L, D]."""
        keys, values = self.room(key_states, value_states)
        return self._write(keys, key_states), self._write(values, value_states)

    def room(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [R, H, C, D], of the type of [.., H, .., D] ones, with room for what was announced."""
        keys, values = self.keys, self.values
        if keys is None or values is None or self.place.end > keys.shape[2]:
            keys, values = self._allocate(key_states, keys), self._allocate(value_states, values)
            self._hold(keys, values, self.place.total)
        return keys, values

    def get_seq_length(self) -> int:
        """Entries before the new ones, of the longest row."""
        return self.place.end - self.place.positions.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.end, 0

    def get_max_length(self) -> int:
        return -1

    def _allocate(self, like: Tensor, old: Tensor | None = None) -> Tensor:
        _, heads, _, size = like.shape
        new = like.new_zeros(self.place.total, heads, capacity(self.place.end), size)
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def _write(self, whole: Tensor, new: Tensor) -> Tensor:
        positions, end, _, which, alone = self.place
        if alone is not None:
            row, start = slice(alone[0], alone[0] + 1), alone[1]
            whole[row, :, start : start + new.shape[2]] = new
            return whole[row, :, :end]
        rows = torch.arange(new.shape[0], device=new.device) if which is None else which
        whole[rows[:, None], :, positions] = new.transpose(1, 2)
        return whole[:, :, :end] if which is None else whole[rows, :, :end]


def capacity(places: int) -> int:
    """How many are allocated for so many."""
    rounded = SMALLEST
    while rounded < places:
        rounded *= 2
    return rounded


def _rearranged(whole: Tensor, rows: Sequence[int | None]) -> Tensor:
    """[M, ...] whose first rows are `rows` of it; the same memory, unless there are more of them."""
    if len(rows) > len(whole):
        return whole[torch.tensor([row or 0 for row in rows], device=whole.device)]
    moved = [(new, old) for new, old in enumerate(rows) if old is not None and old != new]
    if moved:
        new, old = torch.tensor(moved, device=whole.device).T
        whole[new] = whole[old]
    return whole
