"""The ids that a draft was not trained to say: a linear head without a bias has no way to give them probability zero.

Rows of zeros mean a logit of zero, and all rows of the target mean other drafts. What is left (V ids, D of them kept):

    penalty  rows -kappa u for the others, u a direction that all states of the draft have in common: their logits are
             so low that their probability is zero in float32
    zero     rows of zeros: greedy drafts are the same as long as the best kept logit is above zero; drawn ones are not
    small    a model of D ids with a tokenizer of its own; its engine translates, and may draft greedily alone
    full     the rows of the target: the draft of all ids, for one that was trained on all
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from specpipe.errors import UserError, choice
from specpipe.proposers.distilled import built, frozen_names, tied

HEADS = ("penalty", "zero", "small", "full")
FLOOR = 250.0  # below 0 where the logits of other ids lie: exp(-104) is zero in float32, and temperatures divide
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
PROCESSORS = ("ByteLevel", "TemplateProcessing", "Sequence")  # of a tokenizer's output, that can be renumbered


def settled_head(asked: str | None, *, trimmed: bool, able: Collection[str]) -> str | None:
    """What becomes of the ids that are not kept; None where all of them are.

    Args:
        asked: one of HEADS, or None for the first of `able`.
        trimmed: whether the draft was trained to say some ids alone.
        able: those of HEADS that this draft can have in this format.

    Raises:
        UserError: for one that does not go with the draft.
    """
    if asked is None:
        return next(iter(able)) if trimmed else None
    choice("head", asked, HEADS)
    if not trimmed:
        if asked != "full":
            raise UserError(f"{asked} is for a draft that says some ids alone, and this one says them all.", key="head")
        return None
    if asked == "full":
        what = "full makes another draft of one that was trained to say some ids alone"
        raise UserError(f"{what}: it would say the others too; there is {', '.join(able)}.", key="head")
    if asked not in able:
        raise UserError(f"{asked} does not go with this draft and format; there is {', '.join(able)}.", key="head")
    return asked


# ---- rows for a head of all ids ----


def penalty_row(states: Tensor) -> Tensor:
    """[H] -kappa u, which gives each of the states a logit of -FLOOR or less.

    u is the direction of the mean state and kappa = FLOOR / min u.s.

    Args:
        states: [N, H] what the head is given.

    Raises:
        UserError: if some state points the other way.
    """
    wide = states.double()
    u = wide.mean(0) / wide.mean(0).norm()
    low = (wide @ u).min().item()
    if not low > 0:
        what = f"penalty needs a direction that all states of the draft have in common, and there is none ({low:.3g})"
        raise UserError(f"{what}; zero keeps greedy drafts.", key="head")
    return (-FLOOR / low * u).float()


def all_rows(kept: Tensor, ids: Tensor, vocabulary: int, other: Tensor | None) -> Tensor:
    """[V, H] the kept rows [D, H] at their ids [D], and `other` [H] at the rest; None: zeros."""
    other = kept.new_zeros(kept.shape[1]) if other is None else other.to(kept)
    return other.repeat(vocabulary, 1).index_copy_(0, ids, kept)


# ---- models ----


def with_rows(model: Any, ids: Tensor, other: Tensor | None) -> Any:
    """The same causal LM, its head untied, with `other` [H] as the rows of all but the ids [D]; None: zeros."""
    _, head = frozen_names(model)
    weights = dict(model.state_dict())
    ids = ids.to(weights[head].device)
    weights[head] = all_rows(weights[head][ids], ids, len(weights[head]), other)
    if (bias := weights.get(bias_of := f"{head.removesuffix('weight')}bias")) is not None:
        weights[bias_of] = torch.zeros_like(bias).index_copy_(0, ids, bias[ids])
    return _remade(model, weights, tie_word_embeddings=False)


def of_kept_ids(model: Any, ids: Tensor) -> Any:
    """The causal LM that knows the ids [D] alone, under the numbers 0 .. D-1."""
    embedding, head = frozen_names(model)
    names = {embedding, head, f"{head.removesuffix('weight')}bias"}
    weights = {name: w[ids.to(w.device)] if name in names else w for name, w in model.state_dict().items()}
    number = {old: new for new, old in enumerate(ids.tolist())}
    named = _named_ids(model.config.get_text_config(), number)
    made = _remade(model, weights, vocab_size=len(ids), tie_word_embeddings=tied(model), **named)
    for name, value in _named_ids(made.generation_config, number).items():
        setattr(made.generation_config, name, value)
    return made


def _remade(model: Any, weights: dict[str, Tensor], **settings: Any) -> Any:
    """A model of the same class with these weights, its config changed by the settings."""
    config = copy.deepcopy(model.config)
    for each in (config, config.get_text_config()):
        for name, value in settings.items():
            setattr(each, name, value)
    made = built(type(model), config, weights, model.dtype, model.device)
    made.generation_config = copy.deepcopy(model.generation_config)
    return made


def _named_ids(config: Any, number: Mapping[int, int]) -> dict[str, Any]:
    """The ids that a config names, one or several each, renumbered; None for those that are not kept."""
    found: dict[str, Any] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value: Any = getattr(config, name, None)
        several = isinstance(value, (list, tuple))
        found[name] = [number[each] for each in value if each in number] or None if several else number.get(value)
    return found


# ---- the tokenizer of the kept ids ----


def substitute(tokenizer: Any, ids: Tensor) -> int:
    """What an engine reads in place of a token that the small draft lacks: its `unk`, else its end of text.

    Raises:
        UserError: if the draft lacks that one too.
    """
    named = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else tokenizer.eos_token_id
    if named is None or not (ids == named).any():
        what = "small has engines read the unknown or end-of-text id in place of what the draft cannot say"
        raise UserError(f"{what}, and it cannot say that one ({named}).", key="head")
    return int(named)


def tokenizer_of_kept_ids(tokenizer: Any, ids: Tensor) -> Any:
    """A tokenizer of `transformers` that knows the kept ids alone, renumbered, and the merges between them.

    Raises:
        UserError: for a tokenizer that cannot be cut so.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    number = {old: new for new, old in enumerate(ids.tolist())}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    kind = content["model"]["type"] if content else type(tokenizer).__name__
    if kind != "BPE":
        raise UserError(f"small cuts tokenizers of BPE, and this one is {kind}.", key="head")
    pieces = {piece: number[old] for piece, old in content["model"]["vocab"].items() if old in number}
    content["model"]["vocab"] = pieces
    content["model"]["merges"] = [[a, b] for a, b in content["model"]["merges"] if {a, b, a + b} <= pieces.keys()]
    content["added_tokens"] = [
        token | {"id": number[token["id"]]} for token in content["added_tokens"] if token["id"] in number
    ]
    _renumber_processors(content, number)
    names = {name: getattr(tokenizer, name) for name in NAMED if getattr(tokenizer, f"{name}_id", None) in number}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **names)
    if made.get_vocab() != {piece: number[old] for piece, old in tokenizer.get_vocab().items() if old in number}:
        raise UserError("small cannot renumber the tokens of this tokenizer.", key="head")
    return made


def _renumber_processors(content: dict[str, Any], number: Mapping[int, int]) -> None:
    for processor in _processors(content.get("post_processor")):
        if processor["type"] not in PROCESSORS:
            raise UserError(f"small cannot renumber the {processor['type']} of this tokenizer.", key="head")
        for special in processor.get("special_tokens", {}).values():
            if not number.keys() >= set(special["ids"]):
                what = f"the tokenizer puts {special['id']!r} into every text, and the draft cannot say it"
                raise UserError(f"small: {what}.", key="head")
            special["ids"] = [number[old] for old in special["ids"]]


def _processors(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if node is not None:
        yield node
        for each in node.get("processors", ()):
            yield from _processors(each)
