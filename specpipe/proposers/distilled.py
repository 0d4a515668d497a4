"""A few of the target's layers, trained to say what it says (cf. arXiv 2310.08461), draft.

They read through the target's embedding and speak through rows of its head: those of the tokens that its text is mostly
made of, since a small model spends most of its time in a large head (arXiv 2502.14856). q is the law over these tokens
alone.

One for another target is trained with `python -m train student=distilled target=...`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specpipe.errors import UserError, choice, one_line
from specpipe.paths import from_start
from specpipe.proposers import artifact
from specpipe.proposers.artifact import Card
from specpipe.proposers.counts import vocabulary_hash
from specpipe.proposers.draft import drafting_device, quantization
from specpipe.proposers.layer_skip import ascending, with_layers
from specpipe.proposers.model import ModelProposer
from specpipe.proposers.translation import SameTokens
from specpipe.verifier.prepared import prepare
from specpipe.verifier.quiet import quiet_transformers
from specpipe.verifier.support import ROUNDING, difference, plain_logits, refuse_unsupported
from specpipe.verifier.targets import DTYPES, Target

SHIPPED = Path(__file__).with_name("smollm2_distilled")
KIND = "distilled"
CONFIG = "config.json"
OLD_ROPE = ("rope_theta", "partial_rotary_factor")  # beside `rope_scaling`, in version 4 of transformers
REMEDY = "`python -m train student=distilled target=...` trains one"


class DistilledDraft(ModelProposer):
    """A draft that training made of some of the target's layers.

    Args:
        path: of its folder; None is the shipped one, which is for the default target.
        dtype: of its weights; with the target's own, both have one embedding in memory.
        draw, min_confidence, copy_bias: see `ModelProposer`.
        quantize: see `DraftModel`.

    Raises:
        UserError: for a value out of range and a folder that is not that of such a draft.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        dtype: str = "bfloat16",
        draw: str = "sample",
        min_confidence: float = 0.0,
        copy_bias: Items[float] = (),
        quantize: str | None = None,
    ) -> None:
        super().__init__(draw=draw, min_confidence=min_confidence, copy_bias=copy_bias)
        if path is not None and not isinstance(path, (str, Path)):
            raise UserError(f"{path!r} is not the path of a folder.", key="path")
        self.path = SHIPPED if path is None else from_start(path)
        self.dtype = choice("dtype", dtype, DTYPES)
        self.quantize = quantization(quantize, dtype)
        if not self.path.is_dir():
            raise UserError(f"there is no trained draft {str(self.path)!r}; {REMEDY}.", key="path")
        self._card = artifact.load_card(self.path, [KIND])

    def bind(self, target: Target) -> None:
        """Build the draft on the target's device. Raises UserError for a target that it cannot draft for."""
        device = drafting_device(target, self.quantize)
        model, ids = self.load(target, device)
        refuse_unsupported(model)
        context = Target(model, target.tokenizer, KIND, str(self.path)).context
        if trimmed := len(ids) < target.vocabulary:
            keep_rows(model, ids)
        prepare(model, int8=self.quantize is not None)
        self._use(model, target.vocabulary, context, SameTokens(ids.to(device) if trimmed else None))

    def plain_model(self, target: Target) -> Any:
        """Another copy of the draft, with its whole head, as `transformers` has such models."""
        return self.load(target, drafting_device(target, None))[0]

    def load(self, target: Target, device: torch.device) -> tuple[Any, Tensor]:
        """The model with its whole head, and the ids [D] that it keeps. Raises UserError as `bind` does."""
        self._refuse_unless(vocabulary_hash(target.tokenizer) == self._card.vocabulary, target, "vocabulary")
        _, weights, ids = artifact.load(self.path, [KIND])
        blank = self._blank()
        size = blank.config.get_text_config().vocab_size
        self._refuse_unless(size == target.vocabulary, target, "vocabulary")
        if ids[-1] >= size:
            raise self._damaged(f"it keeps id {ids[-1]}, and its ids end at {size - 1}")
        embedding, head = frozen_names(blank)
        if embedding not in weights:
            ours, theirs = blank.get_input_embeddings().weight.shape[1], target.embedding_weight.shape[1]
            self._refuse_unless(ours == theirs, target, f"hidden size ({theirs}, not {ours})")
            weights |= {embedding: target.embedding_weight} | ({} if tied(blank) else {head: target.head_weight})
        try:
            return built(type(blank), blank.config, weights, DTYPES[self.dtype], device), ids
        except Exception as error:  # weights of other shapes make the library raise what it likes
            raise self._damaged(one_line(error)) from error

    def _blank(self) -> Any:
        """The model that config.json describes, without weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if not (self.path / CONFIG).is_file():
            raise self._damaged(f"it has no {CONFIG}")
        try:
            with quiet_transformers(), torch.device("meta"):
                return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.path, trust_remote_code=False))
        except Exception as error:
            raise self._damaged(f"{CONFIG}: {one_line(error)}") from error

    def _refuse_unless(self, same: bool, target: Target, what: str) -> None:
        if not same:
            trained = f"{self.path.name!r} was trained for {self._card.target}"
            raise UserError(f"{trained}, and {target.name} has another {what}; {REMEDY} for it.", key="path")

    def _damaged(self, fault: str) -> UserError:
        return UserError(f"{str(self.path)!r} is damaged: {fault.rstrip('.')}.", key="path")


# ---- the model ----


def pruned(model: Any, layers: list[int]) -> Any:
    """A causal LM of its own made of some layers of `model`: where training begins.

    Layers, final norm and whatever else there is are copies and have gradients; the matrices of embedding and head are
    the given model's, in the same memory, and have none.

    Args:
        model: of `transformers`, its linear layers not packed.
        layers: ascending numbers from 0.

    Raises:
        UserError: for layers that the model lacks, and for a model whose layers have more to them than its config can
            say of some alone.
        ValueError: for a packed model.
    """
    short = with_layers(model, ascending(layers))
    config = copy.deepcopy(short.config)
    config.num_hidden_layers = len(layers)
    shared = set(frozen_names(short))
    weights = {name: weight if name in shared else weight.clone() for name, weight in short.state_dict().items()}
    own = built(type(model), config, weights, model.dtype, model.device)
    own.generation_config = copy.deepcopy(model.generation_config)
    off = difference(plain_logits(own), plain_logits(short))
    if not off <= ROUNDING[model.dtype]:
        what = f"layers {layers} of {type(model).__name__} do not make a model of their own"
        raise UserError(f"{what}: its logits are off by {off:.0%} of their spread.", key="layers")
    return own


def built(kind: Any, config: Any, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """A model of class `kind` in eval mode; embedding and head stay in the memory where they are given, if they can.

    Args:
        kind: class of `transformers`.
        config: its config.
        weights: all that it has, by their names in the state dict; a tied head may be left out.
        dtype, device: where and as what to keep them.

    Raises:
        ValueError: if these are not the weights of such a model.
    """
    with quiet_transformers():
        model, report = kind.from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=dtype, output_loading_info=True
        )
    if wrong := sorted(map(str, {*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]})):
        raise ValueError(f"{len(wrong)} of its weights are not those of its {CONFIG}, {wrong[0]} among them")
    model.to(device)
    embedding, head = frozen_names(model)
    words = nn.Parameter(weights[embedding].to(device, dtype), requires_grad=False)
    rows = words if tied(model) else nn.Parameter(weights[head].to(device, dtype), requires_grad=False)
    model.get_input_embeddings().weight, model.get_output_embeddings().weight = words, rows
    return model.eval()


def keep_rows(model: Any, ids: Tensor) -> None:
    """Give the model a head of these rows of its own alone, [D, H] in memory of their own; ids [D]."""
    head = model.get_output_embeddings()
    ids = ids.to(head.weight.device)
    short = nn.Linear(head.in_features, len(ids), head.bias is not None, "meta", head.weight.dtype)
    for name, weight in head.named_parameters():
        setattr(short, name, nn.Parameter(weight.detach()[ids], requires_grad=False))
    model.set_output_embeddings(short)


def frozen_names(model: Any) -> tuple[str, str]:
    """The names of the matrices of embedding and head in the state dict."""
    names = {id(part): name for name, part in model.named_modules()}
    embedding, head = names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]
    return f"{embedding}.weight", f"{head}.weight"


def tied(model: Any) -> bool:
    """Whether embedding and head are one matrix."""
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def trained_weights(model: Any) -> dict[str, Tensor]:
    """What a draft has beside the matrices of embedding and head, by the names in its state dict."""
    frozen = frozen_names(model)
    return {name: weight for name, weight in model.state_dict().items() if name not in frozen}


# ---- the folder ----


def save_draft(folder: Path, model: Any, card: Card, ids: Tensor) -> None:
    """Write a directory that `transformers` and others load by themselves, with the target's embedding and head.

    Args:
        folder: made if it is not there.
        model: as from `pruned`.
        card: of kind `distilled`.
        ids: [D] ascending, those that the draft was trained to say.
    """
    save_model(folder, model)
    artifact.save_card(folder, card, ids)


def save_model(folder: Path, model: Any) -> None:
    """Write a causal LM as `transformers` and others load it, without a tokenizer."""
    with quiet_transformers():
        model.save_pretrained(folder)
    _write_config(folder, model)


def save_trained_parts(folder: Path, model: Any, card: Card, ids: Tensor) -> None:
    """Write what training changed alone, in 8 bits; the rest is the target's. Arguments as of `save_draft`."""
    artifact.save(folder, card, artifact.in_eight_bits(trained_weights(model)), ids)
    _write_config(folder, model)


def _write_config(folder: Path, model: Any) -> None:
    """config.json with the names of `transformers` 5 and those that readers of version 4 look for."""
    model.config.save_pretrained(folder)
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    content["architectures"] = [type(model).__name__]
    content["dtype"] = content["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    rope = content.get("rope_parameters") or {}
    content |= {key: rope[key] for key in OLD_ROPE if key in rope}
    if rope.get("rope_type", "default") != "default":
        content["rope_scaling"] = {key: value for key, value in rope.items() if key not in OLD_ROPE}
    (folder / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
