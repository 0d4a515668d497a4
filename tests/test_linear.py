"""Linear layers packed, and in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specpipe.verifier.linear import (
    ROWS,
    HalfLinear,
    Int8Linear,
    pack_linears,
    packed,
    plain_weight,
    quantize_linears,
)

IN, OUT = 96, 80


def layer(bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(IN, OUT, bias=bias).bfloat16().requires_grad_(False)


def weight_of(made: Int8Linear) -> torch.Tensor:
    """[out, in] float64: what the layer multiplies with."""
    return made._weight.double() * made._scale.double()[:, None]


@pytest.mark.parametrize("rows", [1, 2, ROWS, ROWS + 1, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_it_multiplies_with_its_weights_to_rounding(rows: int, bias: bool) -> None:
    plain = layer(bias)
    made = Int8Linear(plain)
    x = torch.randn(1, rows, IN).bfloat16()
    wanted = x.double() @ weight_of(made).T + (plain.bias.double() if bias else 0)
    got = made(x)
    assert got.shape == (1, rows, OUT)
    assert got.dtype == torch.bfloat16
    assert (got.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_a_weight_is_off_by_half_a_step_of_its_own_output() -> None:
    """An output with small weights keeps its digits beside one with large ones; zeros stay zeros."""
    plain = layer()
    plain.weight[0] *= 1000
    plain.weight[1] = 0
    made = Int8Linear(plain)
    off = (weight_of(made) - plain.weight.double()).abs()
    step = plain.weight.double().abs().amax(1) / 127
    assert (off <= 0.51 * step[:, None] + step[:, None] * 127 * 2**-8).all()
    assert (off.mean(1)[2:] <= 0.3 * step[2:]).all()
    assert (weight_of(made)[1] == 0).all()


@pytest.mark.parametrize("rows", [3, 40])
def test_a_row_does_not_depend_on_its_neighbours(rows: int) -> None:
    """A scale taken from the whole batch, as in dynamic quantisation, would drown the small row."""
    made = Int8Linear(layer())
    x = torch.randn(rows, IN).bfloat16()
    loud = torch.cat([x[:1], x[1:] * 1e4])
    assert torch.equal(made(x)[0], made(loud)[0])
    assert (made(x)[0].double() - made(x[:1])[0].double()).abs().max() <= 2**-7 * made(x)[0].abs().max()


def test_the_dynamic_kernel_would_be_seen() -> None:
    plain = layer()
    scale = plain.weight.float().abs().amax() / 127
    quantized = (plain.weight.float() / scale).round()

    def dynamic(x: torch.Tensor) -> torch.Tensor:
        step = x.float().abs().max() / 127
        return (x.float() / step).round() @ quantized.T * step * scale

    x = torch.randn(3, IN).bfloat16()
    assert not torch.equal(dynamic(x)[0], dynamic(torch.cat([x[:1], x[1:] * 1e4]))[0])


def test_the_head_and_odd_layers_are_left_alone_and_can_be_packed() -> None:
    head, odd = layer(), torch.nn.Linear(100, 8).bfloat16()
    model: Any = torch.nn.Sequential(layer(), odd, head)
    model.get_output_embeddings = lambda: head
    assert quantize_linears(model) == 1
    assert isinstance(model[0], Int8Linear)
    assert model[1] is odd
    assert model[2] is head
    pack_linears(model)
    assert isinstance(model[0], Int8Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-7, 1.0, 3000.0])
def test_a_packed_weight_can_be_had_back(dtype: torch.dtype, size: float) -> None:
    """Also one whose numbers had to be moved into the range of another type."""
    plain = layer(bias=True).to(dtype)
    plain.weight *= size
    made = packed(plain)
    assert (made is plain) == (dtype == torch.float16)
    assert plain_weight(made).dtype == dtype
    assert torch.equal(plain_weight(made), plain.weight)


@pytest.mark.skipif(torch.backends.quantized.engine not in ("fbgemm", "x86"), reason="needs FBGEMM")
@pytest.mark.parametrize("rows", [1, 2, 6, 33])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_float32_weights_that_were_bfloat16_keep_two_bytes_and_float32_sums(rows: int, size: float) -> None:
    plain = layer()
    plain.weight *= size
    plain = plain.float()
    made = packed(plain)
    assert isinstance(made, HalfLinear)
    x = torch.randn(1, rows, IN)
    wanted = x.double() @ plain.weight.double().T
    got = made(x)
    assert got.dtype == torch.float32
    assert (got.double() - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    if size < 1:  # without a power of two they would have lost digits
        wrong = x.double() @ plain.weight.half().double().T
        assert (wrong - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_float32_weights_of_their_own_are_not_rounded() -> None:
    plain = torch.nn.Linear(IN, OUT).requires_grad_(False)
    assert not isinstance(packed(plain), HalfLinear)
