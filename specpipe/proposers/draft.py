"""A small model drafts for a large one (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from specpipe.errors import UserError, choice, flag
from specpipe.proposers.model import ModelProposer
from specpipe.proposers.translation import SameTokens, Translation
from specpipe.verifier.linear import pack_linears, quantize_linears
from specpipe.verifier.support import refuse_unsupported
from specpipe.verifier.targets import Target, hf

QUANTIZATIONS = ("int8",)


class DraftModel(ModelProposer):
    """Any Hugging Face causal LM. With another tokenizer than the target's it drafts the tokens that both have.

    Args:
        model: hub id or local directory.
        dtype: of the draft's weights.
        draw, min_confidence: see `ModelProposer`.
        prepack: on a CPU, pack the linear layers' weights once.
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
        prepack: bool = True,
        quantize: str | None = None,
    ) -> None:
        super().__init__(draw=draw, min_confidence=min_confidence)
        self.model, self.dtype, self.prepack = model, dtype, flag("prepack", prepack)
        self.quantize = None if quantize is None else choice("quantize", quantize, QUANTIZATIONS)
        if self.quantize and dtype != "bfloat16":
            raise UserError(f"{quantize} weights need dtype bfloat16, not {dtype}.", key="quantize")

    def bind(self, target: Target) -> None:
        """Load the draft onto the target's device. Raises UserError if their tokenizers have too little in common."""
        device = str(next(target.model.parameters()).device)
        if self.quantize and not device.startswith("cpu"):
            raise UserError(f"{self.quantize} weights work on a CPU, and the target is on {device}.", key="quantize")
        draft = hf(model=self.model, dtype=self.dtype, device=device)
        refuse_unsupported(draft.model)
        words = words_of(target, draft)
        if self.quantize:
            quantize_linears(draft.model)
        if self.prepack:
            pack_linears(draft.model)
        self._use(draft.model, target.vocabulary, draft.context, words)


def words_of(target: Target, draft: Target) -> SameTokens | Translation:
    """Nothing to translate if both tokenizers give the same tokens the same ids. Equal sizes prove nothing."""
    same = target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
    return SameTokens() if same else Translation(target, draft)
