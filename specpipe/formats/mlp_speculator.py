"""MLP speculator checkpoints (arXiv 2404.19124): names, tensors and forward.

With n = n_predict, d = inner_dim (0: emb_dim), a = 0.5^(0.5/n) and b = sqrt((1 - a^2) d/2), for head i = 0 .. n-1,
which is told the newest token y_0 and the guesses y_1 .. y_i behind it:

    s = rms(state) / sqrt(2) if `scale_input`, else the state [H], H = emb_dim
    s = GELU(ln_i(proj_i s + (b/a) emb_i[y_i]));   logits of y_i+1 = head_i s

    emb.{i}.weight [V, d]    proj.{i}.weight [d, H] for i = 0, else [d, d]
    head.{i}.weight [V, d]   ln.{i}.weight, .bias [d], a norm by root mean square

each name perhaps behind `speculator.`. With `tie_weights` all i share their tensors, proj those from 1 on; files may
hold them once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specpipe.errors import UserError
from specpipe.formats.checkpoint import HeadsCheckpoint, fitted, whole, without_prefix

MODEL_TYPE = "mlp_speculator"
PREFIX = "speculator."
EPSILON = 1e-6  # of the norms


class MlpSpeculatorCheckpoint(HeadsCheckpoint):
    """Raises UserError for tensors that are not those of the config."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        heads, hidden, size = whole(config, "n_predict"), whole(config, "emb_dim"), whole(config, "vocab_size")
        inner = whole(config, "inner_dim") if config.get("inner_dim") else hidden
        held = without_prefix(tensors, PREFIX)
        copies = _copies(heads) if config.get("tie_weights") else {}
        fitted(held, _layout(heads), copies, V=size, H=hidden, d=inner)
        _refuse_differing(held, copies)
        own = {name: tensor for name, tensor in held.items() if name not in copies}
        tables = {name: tensor for name, tensor in own.items() if name.startswith(("emb.", "head."))}
        super().__init__(
            heads=heads,
            hidden=hidden,
            vocabulary=size,
            matrices={name: tensor for name, tensor in own.items() if name not in tables},
            tables=tables,
        )
        self._copies = copies
        self._scaled = bool(config.get("scale_input"))
        a = 0.5 ** (0.5 / heads)
        self._weight_of_token = math.sqrt((1 - a * a) * inner / 2) / a

    @staticmethod
    def recognises(config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == MODEL_TYPE

    def step(self, i: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        s = _rms(carry) / math.sqrt(2) if self._scaled and i == 0 else carry
        token = self._table(f"emb.{i}.weight")[tokens].to(s.dtype)
        mixed = F.linear(s, self._matrix(f"proj.{i}.weight")) + self._weight_of_token * token
        s = F.gelu(_rms(mixed) * self._matrix(f"ln.{i}.weight") + self._matrix(f"ln.{i}.bias"))
        return s, s

    def rows(self, i: int) -> Tensor:
        return self._table(f"head.{i}.weight")

    def _matrix(self, name: str) -> Tensor:
        return self._matrices[self._copies.get(name, name)]

    def _table(self, name: str) -> Tensor:
        return self._tables[self._copies.get(name, name)]


def _layout(heads: int) -> dict[str, str]:
    """Shapes by letter."""
    layout: dict[str, str] = {}
    for i in range(heads):
        layout |= {f"emb.{i}.weight": "Vd", f"proj.{i}.weight": "dd" if i else "dH", f"head.{i}.weight": "Vd"}
        layout |= {f"ln.{i}.weight": "d", f"ln.{i}.bias": "d"}
    return layout


def _copies(heads: int) -> dict[str, str]:
    """Where weights are tied: names, and of what they are copies."""
    shared = ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
    copies = {name.format(i): name.format(0) for name in shared for i in range(1, heads)}
    return copies | {f"proj.{i}.weight": "proj.1.weight" for i in range(2, heads)}


def _refuse_differing(held: Mapping[str, Tensor], copies: Mapping[str, str]) -> None:
    for name, first in copies.items():
        if name in held and not torch.equal(held[name], held[first]):
            raise UserError(f"{name} is not {first}, though its weights are tied.", key="path")


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
