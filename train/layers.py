"""Which of the target's layers a draft begins with: those that without training already say most of what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from specpipe.errors import UserError
from specpipe.proposers.layer_skip import with_layers
from specpipe.verifier.targets import Target
from train.batches import Batch, collate
from train.losses import overlap
from train.shards import Text

if TYPE_CHECKING:
    from train.students import Student

TOKENS = 1000  # written ones that a choice is measured on


def best_layers(target: Target, student: Student, text: Text, count: int) -> list[int]:
    """Greedy forward selection by alpha = E[sum min(p, q)], a pass over some text for each try.

    Args:
        target: whose layers they are, not packed.
        student: whose kept ids count.
        text: of the target.
        count: layers to choose.
    """
    available = target.model.config.get_text_config().num_hidden_layers
    if count > available:
        raise UserError(f"{count} is more than the target's {available} layers.", key="student.layers")
    batch = _some(text).to(student.head_rows.device)
    p = student.teacher(batch)
    chosen: list[int] = []
    for _ in range(count):
        tries = [sorted([*chosen, layer]) for layer in range(available) if layer not in chosen]
        chosen = max(tries, key=lambda layers: _alpha(target, layers, batch, student, p))
    return chosen


def _some(text: Text) -> Batch:
    documents, written = [], 0
    for document in text:
        documents.append(document)
        written += len(document.answer)
        if written >= TOKENS:
            break
    return collate(documents)


def _alpha(target: Target, layers: list[int], batch: Batch, student: Student, p: torch.Tensor) -> float:
    short = with_layers(target.model, layers)
    with torch.inference_mode():
        read = short.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = F.linear(read.flatten(0, 1)[batch.place].float(), student.head_rows)
        return float(overlap(p, logits).mean())
