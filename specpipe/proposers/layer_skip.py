"""Self-speculation: the target's own first layers draft (as in LayerSkip, arXiv 2404.16710), without training."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Items
from typing import Any

from torch import nn

from specpipe.errors import UserError, integer
from specpipe.proposers.model import ModelProposer
from specpipe.verifier.targets import Target


class LayerSkip(ModelProposer):
    """Some of the target's layers with its embedding, final norm and head; a cache of its own for those layers.

    Args:
        layers: how many of the first layers, or a list of their numbers from 0.
        draw, min_confidence: see `ModelProposer`.
    """

    def __init__(self, *, layers: int | Items[int] = 8, draw: str = "sample", min_confidence: float = 0.0) -> None:
        super().__init__(draw=draw, min_confidence=min_confidence)
        if isinstance(layers, (int, str)) or not isinstance(layers, Items):
            self.layers = list(range(integer("layers", layers, 1)))
        else:
            self.layers = [integer("layers", each, 0) for each in layers]
        if not self.layers or sorted(set(self.layers)) != self.layers:
            raise UserError(f"{layers!r} is not a list of ascending layer numbers.", key="layers")

    def bind(self, target: Target) -> None:
        """Share the target's modules. Raises UserError for layers that it does not have."""
        self._use(with_layers(target.model, self.layers), target.vocabulary, target.context)


def with_layers(model: Any, layers: list[int]) -> Any:
    """The same modules, weights shared, with some of the layers only; the model itself is left as it is."""
    short, body = _shallow(model), _shallow(model.base_model)
    count = model.config.get_text_config().num_hidden_layers
    lists = [name for name, part in body.named_children() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        raise UserError(f"the layers of {type(model).__name__} could not be found.", key="layers")
    if layers[-1] >= count:
        raise UserError(f"the target has no layer {layers[-1]}; its layers end at {count - 1}.", key="layers")
    whole = getattr(body, lists[0])
    setattr(body, lists[0], nn.ModuleList([whole[i] for i in layers]))
    setattr(short, model.base_model_prefix, body)
    return short


def _shallow(module: nn.Module) -> Any:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
