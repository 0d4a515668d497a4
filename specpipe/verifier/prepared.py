"""A loaded model made ready for passes over a few tokens: the same model in less time, target or draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specpipe.verifier.attention import group_queries
from specpipe.verifier.fused import fuse_layers
from specpipe.verifier.linear import pack_linears, quantize_linears


@dataclass(frozen=True)
class Prepared:
    """What was done: whether the layers are fused, and how many linear layers were packed."""

    fused: bool
    packed: int


def prepare(model: Any, *, fuse: bool = True, prepack: bool = True, int8: bool = False) -> Prepared:
    """Prepare a model of `transformers`, in place.

    Args:
        fuse: run layers that are known in fewer operations (`fused.py`).
        prepack: on a CPU, pack the linear layers' weights (`linear.py`).
        int8: before that, round those of all linear layers but the head to 8 bits, which makes another model of it.
    """
    group_queries(model)
    fused = fuse and fuse_layers(model)
    if int8:
        quantize_linears(model)
    return Prepared(fused, pack_linears(model) if prepack else 0)
