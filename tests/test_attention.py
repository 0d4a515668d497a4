"""Grouped query heads attend as `transformers` lets them, without copies of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specpipe.verifier.attention import NAME, WIDEST, group_queries, grouped
from specpipe.verifier.targets import tiny


def reference(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    """Each query head with the key/value head of its group, one by one."""
    times = query.shape[1] // key.shape[1]
    heads = []
    for h in range(query.shape[1]):
        scores = query[:, h] @ key[:, h // times].transpose(1, 2) * scale
        heads.append(scores.masked_fill(~mask[:, 0], -torch.inf).softmax(-1) @ value[:, h // times])
    return torch.stack(heads, 2)  # [B, W, H, D]


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("width", [1, 2, 5, WIDEST, WIDEST + 1])
def test_every_width_and_grouping_gives_each_head_its_own_attention(groups: int, width: int) -> None:
    torch.manual_seed(0)
    length = width + 7
    query = torch.randn(2, 6, width, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, groups, length, 8, dtype=torch.float64)
    mask = torch.ones(2, 1, width, length, dtype=torch.bool).tril(7)
    mask[1] = mask[1].roll(-3, -1)  # another row sees other entries
    mask[..., 0] = True
    module = torch.nn.Module()
    module.num_key_value_groups = 6 // groups  # type: ignore[assignment]
    got, _ = grouped(module, query, key, value, mask, scaling=0.3)
    assert (got - reference(query, key, value, mask, 0.3)).abs().max() < 1e-12


def test_queries_in_the_order_of_the_wrong_heads_would_be_seen() -> None:
    torch.manual_seed(0)
    query, mask = torch.randn(1, 4, 3, 8), torch.ones(1, 1, 3, 5, dtype=torch.bool)
    key, value = torch.randn(2, 1, 2, 5, 8)
    wrong = query.transpose(1, 2).reshape(1, 2, -1, 8)
    got = F.scaled_dot_product_attention(wrong, key, value, mask.repeat(1, 1, 2, 1)).reshape(1, 4, 3, 8).transpose(1, 2)
    assert (got - reference(query, key, value, mask, 8**-0.5)).abs().max() > 0.1


def test_a_model_gives_the_logits_that_it_gave_before() -> None:
    model = tiny(dtype="float64", device="cpu").model
    ids = torch.randint(0, 200, (2, 9))
    before = model(input_ids=ids).logits
    assert group_queries(model)
    assert model.config._attn_implementation == NAME
    assert (model(input_ids=ids).logits - before).abs().max() < 1e-12


def test_a_model_without_shared_heads_is_left_as_it_is() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    assert not group_queries(model)
    assert model.config._attn_implementation == "sdpa"
