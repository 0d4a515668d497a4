"""Texts to make and judge an artefact by: the package's demo prompts, and what a model says behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specpipe.pipeline import Pipeline
from specpipe.prompts import demo
from specpipe.proposers.none import NoProposer
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.states import States
from specpipe.verifier.targets import Target

ANSWER = 16  # tokens


@dataclass(frozen=True)
class Text:
    """ids: of a prompt and the answer to it. start: the place of the prompt's last token, where drafting begins."""

    ids: list[int]
    start: int

    @property
    def answer(self) -> list[int]:
        return self.ids[self.start + 1 :]


def texts_of(target: Target, answer: int = ANSWER) -> tuple[list[Text], list[Text]]:
    """Two halves of the demo prompts, of the same kinds, answered greedily with so many tokens: always the same ones.

    What is fitted on the first is checked on the second. Prompts are cut to what the model's context can hold. The
    target's model is prepared for it, in place (`prepared.py`).
    """
    room = None if target.context is None else max(1, target.context - answer)
    pipeline = Pipeline(
        verifier=EagerVerifier(target),
        proposer=NoProposer(),
        sampler=Rejection(),
        settings=GenerationSettings(max_new_tokens=answer, ignore_eos=True),
    )
    requests = pipeline.sequences([pipeline.text.encode(prompt)[:room] for prompt in demo().texts])
    for _ in pipeline.decode_together(requests, len(requests)):
        pass
    texts = [Text(request.tokens, request.prompt_length - 1) for request in requests]
    return texts[::2], texts[1::2]


def read(model: Any, text: Text) -> tuple[Tensor, Tensor]:
    """What a model makes of the A tokens of an answer: states [A + 1, H] that its head is given, logits [A + 1, V].

    Both in float32 on the CPU, from the place of the prompt's last token on.
    """
    ids = torch.tensor([text.ids], device=next(model.parameters()).device)
    with torch.no_grad(), States(model).watched() as given:
        logits = model(input_ids=ids, use_cache=False).logits
    states, behind = given[0][0, text.start :], logits[0, text.start :]
    return states.float().cpu(), behind.float().cpu()
