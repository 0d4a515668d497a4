"""Fused layers are the model's own layers in fewer operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from specpipe.verifier import fused
from specpipe.verifier.attention import group_queries
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.fused import FusedAngles, FusedLayer, fuse_layers, joined
from specpipe.verifier.linear import pack_linears
from specpipe.verifier.prepared import Prepared
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import ToyTokenizer, sharpened, small, uncached

IDS = [5, 60, 3, 3, 17, 44, 8, 29, 51, 2, 36, 11]
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
MODELS = {
    "Llama": ("Llama", {}),
    "Llama, every head its own keys": ("Llama", {"num_key_value_heads": 4}),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, stretched angles": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "Llama, wide heads": ("Llama", {"head_dim": 16}),
    "Mistral, window": ("Mistral", {"sliding_window": 3}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, window in one layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
}


def model_of(name: str) -> Any:
    """With biases and norms that matter."""
    kind, config = MODELS[name]
    model = sharpened(small(kind, **config))
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += 0.3 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grouped", [True, False])
def test_a_fused_model_gives_the_logits_that_it_gave_before(name: str, grouped: bool) -> None:
    model = model_of(name)
    before = uncached(model, IDS)
    if grouped:
        group_queries(model)
    assert fuse_layers(model)
    assert all(type(layer) is FusedLayer for layer in model.model.layers)
    assert (uncached(model, IDS) - before).abs().max() < 1e-11


@pytest.mark.parametrize("name", MODELS)
def test_the_verifier_rehearses_a_fused_model_with_its_cache(name: str) -> None:
    model = model_of(name)
    verifier = EagerVerifier(Target(model, ToyTokenizer(), name, None))
    assert verifier.prepared.fused
    assert all(type(layer) is FusedLayer for layer in model.model.layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_type_with_few_digits_is_rounded_where_the_model_rounds(dtype: torch.dtype) -> None:
    """float32 is not rounded in between at all: there one operation does what the model's own does in six."""
    model = model_of("Llama").to(dtype)
    before = uncached(model, IDS).double()
    fuse_layers(model)
    off = (uncached(model, IDS).double() - before).abs().max()
    assert off <= (1e-4 if dtype == torch.float32 else 2**-6) * before.abs().max()


def swapped_signs(cos: torch.Tensor, signed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cos, -signed


def test_the_wrong_sense_of_turning_and_the_wrong_order_of_projections_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = uncached(model_of("Llama"), IDS)
    turned = model_of("Llama")
    fuse_layers(turned)
    right = FusedAngles.forward
    monkeypatch.setattr(
        FusedAngles, "forward", lambda self, x, position_ids: swapped_signs(*right(self, x, position_ids))
    )
    assert (uncached(turned, IDS) - before).abs().max() > 0.01
    monkeypatch.undo()
    monkeypatch.setattr(fused, "joined", lambda *linears: joined(*reversed(linears)))
    reordered = model_of("Llama, every head its own keys")
    wanted = uncached(reordered, IDS)
    fuse_layers(reordered)
    assert (uncached(reordered, IDS) - wanted).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["GPT2", "Gemma", "Qwen3", "Phi3", "Olmo2"])
def test_other_architectures_are_left_as_they_are(kind: str) -> None:
    model = small(kind)
    before = [type(part) for part in model.modules()]
    assert not fuse_layers(model)
    assert [type(part) for part in model.modules()] == before


def test_layers_that_someone_changed_are_left_as_they_are() -> None:
    """A library that wraps or replaces projections, such as a quantiser, knows more of them than we do."""

    class Own(nn.Linear):
        pass

    model = small("Llama")
    projection = model.model.layers[1].self_attn.k_proj
    model.model.layers[1].self_attn.k_proj = Own(projection.in_features, projection.out_features, bias=False).double()
    assert not fuse_layers(model)
    assert type(model.model.layers[0]) is not FusedLayer
    packed = tiny(device="cpu").model
    assert pack_linears(packed)
    assert not fuse_layers(packed)


def test_the_option_changes_what_runs() -> None:
    plain, made = tiny(device="cpu"), tiny(device="cpu")
    assert not EagerVerifier(plain, fuse=False).prepared.fused
    assert EagerVerifier(made).prepared.fused
    assert type(plain.model.model.layers[0]) is not FusedLayer
    assert type(made.model.model.layers[0]) is FusedLayer
    assert EagerVerifier(made).prepared == Prepared(fused=True, packed=0)  # a second verifier finds the work done
