"""Attention of grouped query heads on a CPU that does not copy keys and values.

Where several query heads share a key/value head, `transformers` repeats keys and values once per query head for passes
over more than one token, which takes longer than the attention itself. Here the queries of a group stand in one row
instead: same products, same sums up to the order of rounding, no copy of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

NAME = "specpipe_grouped"
WIDEST = 64  # tokens of a pass; in longer ones, which read prompts, the larger mask would cost more than the copy


def group_queries(model: Any) -> bool:
    """Let a CPU model with grouped heads use it, in place, if its attention is replaceable; whether it does."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) not in (None, heads)
    on_cpu = next(model.parameters()).device.type == "cpu"
    if not (shared and on_cpu and config._attn_implementation == "sdpa" and model._can_set_attn_implementation()):
        return False
    AttentionInterface.register(NAME, grouped)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def grouped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `transformers`' own for `sdpa`: query [B, H, W, D]; key, value [B, G, L, D]; to [B, W, H, D].

    attention_mask: [B, 1, W, L]; a mask that differs between heads, or none, is left to the original.
    """
    batch, heads, width, size = query.shape
    groups = key.shape[1]
    alike = attention_mask is not None and attention_mask.shape[1] == 1 and others.get("position_bias") is None
    if heads == groups or width > WIDEST or not alike:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    assert attention_mask is not None
    rows = query.reshape(batch, groups, -1, size)  # of a group's heads, one behind the other
    mask = _of_groups(attention_mask, heads // groups, query.dtype)
    attended = F.scaled_dot_product_attention(rows, key, value, mask, dropout, scale=scaling)
    return attended.reshape(batch, heads, width, size).transpose(1, 2).contiguous(), None


_made: Any = WeakTensorKeyDictionary()  # by the mask of a pass, which all its layers are given


def _of_groups(mask: Tensor, times: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, times W, L]: the mask for each head of a group, as what is added to the scores; made once in a pass."""
    made: Tensor | None = _made.get(mask)
    if made is None or made.shape[2] != times * mask.shape[2] or made.dtype != dtype:
        added = mask
        if mask.dtype == torch.bool:
            added = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
        made = _made[mask] = added.to(dtype).repeat(1, 1, times, 1)
    return made
