"""The end of a run: a real decode with what was trained must take the steps that the validation's walk says.

If it does not, something between training and decoding differs: mask, shift, template, cache or export.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpipe.pipeline import Pipeline
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target
from specpipe.walk import Walk, greedy_walk
from train.batches import collate
from train.module import Found
from train.shards import Document
from train.students import Student

TOLERANCE = 0.02


@dataclass(frozen=True)
class Agreement:
    """Tokens per target pass, decoded and walked, over the same texts."""

    decoded: float
    walked: float
    tokens: int

    @property
    def holds(self) -> bool:
        return abs(self.decoded / self.walked - 1) <= TOLERANCE


def decoded_as_walked(
    target: Target, student: Student, folder: Path, prompts: list[list[int]], *, gamma: int, max_new_tokens: int
) -> Agreement:
    """Decode prompts greedily with the draft in `folder`, and walk over the texts that came out.

    Args:
        target: freshly loaded.
        student: as trained, what the draft was made of.
        folder: of the draft.
        prompts: token ids.
        gamma: drafted tokens of a step.
        max_new_tokens: of each.
    """
    pipeline = Pipeline(
        verifier=EagerVerifier(target),
        proposer=student.proposer(folder),
        sampler=Rejection(),
        settings=GenerationSettings(temperature=0.0, max_new_tokens=max_new_tokens),
        num_speculative_tokens=gamma,
    )
    sequences = pipeline.sequences(prompts)
    for _ in pipeline.decode_together(sequences, len(sequences)):
        pass
    head = target.head_weight
    documents = [_document(target.model.base_model, head, sequence) for sequence in sequences]
    walked = sum((walk(student, document, gamma) for document in documents), Walk(0, 0))
    tokens = sum(len(sequence.new_tokens) for sequence in sequences)
    steps = sum(len(sequence.steps) for sequence in sequences)
    return Agreement(tokens / steps, walked.tau, tokens)


def walk(student: Student, document: Document, gamma: int) -> Walk:
    """The steps that greedy decoding of a document takes."""
    batch = collate([document])
    found = Found.of(batch, student.heads)
    with torch.inference_mode():
        p = student.teacher(batch)
        for each in student.guesses(batch):
            found.add(each, p[each.at], each.logits.float(), student.row_of[batch.answer[each.at]])
    hits, _ = found.guesses(slice(0, len(batch.answer)))
    return greedy_walk(hits, gamma, start=student.start)


def _document(read: Any, head: Tensor, sequence: Sequence) -> Document:
    """A decoded request as a document, its states from one pass over the whole text."""
    ids = torch.tensor(sequence.tokens)
    with torch.inference_mode():
        hidden = read(input_ids=ids[None].to(head.device), use_cache=False).last_hidden_state[0]
        states = hidden[sequence.prompt_length - 1 : -1]
        logz = (states @ head.T).float().logsumexp(-1)
    return Document(ids, sequence.prompt_length, states.cpu(), logz.cpu(), 0.0)
