"""Reads finished texts with the target: logits at every emitted token, from passes of a chosen width.

The audit's own way to the target's laws, beside the decoding loop: it scores what is there and commits nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.support import in_own_type


@dataclass(frozen=True)
class Answer:
    """Token ids of one request, whoever decoded it."""

    prompt: list[int]
    output: list[int]


def logits_of(verifier: Any, answers: Items[Answer], width: int) -> Iterator[list[Tensor]]:
    """Target logits, in its own type, in front of every output token, `width` tokens a pass, all answers together.

    Yields:
        One list per pass: for each answer [n, V] rows, n <= width, for the next n of its output tokens.
    """
    settings = GenerationSettings(max_new_tokens=max((len(answer.output) for answer in answers), default=0) + 1)
    sequences = [Sequence(answer.prompt, settings, chance=Chance(0)) for answer in answers]
    for start in range(0, max((len(answer.output) for answer in answers), default=0), width):
        chunks = [answer.output[start : start + width] for answer in answers]
        reading = [b for b, chunk in enumerate(chunks) if chunk]
        draft = Draft.of([chunks[b][:-1] for b in reading], verifier.device)
        rows = verifier.score([sequences[b] for b in reading], draft)
        rows = [in_own_type(getattr(verifier.target, "model", None), each) for each in rows]
        empty = rows[0].new_zeros(0, rows[0].shape[-1])
        yield [rows[reading.index(b)] if chunk else empty for b, chunk in enumerate(chunks)]
        for b in reading:
            sequences[b].tokens += chunks[b]
        verifier.roll_back([sequences[b] for b in reading])


def all_logits(verifier: Any, answer: Answer, width: int) -> Tensor:
    """[n, V] target logits in front of each of the n output tokens, read `width` tokens a pass."""
    return torch.cat([rows[0] for rows in logits_of(verifier, [answer], width)])
