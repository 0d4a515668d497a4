"""Decoder layers of the Llama family in fewer and larger operations, for inference.

A pass over a few tokens of a small model spends as long between its operations as in them. Here query, key and value
are one product, gate and up another, and query and key are turned together; same weights, same sums, same order of
roundings in types below float32. The layers replace those of the model, in place, so whatever runs, shares or lists
the model's layers goes on doing so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specpipe.verifier.attention import NAME as GROUPED

KNOWN = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}  # model_type: names of its classes begin so
Angles = tuple[Tensor, Tensor]


class FusedLayer(nn.Module):
    """Stands for a decoder layer.

    Args:
        layer: of a model of `KNOWN` type. Its linear layers must not be packed yet, and are not kept.
        attend: the model's attention function, of `transformers`' signature.
    """

    is_causal = True

    def __init__(self, layer: Any, attend: Callable[..., tuple[Tensor, Any]]) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.layer_idx, self.head_dim = attention.config, attention.layer_idx, attention.head_dim
        self.scaling, self.num_key_value_groups = attention.scaling, attention.num_key_value_groups
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv_proj = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up_proj = joined(mlp.gate_proj, mlp.up_proj)
        self.o_proj, self.down_proj, self.act_fn = attention.o_proj, mlp.down_proj, mlp.act_fn
        shared = attention.k_proj.out_features // self.head_dim
        self._heads = (attention.q_proj.out_features // self.head_dim + shared, shared)  # to be turned, and not
        self._attend = attend
        self.eval()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Angles | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Tensor:
        """[B, W, H] to [B, W, H], as the layer itself; `position_embeddings` as `FusedAngles` gives them."""
        assert position_embeddings is not None
        cache = past_key_values if cache is None else cache  # its name before transformers 5.24
        heads = self.project(hidden_states, *position_embeddings)
        return self.finish(hidden_states, self.attend(*heads, attention_mask, cache))

    def project(self, hidden_states: Tensor, cos: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
        """Of new tokens [..., H]: queries and keys behind them, turned, [..., N + G, D], and values [..., G, D]."""
        heads = self.qkv_proj(norm(self.input_layernorm, hidden_states))
        turned, values = heads.view(*heads.shape[:-1], -1, self.head_dim).split(self._heads, -2)
        return turn(turned, cos, signed), values

    def attend(self, turned: Tensor, values: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """What new tokens see of themselves and of the cache, which takes them up.

        From [B, W, N + G, D] and [B, W, G, D], as `project` gives them, to [B, W, N D].
        """
        turned, values = turned.transpose(1, 2), values.transpose(1, 2)
        queries, keys = turned.split([turned.shape[1] - values.shape[1], values.shape[1]], 1)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        seen, _ = self._attend(self, queries, keys, values, mask, scaling=self.scaling)
        return seen.reshape(*seen.shape[:2], -1)

    def finish(self, hidden_states: Tensor, seen: Tensor) -> Tensor:
        """[..., H]: the layer's output, from its input and what was seen, [..., N D]."""
        hidden_states = hidden_states + self.o_proj(seen)
        gate, up = self.gate_up_proj(norm(self.post_attention_layernorm, hidden_states)).chunk(2, -1)
        return hidden_states + self.down_proj(self.act_fn(gate) * up)


class FusedAngles(nn.Module):
    """Stands for the model's rotary embedding: the same angles, in the form that `turn` takes.

    Args:
        rotary: of the model; gives (cos, sin), [B, W, D] each.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> Angles:
        """cos and signed sin, [B, W, 1, D] each."""
        cos, sin = self.rotary(x, position_ids=position_ids)
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cos.unsqueeze(2), signed.unsqueeze(2)


def turn(heads: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """Rotary position embedding of [..., N, D]: x cos + rotate_half(x) sin, the halves' sign being in `signed`."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads * cos + swapped * signed


def norm(module: Any, x: Tensor) -> Tensor:
    """The layer's RMS norm; in one operation where nothing is rounded in between."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
    normed: Tensor = module(x)
    return normed


def joined(*linears: Any) -> nn.Linear:
    """One layer with the outputs of all, one behind the other."""
    first = linears[0]
    outputs = sum(linear.out_features for linear in linears)
    with torch.device("meta"):
        made = nn.Linear(first.in_features, outputs, bias=first.bias is not None)
    made.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if first.bias is not None:
        made.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return made


def fuse_layers(model: Any) -> bool:
    """Replace the decoder layers of a model, in place, if it is of a kind that is known; whether they are fused now."""
    body: Any = getattr(model, "model", None)
    name = KNOWN.get(getattr(model.config, "model_type", ""))
    layers = getattr(body, "layers", None)
    if name is None or type(model).__name__ != f"{name}ForCausalLM" or not layers:
        return False
    if all(type(layer) is FusedLayer for layer in layers):
        return True
    if any(type(layer).__name__ != f"{name}DecoderLayer" or not _plain(layer) for layer in layers):
        return False
    if model.config._attn_implementation not in ("sdpa", GROUPED):  # others want to be told more than the mask says
        return False
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    for i, layer in enumerate(layers):
        layers[i] = FusedLayer(layer, attend)
    body.rotary_emb = FusedAngles(body.rotary_emb)
    return True


def _plain(layer: Any) -> bool:
    """Whether the projections are linear layers as they come: not packed, quantised or wrapped by a library."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    return all(type(part) is nn.Linear for part in parts)
