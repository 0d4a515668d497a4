"""What training hands to decoding: a folder with a card, weights and the ids a draft can say.

`draft.json` says what the weights are, for which target, and how they came about; `model.safetensors` holds them;
`vocabulary.safetensors` the kept ids. Knows files; knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specpipe.errors import UserError, one_line
from specpipe.formats.checkpoint import load_tensors

CARD, WEIGHTS, VOCABULARY = "draft.json", "model.safetensors", "vocabulary.safetensors"
FORMAT, VERSION = "specpipe draft", 1
SCALE = ".scale"  # ends the name of what an 8-bit matrix is multiplied with
LARGEST_INT8 = 127


@dataclass(frozen=True)
class Card:
    """What a trained draft is.

    kind: of draft, such as `mlp`. target: name of the model it was trained for. vocabulary: hash of that one's
    tokenizer (`vocabulary_hash`). hidden: size of its hidden states. shape: what its module is built with. training:
    how it came about, for people: command, revision, data, figures.
    """

    kind: str
    target: str
    vocabulary: str
    hidden: int
    shape: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, card: Card, weights: Mapping[str, Tensor], ids: Tensor) -> None:
    """Write the three files; `ids` [D] are the target's ids that the draft can say, ascending."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    save_card(folder, card, ids)


def save_card(folder: Path, card: Card, ids: Tensor) -> None:
    """Write the two files that stand beside the weights, for who writes those in his own way."""
    save_file({"ids": ids.to(torch.int32).contiguous()}, folder / VOCABULARY)
    content = {"format": FORMAT, "version": VERSION, **asdict(card)}
    (folder / CARD).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path, kinds: Collection[str]) -> tuple[Card, dict[str, Tensor], Tensor]:
    """What `save` wrote: card, weights (8-bit ones multiplied out to float32) and ids [D] int64.

    Raises:
        UserError: for a folder that is no draft, is of another version or not one of `kinds`, or is damaged.
    """
    card = load_card(folder, kinds)
    ids = load_tensors(folder / VOCABULARY).get("ids")
    if ids is None or ids.dim() != 1 or not len(ids) or (ids.long().diff() <= 0).any() or ids[0] < 0:
        raise UserError(f"{str(folder)!r} is damaged: its kept ids are not ascending.", key="path")
    return card, multiplied_out(load_tensors(folder / WEIGHTS)), ids.long()


def load_card(folder: Path, kinds: Collection[str]) -> Card:
    """The card alone. Raises UserError as `load` does."""
    if not (folder / CARD).is_file():
        raise UserError(f"there is no trained draft in {str(folder)!r}: it has no {CARD}.", key="path")
    try:
        content = json.loads((folder / CARD).read_text(encoding="utf-8"))
        form, version = content.pop("format", None), content.pop("version", None)
        if (form, version) != (FORMAT, VERSION):
            raise UserError(f"{str(folder)!r} is a {form} of version {version}, not {FORMAT} {VERSION}.", key="path")
        card = Card(**content)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{str(folder / CARD)!r} is damaged: {one_line(error)}.", key="path") from error
    if card.kind not in kinds:
        raise UserError(f"{str(folder)!r} holds a {card.kind} draft, not {' or '.join(kinds)}.", key="path")
    return card


def in_eight_bits(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with a float32 scale for each row (`name.scale`), the rest as bfloat16: less to ship."""
    small: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() < 2:
            small[name] = weight.to(torch.bfloat16)
            continue
        scale = (weight.float().abs().amax(1) / LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny)
        small[name] = (weight.float() / scale[:, None]).round().to(torch.int8)
        small[f"{name}{SCALE}"] = scale
    return small


def multiplied_out(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `in_eight_bits`, up to its rounding; other weights stay as they are."""
    return {
        name: weight.float() * weights[f"{name}{SCALE}"].float()[:, None] if f"{name}{SCALE}" in weights else weight
        for name, weight in weights.items()
        if not name.endswith(SCALE)
    }
