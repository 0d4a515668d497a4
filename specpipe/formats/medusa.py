"""Medusa heads (arXiv 2401.10774): names, tensors and forward of their layouts.

For head i, which guesses the token i + 1 places behind the newest one, and s, the target's final state from which that
one was drawn:

    x = s;   x += SiLU(W_ij x + b_ij) for each layer j;   logits = L_i x

              W_ij [H, H] .weight, b_ij [H] .bias    L_i [R, H]
    vLLM      blocks.{i}.layers.{j}                  lm_heads.{i}.weight, or lm_heads.0.weight for all
    Medusa    {i}.{j}.linear                         {i}.{layers}.weight, or none: the target's head

In vLLM's the config says whether there are biases (`medusa_fc_bias`), one L for all (`original_lm_head`), and logits of
some ids alone (`truncated_vocab_size` below `vocab_size`): those of `token_map` [D], L having their rows or all. In
Medusa's own all layers of a head were one, and files may hold it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from specpipe.errors import UserError
from specpipe.formats.checkpoint import HeadsCheckpoint, fitted, whole, without_prefix

MODEL_TYPE, ARCHITECTURE = "medusa", "MedusaModel"
PREFIX, BLOCKS, OUTPUTS, MAP = "medusa_heads.", "blocks.", "lm_heads.", "token_map"


class MedusaCheckpoint(HeadsCheckpoint):
    """Raises UserError for tensors that are not those of the config."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        heads = whole(config, "medusa_num_heads", "num_heads")
        layers = whole(config, "medusa_num_layers", "num_hidden_layers", low=0)
        held = without_prefix(tensors, PREFIX)
        vllms = any(name.startswith((BLOCKS, OUTPUTS)) for name in held)
        names = _vllms_names(config, heads, layers) if vllms else _medusas_names(held, heads, layers)
        sizes = fitted(held, names.layout)
        vocabulary: int | None = sizes.get("R")
        ids: Tensor | None = None
        if names.trimmed:
            vocabulary = whole(config, "vocab_size")
            ids = _absolute(held[MAP], vocabulary)
        super().__init__(
            heads=heads,
            hidden=sizes["H"],
            vocabulary=vocabulary,
            matrices={name: held[name] for name in names.matrices},
            tables={name: _of_ids(held[name], ids, vocabulary) for name in names.outputs},
            ids=ids,
        )
        self._names = names

    @staticmethod
    def recognises(config: Mapping[str, Any]) -> bool:
        named = config.get("model_type") == MODEL_TYPE or ARCHITECTURE in (config.get("architectures") or ())
        return named or "medusa_num_heads" in config

    def step(self, i: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = carry
        for layer in self._names.layers[i]:
            weight, bias = self._matrices[f"{layer}.weight"], self._matrices.get(f"{layer}.bias")
            x = x + F.silu(F.linear(x, weight, bias))
        return carry, x

    def rows(self, i: int) -> Tensor | None:
        return self._tables[self._names.outputs[i]] if self._names.outputs else None


@dataclass(frozen=True)
class Names:
    """What a layout calls its tensors.

    layers: [n, layers], W and b without the endings. outputs: L of each head; none where it is the target's head.
    biased: whether there are b. trimmed: whether there is a `token_map`.
    """

    layers: list[list[str]]
    outputs: list[str]
    biased: bool
    trimmed: bool

    @property
    def matrices(self) -> dict[str, str]:
        """Shapes of W and b, by letter."""
        shapes = {"weight": "HH", "bias": "H"} if self.biased else {"weight": "HH"}
        return {f"{layer}.{part}": shape for row in self.layers for layer in row for part, shape in shapes.items()}

    @property
    def layout(self) -> dict[str, str]:
        """Shapes of all, by letter."""
        return self.matrices | dict.fromkeys(self.outputs, "RH") | ({MAP: "D"} if self.trimmed else {})


def _vllms_names(config: Mapping[str, Any], heads: int, layers: int) -> Names:
    shared, size = bool(config.get("original_lm_head")), config.get("vocab_size")
    return Names(
        layers=[[f"{BLOCKS}{i}.layers.{j}" for j in range(layers)] for i in range(heads)],
        outputs=[f"{OUTPUTS}{0 if shared else i}.weight" for i in range(heads)],
        biased=bool(config.get("medusa_fc_bias")),
        trimmed=config.get("truncated_vocab_size", size) != size,
    )


def _medusas_names(held: Mapping[str, Tensor], heads: int, layers: int) -> Names:
    kept = layers if f"0.{layers - 1}.linear.weight" in held else 1
    own = f"0.{layers}.weight" in held
    return Names(
        layers=[[f"{i}.{j % kept}.linear" for j in range(layers)] for i in range(heads)],
        outputs=[f"{i}.{layers}.weight" for i in range(heads)] if own else [],
        biased="0.0.linear.bias" in held,
        trimmed=False,
    )


def _absolute(token_map: Tensor, vocabulary: int) -> Tensor:
    """[D] int64 ids, which must be different ones of the vocabulary: offsets, as other formats have, are not."""
    ids = token_map.long()
    if not len(ids) or len(ids.unique()) < len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        raise UserError(f"its {MAP} is not one of different ids below {vocabulary}.", key="path")
    return ids


def _of_ids(rows: Tensor, ids: Tensor | None, vocabulary: int | None) -> Tensor:
    """[D, H] the rows of the ids, of which or of all [V, H] a file has them; without ids as they are."""
    if ids is None or len(rows) == len(ids):
        return rows
    if len(rows) != vocabulary:
        raise UserError(f"its heads have {len(rows)} rows, and its {MAP} {len(ids)} ids.", key="path")
    return rows[ids]
