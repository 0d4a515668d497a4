"""Linear layers with weights packed once for the CPU's matrix kernels.

Same arithmetic as `torch.nn.Linear` (products summed in float32, one rounding to the model's type), less time: oneDNN
otherwise repacks the weight in every call. On a CPU without bf16 instructions a bf16 layer of more than one row
is an order slower than float32, so there the packed copy is float32 and only the layer's input and output are
rounded; the bf16 weight stays for single rows, where reading half the bytes wins. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 8  # the width the packed layout is chosen for; other widths work


class PackedLinear(nn.Module):
    """Stands for `linear` in inference."""

    def __init__(self, linear: nn.Linear, pack_as: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._type = pack_as
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(pack_as), ROWS)
        self._packed_bias = None if linear.bias is None else linear.bias.detach().to(pack_as)
        # Kept only where it serves: otherwise the packed copy replaces it, and memory stays what it was.
        self._single_row = linear if pack_as != linear.weight.dtype else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self._single_row is not None and x.numel() == self.in_features:
            return self._single_row(x)
        y = torch.ops.mkldnn._linear_pointwise(x.to(self._type), self._packed, self._packed_bias, "none", [], "")
        return y.to(x.dtype)


def pack_linears(model: nn.Module) -> int:
    """Replace every linear layer of a CPU model in place; returns how many. 0 where the kernels are missing."""
    if not packing_available() or next(model.parameters()).device.type != "cpu":
        return 0
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in (torch.float32, torch.bfloat16):
                setattr(parent, name, PackedLinear(child, _packing_type(child.weight.dtype)))
                packed += 1
    return packed


def packing_available() -> bool:
    """The packing operators are private to torch: used where they exist, else plain layers serve."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _packing_type(weight: torch.dtype) -> torch.dtype:
    hardware = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if weight == torch.bfloat16 and hardware else torch.float32
