"""Draft models as directories of `transformers` (formats `hf` and `vllm`), which also hold a tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpipe.errors import UserError
from specpipe.export import about_the_proposer
from specpipe.export.check import Check, NotTheSame, compare
from specpipe.export.serving import Serving
from specpipe.export.texts import Text, read, texts_of
from specpipe.export.trimming import (
    of_kept_ids,
    penalty_row,
    settled_head,
    substitute,
    tokenizer_of_kept_ids,
    with_rows,
)
from specpipe.proposers.artifact import load_card
from specpipe.proposers.distilled import KIND, DistilledDraft, save_model
from specpipe.proposers.draft import DraftModel, words_of
from specpipe.proposers.translation import Translation
from specpipe.verifier.quiet import quiet_transformers
from specpipe.verifier.support import ROUNDING
from specpipe.verifier.targets import Target, hf

DRAFTED = 4  # tokens of a step, where nothing was measured
TOKENIZER_CONFIG = "tokenizer_config.json"
BY_TRANSFORMERS = "transformers: `AutoModelForCausalLM.from_pretrained`, as the `assistant_model` of `generate`"
BY_VLLM = "vLLM: `draft_model`; SGLang (STANDALONE) and TensorRT-LLM (draft-target) by their documentation, not tried"
BY_SPECPIPE = "specpipe: `proposer=draft proposer.model=...`"
LOADED_BY = (BY_TRANSFORMERS, BY_VLLM, BY_SPECPIPE)
BY_TOKENS = (
    "transformers: `generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)`",
    "vLLM: `draft_model` with `use_heterogeneous_vocab`, which drafts greedily",
    BY_SPECPIPE,
)
GREEDY_ALONE = "greedy drafts only: drawn ones may be ids that the draft was not trained to say"
OTHER_SIZE = "not vLLM: it wants a draft of as many ids as the target"


class CausalLmExport:
    """A draft model, its head settled.

    Args:
        draft: the model with its whole head and the tokenizer that belongs to it.
        ids: [D] ascending, those that it can say.
        head: what becomes of the others, see `trimming.py`; None where there are none.
        texts: to make the head by, and to check by.
        serving, loaded_by, training: as in `Export`.
    """

    def __init__(
        self,
        draft: Target,
        ids: Tensor,
        head: str | None,
        texts: tuple[list[Text], list[Text]],
        *,
        serving: Serving,
        loaded_by: tuple[str, ...],
        training: Mapping[str, Any],
    ) -> None:
        self.head, self.serving, self.loaded_by, self.training = head, serving, loaded_by, training
        self._draft, self._ids = draft, ids
        self._own = copy.deepcopy(draft.model).to("cpu", torch.float32)
        self._fitting, self._checking = texts
        self._tokenizer = draft.tokenizer
        if head == "small":
            self._substitute = substitute(draft.tokenizer, ids)
            self._tokenizer = tokenizer_of_kept_ids(draft.tokenizer, ids)
            self._checking = [self._readable(text) for text in self._checking]
        self._other = None
        if head == "penalty":
            self._other = penalty_row(torch.cat([read(self._own, text)[0] for text in self._fitting]))

    def write(self, folder: Path) -> None:
        save_model(folder, self._written())
        with quiet_transformers():
            self._tokenizer.save_pretrained(folder)
        _name_for_old_readers(folder / TOKENIZER_CONFIG)

    def check(self, folder: Path) -> Check:
        """In float32, in which the written weights are the draft's own numbers."""
        again = load_causal_lm(folder)
        ids = self._ids
        texts = self._checking
        if self.head == "small":
            ids = torch.arange(len(ids))
            texts = [Text(torch.searchsorted(self._ids, torch.tensor(t.ids)).tolist(), t.start) for t in texts]
            _demand_tokens(folder, self._tokenizer)
        return compare(
            torch.cat([read(self._own, text)[1] for text in self._checking])[:, self._ids],
            torch.cat([read(again, text)[1] for text in texts]),
            ids,
            allowed=ROUNDING[torch.float32],
            same_law=self.head != "zero",
        )

    def _written(self) -> Any:
        if self.head is None:
            return self._draft.model
        if self.head == "small":
            return of_kept_ids(self._draft.model, self._ids)
        return with_rows(self._draft.model, self._ids, self._other)

    def _readable(self, text: Text) -> Text:
        """As an engine hands it to the small draft."""
        kept = set(self._ids.tolist())
        return Text([token if token in kept else self._substitute for token in text.ids], text.start)


def export_distilled(
    proposer: DistilledDraft, target: Target, form: str, *, head: str | None, draw: str
) -> CausalLmExport:
    """A draft of the target's layers.

    Raises:
        UserError: for a target that it was not trained for, and a head that it cannot have.
    """
    with about_the_proposer():
        model, ids = proposer.load(target, torch.device("cpu"))
    able = ("penalty", "zero", "small") if form == "vllm" else ("penalty", "zero")
    settled = settled_head(head, trimmed=len(ids) < target.vocabulary, able=able)
    sampled = draw == "sample" and settled in (None, "penalty")
    keys: dict[str, Any] = {"method": "draft_model", "draft_sample_method": "probabilistic" if sampled else "greedy"}
    if settled == "small":
        keys["use_heterogeneous_vocab"] = True
    loaded_by = {"small": BY_TOKENS, "zero": (*LOADED_BY, GREEDY_ALONE)}.get(settled or "", LOADED_BY)
    return CausalLmExport(
        Target(model, target.tokenizer, KIND, str(proposer.path)),
        ids,
        settled,
        texts_of(target),
        serving=Serving(keys, DRAFTED),
        loaded_by=loaded_by,
        training=load_card(proposer.path, [KIND]).training,
    )


def export_draft(proposer: DraftModel, target: Target, form: str, *, head: str | None, draw: str) -> CausalLmExport:
    """Any causal LM, copied.

    Raises:
        UserError: for one that the engine of the format cannot pair with the target.
    """
    settled = settled_head(head, trimmed=False, able=())
    with about_the_proposer():
        draft = hf(model=proposer.model, dtype=proposer.dtype, device="cpu")
        words = words_of(target, draft)
        texts = texts_of(replace(draft, model=copy.deepcopy(draft.model)))
    sampled = draw == "sample"
    keys: dict[str, Any] | None = {
        "method": "draft_model",
        "draft_sample_method": "probabilistic" if sampled else "greedy",
    }
    loaded_by = LOADED_BY
    if isinstance(words, Translation):
        keys = {"method": "draft_model", "draft_sample_method": "greedy", "use_heterogeneous_vocab": True}
        loaded_by = BY_TOKENS
    elif draft.vocabulary != target.vocabulary:
        what = f"vLLM wants a draft of the target's {target.vocabulary} ids, and {draft.name} has {draft.vocabulary}"
        if form == "vllm":
            raise UserError(f"{what}; hf copies it as it is.", key="format")
        keys, loaded_by = None, (BY_TRANSFORMERS, BY_SPECPIPE, OTHER_SIZE)
    return CausalLmExport(
        draft,
        torch.arange(draft.vocabulary),
        settled,
        texts,
        serving=Serving(keys, DRAFTED),
        loaded_by=loaded_by,
        training={},
    )


def load_causal_lm(folder: Path) -> Any:
    """The model of such a directory in float32 on the CPU, by `transformers` alone.

    Raises:
        NotTheSame: if its tensors are not those of its config.
    """
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    if wrong := sorted(str(name) for names in report.values() for name in names):
        raise NotTheSame(f"transformers finds {len(wrong)} of its tensors missing or unknown, {wrong[0]} among them")
    return model.eval()


def _demand_tokens(folder: Path, tokenizer: Any) -> None:
    """Raise NotTheSame unless `transformers` loads this tokenizer from the folder."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        again = AutoTokenizer.from_pretrained(folder)
    if again.get_vocab() != tokenizer.get_vocab():
        raise NotTheSame("the tokenizer that was written gives tokens other ids")


def _name_for_old_readers(file: Path) -> None:
    """`transformers` 5 calls its general tokenizer TokenizersBackend, which version 4 does not know."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
