"""A small model drafts for a large one (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch

from specpipe.errors import UserError, choice
from specpipe.proposers.model import ModelProposer
from specpipe.proposers.translation import SameTokens, Translation
from specpipe.verifier.prepared import prepare
from specpipe.verifier.support import plain_logits, refuse_unsupported
from specpipe.verifier.targets import Target, hf

QUANTIZATIONS = ("int8",)


class DraftModel(ModelProposer):
    """Any Hugging Face causal LM. With another tokenizer than the target's it drafts the tokens that both have.

    Args:
        model: hub id or local directory.
        dtype: of the draft's weights.
        draw, min_confidence, copy_bias: see `ModelProposer`.
        quantize: `int8` keeps the weights of the linear layers but the head in 8 bits, see `Int8Linear`; on a CPU, with
            dtype bfloat16.
    """

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "bfloat16",
        draw: str = "sample",
        min_confidence: float = 0.0,
        copy_bias: Items[float] = (),
        quantize: str | None = None,
    ) -> None:
        super().__init__(draw=draw, min_confidence=min_confidence, copy_bias=copy_bias)
        self.model, self.dtype = model, dtype
        self.quantize = quantization(quantize, dtype)

    def bind(self, target: Target) -> None:
        """Load the draft onto the target's device. Raises UserError if their tokenizers have too little in common."""
        draft = self._loaded(drafting_device(target, self.quantize))
        refuse_unsupported(draft.model)
        plain_logits(draft.model)  # for what it refuses
        words = words_of(target, draft)
        prepare(draft.model, int8=self.quantize is not None)
        self._use(draft.model, target.vocabulary, draft.context, words)

    def plain_model(self, target: Target) -> Any:
        """Another copy of the draft, as `transformers` loads it; None if its tokens are not the target's."""
        draft = self._loaded(drafting_device(target, None))
        return draft.model if isinstance(words_of(target, draft), SameTokens) else None

    def _loaded(self, device: torch.device) -> Target:
        return hf(model=self.model, dtype=self.dtype, device=str(device))


def quantization(quantize: str | None, dtype: str) -> str | None:
    """`quantize`, if weights of that type can be kept so; else UserError."""
    if quantize is None:
        return None
    if choice("quantize", quantize, QUANTIZATIONS) and dtype != "bfloat16":
        raise UserError(f"{quantize} weights need dtype bfloat16, not {dtype}.", key="quantize")
    return quantize


def drafting_device(target: Target, quantize: str | None) -> torch.device:
    """The target's device, where a draft of it belongs; UserError if weights cannot be kept there as asked."""
    device: torch.device = next(target.model.parameters()).device
    if quantize and device.type != "cpu":
        raise UserError(f"{quantize} weights work on a CPU, and the target is on {device}.", key="quantize")
    return device


def words_of(target: Target, draft: Target) -> SameTokens | Translation:
    """Nothing to translate if both tokenizers give the same tokens the same ids. Equal sizes prove nothing.

    Raises UserError for a draft whose tokenizer has ids that its model lacks, and if they have too little in common.
    """
    if (last := max(draft.tokenizer.get_vocab().values())) >= draft.vocabulary:
        what = f"the ids of its tokenizer go up to {last}, and those of the model to {draft.vocabulary - 1}"
        raise UserError(f"{what}: it could not read them.", key="model")
    same = target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
    return SameTokens() if same else Translation(target, draft)
