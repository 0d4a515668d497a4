"""Trained MLP heads as compiled calls, one for each drafted token: for a target that runs compiled."""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import TypeGuard

import torch
from torch import Tensor

from specpipe.proposers.bound_heads import TrainedHeads
from specpipe.proposers.heads import EPSILON, MlpHeads
from specpipe.verifier.kernels import Heads, PanelLinear, program
from specpipe.verifier.linear import plain_weight


class CompiledHeads:
    """Stands for heads of the kind `mlp` that are bound to a target on a CPU; see `DraftingHeads`.

    Args:
        heads: for which `fits` holds.

    Raises:
        NoCompiler: see `kernels.program`.
    """

    def __init__(self, heads: TrainedHeads) -> None:
        self._program, module = program(), heads.module
        assert isinstance(module, MlpHeads)
        self.heads, self.ids, self._embedding = heads.heads, heads.ids, heads.embedding
        later = module.proj_1 if heads.heads > 1 else module.proj_0
        matrices = (module.proj_0, later, module.inner.T, module.outer)
        self._linears = [PanelLinear(each.detach(), None) for each in matrices]
        self._linears.append(PanelLinear(plain_weight(heads.head), None))
        self._norm = [each.detach().contiguous() for each in (module.norm_weight, module.norm_bias)]
        self._struct = Heads(
            *(linear.struct for linear in self._linears),
            *(each.data_ptr() for each in self._norm),
            module.weight_of_token,
            EPSILON,
            module.hidden,
            heads.embedding.dtype == torch.bfloat16,
        )

    @staticmethod
    def fits(heads: object) -> TypeGuard[TrainedHeads]:
        """Whether there is a program for them."""
        return isinstance(heads, TrainedHeads) and isinstance(heads.module, MlpHeads) and heads.module.hidden % 8 == 0

    def step(self, i: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The next carry, and for features the logits [R, D] themselves."""
        carry = carry.float().clone(memory_format=torch.contiguous_format)
        embedded = self._embedding[tokens].float()
        logits = torch.empty(len(tokens), len(self.ids))
        addresses = (c_void_p(each.data_ptr()) for each in (carry, embedded, logits))
        self._program.run_head(byref(self._struct), i > 0, *addresses, len(tokens), torch.get_num_threads())
        return carry, logits

    def logits(self, i: int, features: Tensor) -> Tensor:
        """What `step` gave."""
        return features
