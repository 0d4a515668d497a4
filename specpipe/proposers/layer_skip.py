"""Self-speculation: the target's own first layers draft (as in LayerSkip, arXiv 2404.16710), without training.

The target's cache holds their keys and values of every committed token already, so they read on behind it and never
read the prompt. Other choices of layers see other inputs than they do in the target, and keep a cache of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Items
from typing import Any

from torch import nn

from specpipe.errors import UserError, integer
from specpipe.proposers.model import ModelProposer
from specpipe.sequence import Sequence
from specpipe.verifier.reader import Borrower, Reader
from specpipe.verifier.targets import Target

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # of a config: an entry for each layer


class LayerSkip(ModelProposer):
    """Some of the target's layers with its embedding, final norm and head.

    In a pipeline the first layers draft nothing until the target has read the prompt: reading it takes longer than the
    drafts of one step save.

    Args:
        layers: how many of the first layers, or a list of their numbers from 0.
        draw, min_confidence, copy_bias: see `Drawing`.
    """

    def __init__(
        self,
        *,
        layers: int | Items[int] = 8,
        draw: str = "sample",
        min_confidence: float = 0.0,
        copy_bias: Items[float] = (),
    ) -> None:
        super().__init__(draw=draw, min_confidence=min_confidence, copy_bias=copy_bias)
        if isinstance(layers, (int, str)) or not isinstance(layers, Items):
            self.layers = list(range(integer("layers", layers, 1)))
        else:
            self.layers = ascending(layers)

    def bind(self, target: Target) -> None:
        """Share the target's modules. Raises UserError for layers that it does not have."""
        self._use(with_layers(target.model, self.layers), target.vocabulary, target.context)

    def attach(self, verifier: Any) -> None:
        """Draft behind what the verifier's `reader` has read, if it has one and the layers are the first ones."""
        super().attach(verifier)
        reader = getattr(verifier, "reader", None)
        if isinstance(reader, Reader) and self.layers == list(range(len(self.layers))):
            self._reader = Borrower(self._reader.model, reader)

    def _room(self, text: Sequence) -> int:
        unread = isinstance(self._reader, Borrower) and not self._reader.has_read(text)
        return 0 if unread else super()._room(text)


def ascending(layers: Items[int]) -> list[int]:
    """Numbers of layers, at least one, each above the one before; else UserError."""
    numbers = [integer("layers", each, 0) for each in layers]
    if not numbers or sorted(set(numbers)) != numbers:
        raise UserError(f"{layers!r} is not a list of ascending layer numbers.", key="layers")
    return numbers


def with_layers(model: Any, layers: list[int]) -> Any:
    """The same modules, weights shared, with some of the layers only; the model itself is left as it is.

    Args:
        model: a causal LM of `transformers`.
        layers: as `ascending` gives them. UserError for one that the model lacks.
    """
    short, body = _shallow(model), _shallow(model.base_model)
    count = model.config.get_text_config().num_hidden_layers
    lists = [name for name, part in body.named_children() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        raise UserError(f"the layers of {type(model).__name__} could not be found.", key="layers")
    if layers[-1] >= count:
        raise UserError(f"the target has no layer {layers[-1]}; its layers end at {count - 1}.", key="layers")
    whole = getattr(body, lists[0])
    setattr(body, lists[0], nn.ModuleList([whole[i] for i in layers]))
    short.config = body.config = _with_kinds(body.config, layers)
    setattr(short, model.base_model_prefix, body)
    return short


def _with_kinds(config: Any, layers: list[int]) -> Any:
    """The config, its copy if it lists kinds of layers: those of these `layers` only.

    The number of layers stays: a layer writes to the place in the cache that it has in the whole model.
    """
    listed = {key: kinds for key in PER_LAYER if (kinds := getattr(config, key, None))}
    if not listed:
        return config
    config = copy.copy(config)
    for key, kinds in listed.items():
        setattr(config, key, [kinds[i] for i in layers])
    return config


def _shallow(module: nn.Module) -> Any:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
