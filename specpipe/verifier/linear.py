"""Linear layers with weights packed once for the CPU's matrix kernels, or kept in 8 bits.

Packed: same arithmetic as `torch.nn.Linear`, the model's own weights, products summed in float32, one rounding to the
model's type. Less time: the plain layer repacks its weight in every call, and on a CPU without bf16 instructions it
takes as long for six rows of bf16 as for six times one row. No gradients.

    weights                              kernel
    bfloat16, CPU with bf16 instructions oneDNN, packed bfloat16
    bfloat16 and float32                 FBGEMM, packed float16, if the weights survive the change of type exactly, as
                                         those of a float32 model do that was loaded from a bfloat16 checkpoint
    float32 otherwise                    oneDNN, packed float32

In 8 bits: another model, close to the given one; for drafts, whose law may be any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 8  # the width oneDNN's layout is chosen for; other widths work
HALF_EXPONENT = 15  # the largest float16 is just below 2^16
LARGEST_INT8 = 127
WIDTH = 16  # inputs of an 8-bit layer are a multiple: with others the kernel reads past the end of the weights


class OneDnnLinear(nn.Module):
    """Stands for `linear` in inference, in its own type."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """[out, in] the weight, laid out anew as a plain matrix, and [out] the bias."""
        return self._weight.to_dense(), self._bias


class HalfLinear(nn.Module):
    """Stands for a bfloat16 or float32 `linear` whose weights, times 2^exponent, are float16 numbers without loss.

    Of a float32 one it reads half the bytes: a single row takes half the time of the packed float32 weights.
    """

    def __init__(self, linear: nn.Linear, exponent: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        bias = None if linear.bias is None else linear.bias.detach().float()
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(_scaled(linear.weight, exponent), bias)
        self._unscale = 2.0**-exponent

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] of the layer's type, computed in float32."""
        wide = x.float() if self._unscale == 1 else x.float() * self._unscale
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(wide, self._packed)
        return y.to(x.dtype)

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """[out, in] the weight, laid out anew as a plain matrix, and [out] the bias."""
        weight, bias = torch.ops.quantized.linear_unpack_fp16(self._packed)
        return (weight.float() * self._unscale).to(self._dtype), bias


class Int8Linear(nn.Module):
    """Stands for a bfloat16 `linear` with weights rounded to 8 bits, each output with a scale of its own.

    Half the memory. A single row takes less time than packed, of a small model as a whole hardly any less; long prompts
    take more. Inputs are not rounded, so a row knows nothing of the others beside it. A few rows are multiplied by the
    kernel for 8 bits; for more, widening the weights in every call takes less time than that kernel.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / LARGEST_INT8).to(torch.bfloat16)  # rounded first: no error of its own
        steps = weight / scale.float().clamp(min=torch.finfo(torch.bfloat16).tiny)[:, None]
        self._weight = steps.round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
        self._scale = scale
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]; both bfloat16, summed in float32."""
        rows = x.reshape(-1, self.in_features).contiguous()
        if len(rows) <= ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows, self._weight, self._scale)
        else:
            y = (rows.float() @ self._weight.float().T * self._scale).to(x.dtype)
        y = y if self._bias is None else y + self._bias
        return y.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of a CPU model in place, where a faster kernel exists; returns how many."""
    if next(model.parameters()).device.type != "cpu":
        return 0
    return _replace(model, _packed)


def packed(linear: nn.Linear) -> nn.Module:
    """The fastest equivalent of a linear layer on its device; itself where there is none."""
    return (_packed(linear) if linear.weight.device.type == "cpu" else None) or linear


def plain_weight(linear: Any) -> Tensor:
    """[out, in] the weight of a linear layer, packed or not; of a packed one it is a copy."""
    weight: Tensor = linear.unpacked()[0] if hasattr(linear, "unpacked") else linear.weight
    return weight.detach()


def plain_bias(linear: Any) -> Tensor | None:
    """[out] the bias of a linear layer, packed or not, if it has one."""
    bias: Tensor | None = linear.unpacked()[1] if hasattr(linear, "unpacked") else linear.bias
    return None if bias is None else bias.detach()


def quantize_linears(model: Any) -> int:
    """Replace the linear layers of a bfloat16 model on a CPU by `Int8Linear`, in place; returns how many.

    All but the head: an error there moves every logit, and it takes as long in 8 bits as packed.
    """
    head = model.get_output_embeddings()
    return _replace(model, lambda linear: None if linear is head or linear.in_features % WIDTH else Int8Linear(linear))


def _replace(model: nn.Module, replacement: Callable[[nn.Linear], nn.Module | None]) -> int:
    """Put a replacement in the place of each linear layer that has one; returns how many."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = replacement(child) if type(child) is nn.Linear else None
            if new is not None:
                setattr(parent, name, new)
                replaced += 1
    return replaced


def half_exponent(weight: Tensor) -> int | None:
    """The power of two that brings `weight` into float16 without loss, or None if none does.

    bfloat16 has fewer digits than float16 and more range, so only weights more than about 2^30 apart are in the way.
    """
    largest = weight.detach().abs().max().float().item()
    if not 0 < largest < math.inf:
        return None
    widest = HALF_EXPONENT - math.floor(math.log2(largest))
    for exponent in (0, widest):  # 0 spares a multiplication per call, and is enough for most models
        scaled = _scaled(weight, exponent)
        if torch.equal(scaled.half().float(), scaled):
            return exponent
    return None


def _packed(linear: nn.Linear) -> nn.Module | None:
    """The fastest equivalent of `linear` on this CPU. The operators are private to torch, so each is looked for."""
    dtype = linear.weight.dtype
    one_dnn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if one_dnn and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OneDnnLinear(linear)
    if dtype in (torch.bfloat16, torch.float32) and torch.backends.quantized.engine in ("fbgemm", "x86"):
        exponent = half_exponent(linear.weight)
        if exponent is not None:
            return HalfLinear(linear, exponent)
    return OneDnnLinear(linear) if one_dnn and dtype == torch.float32 else None


def _scaled(weight: Tensor, exponent: int) -> Tensor:
    return torch.ldexp(weight.detach().float(), torch.tensor(exponent))
