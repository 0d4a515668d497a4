"""A small model drafts for a large one (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from typing import Any

from specpipe.errors import UserError, flag
from specpipe.proposers.model import ModelProposer
from specpipe.verifier.linear import pack_linears
from specpipe.verifier.support import refuse_unsupported
from specpipe.verifier.targets import Target, hf


class DraftModel(ModelProposer):
    """Any Hugging Face causal LM with the target's tokenizer; embeddings padded to another size are no matter.

    Args:
        model: hub id or local directory.
        dtype: of the draft's weights.
        draw, min_confidence: see `ModelProposer`.
        prepack: on a CPU, pack the linear layers' weights once.
    """

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "bfloat16",
        draw: str = "sample",
        min_confidence: float = 0.0,
        prepack: bool = True,
    ) -> None:
        super().__init__(draw=draw, min_confidence=min_confidence)
        self.model, self.dtype, self.prepack = model, dtype, flag("prepack", prepack)

    def bind(self, target: Target) -> None:
        """Load the draft onto the target's device. Raises UserError if their tokenizers differ."""
        device = str(next(target.model.parameters()).device)
        draft = hf(model=self.model, dtype=self.dtype, device=device)
        refuse_unsupported(draft.model)
        refuse_other_tokenizer(target.tokenizer, draft.tokenizer, target.name, draft.name)
        if self.prepack:
            pack_linears(draft.model)
        self._use(draft.model, target.vocabulary, draft.context)


def refuse_other_tokenizer(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Raise UserError unless both tokenizers give the same tokens the same ids. Equal sizes prove nothing."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    differing = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if differing:
        example = min(differing, key=lambda token: ours.get(token, len(ours)))
        where = f"{example!r} is {ours.get(example)} there and {theirs.get(example)} here"
        raise UserError(f"{draft_name} has another tokenizer than {target_name}: {where}.", key="model")
