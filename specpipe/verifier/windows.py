"""How far the layers of a model look back, and the masks that tell them.

A sliding layer sees the last `config.sliding_window` positions, its own included, as in `transformers`' own masks. The
cache keeps everything all the same, so a roll-back finds whatever a window reaches once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specpipe.verifier.cache import RowCache

FULL, SLIDING = "full_attention", "sliding_attention"  # `transformers`' words for kinds of layers


class LookBack:
    """Masks for the layers of `model`, in the form that it takes them.

    Args:
        model: a causal LM of `transformers`, all of whose layers attend fully or in a sliding window.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._reach = {kind: window(config) if kind == SLIDING else None for kind in layer_kinds(config)}
        self._added = getattr(config, "_attn_implementation", None) == "eager"  # masks are added to the scores
        self._dtype = next(model.parameters()).dtype

    def masks(self, cache: RowCache, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """`attention_mask` of a forward over new tokens at `positions` [rows, W].

        Returns:
            [rows, 1, W, L] if all layers look equally far, else one by kind of layer.
        """
        masks = {reach: self._form(cache.mask(positions, reach)) for reach in set(self._reach.values())}
        return {kind: masks[reach] for kind, reach in self._reach.items()} if len(masks) > 1 else masks.popitem()[1]

    def _form(self, seen: Tensor) -> Tensor:
        """Bool, or what is added to the scores in the model's type."""
        if not self._added:
            return seen
        return torch.zeros_like(seen, dtype=self._dtype).masked_fill(~seen, torch.finfo(self._dtype).min)


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer, in `transformers`' words; config: of the text model."""
    for key in ("layer_types", "attention_layers"):  # the latter: GPT-Neo
        if kinds := getattr(config, key, None):
            return list(kinds)
    slides = getattr(config, "use_sliding_window", True) and window(config) is not None
    return [SLIDING if slides else FULL] * config.num_hidden_layers


def window(config: Any) -> int | None:
    """Positions that a sliding layer sees, its own included; None if they are all that the model has."""
    width = getattr(config, "sliding_window", None)
    limit = getattr(config, "max_position_embeddings", None)
    return width if width is not None and (limit is None or width < limit) else None


@contextmanager
def short_window(model: Any, width: int) -> Iterator[None]:
    """Inside the block the sliding layers of `model`, if it has any, see `width` positions."""
    config = model.config.get_text_config()
    given = getattr(config, "sliding_window", None)
    if given is None:
        yield
        return
    config.sliding_window = width
    try:
        yield
    finally:
        config.sliding_window = given
