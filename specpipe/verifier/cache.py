"""A key/value cache with a length per row.

Preallocated; new entries are written in place behind what a row has; rolling a row back is setting its length. Entries
beyond a row's length are stale: the 4-D mask hides them and the next write replaces them. It plugs into any
`transformers` model as `cache=`, and knows nothing of tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SMALLEST = 256  # positions allocated at first; doubled whenever they do not suffice


class RowCache(Cache):
    """Keys and values of R rows.

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
            layer.rearrange([row or 0 for row in rows])

    def place(self, width: int, device: torch.device) -> Tensor:
        """Announce a forward over `width` new tokens in every row.

        Returns:
            [R, width] positions of the new tokens, to be passed as `position_ids`.
        """
        end = max(self.lengths) + width
        start = self.lengths[0] if len(self.lengths) == 1 else None
        positions = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(width, device=device)
        for layer in self._row_layers:
            layer.place(positions, start, end)
        return positions

    def mask(self, positions: Tensor) -> Tensor:
        """[R, 1, W, L] bool: a token sees the entries at its own position and before, of its own row only."""
        seen = torch.arange(max(self.lengths) + positions.shape[1], device=positions.device)
        return seen <= positions[:, None, :, None]


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, H, C, D] each."""

    is_sliding = False

    def rearrange(self, rows: list[int]) -> None:
        """New row b holds what old row `rows[b]` held."""
        if self.keys is not None and self.values is not None and rows != list(range(len(self.keys))):
            at = torch.tensor(rows, device=self.keys.device)
            self.keys, self.values = self.keys[at], self.values[at]

    def place(self, positions: Tensor, start: int | None, end: int) -> None:
        """Where the next update writes: `positions` [R, W]; `start` is the same for a single row; L = `end`."""
        self._positions, self._start, self._end = positions, start, end

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `update` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [R, H, W, D] new entries; return everything up to the longest row, [R, H, L, D]."""
        keys, values = self.keys, self.values
        if keys is None or values is None or self._end > keys.shape[2]:
            self.keys = keys = self._allocate(key_states, keys)
            self.values = values = self._allocate(value_states, values)
        return self._write(keys, key_states), self._write(values, value_states)

    def get_seq_length(self) -> int:
        return self._end - self._positions.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._end, 0

    def get_max_length(self) -> int:
        return -1

    def _allocate(self, like: Tensor, old: Tensor | None = None) -> Tensor:
        capacity = SMALLEST
        while capacity < self._end:
            capacity *= 2
        rows, heads, _, size = like.shape
        new = like.new_zeros(rows, heads, capacity, size)
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def _write(self, whole: Tensor, new: Tensor) -> Tensor:
        if self._start is not None:
            whole[:, :, self._start : self._end] = new
        else:
            rows = torch.arange(new.shape[0], device=new.device)[:, None]
            whole[rows, :, self._positions] = new.transpose(1, 2)
        return whole[:, :, : self._end]
