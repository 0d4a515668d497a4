"""A target and a draft of 997 contexts over 64 ids, mean overlap .69: the world in which theory.md section 8c states
how many tokens it takes to see what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specpipe.audit.exact import table_pipeline
from specpipe.audit.finding import Finding
from specpipe.audit.proposals import ProposerLaw
from specpipe.audit.reading import Answer
from specpipe.audit.sampled import SampledLaw
from specpipe.audit.tables import FixedProposer, TableProposer
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.proposers import Proposer
from specpipe.samplers import Sampler
from specpipe.sequence import Sequence

V, CONTEXTS, GAMMA = 64, 997, 4
SPREAD_P, SPREAD_Q = 1.8, 0.87  # of the logits of p, and of what q adds to them


@cache
def logits() -> tuple[Tensor, Tensor]:
    """Logits [997, 64] of target and draft."""
    generator = torch.Generator().manual_seed(5)
    p = SPREAD_P * torch.randn(CONTEXTS, V, generator=generator, dtype=torch.float64)
    return p, p + SPREAD_Q * torch.randn(CONTEXTS, V, generator=generator, dtype=torch.float64)


def context(ids: list[int]) -> int:
    return (31 * ids[-1] + 17 * ids[-2] + 5 * ids[-3]) % CONTEXTS


def target(ids: list[int]) -> Tensor:
    return logits()[0][context(ids)]


def draft(ids: list[int]) -> Tensor:
    return logits()[1][context(ids)]


SOFT: Proposer = TableProposer(draft, V)
ARGMAX: Proposer = FixedProposer(lambda tokens, k: continued(tokens, k))


def continued(tokens: list[int], k: int) -> list[int]:
    """The draft's own k best ids."""
    ids = list(tokens)
    for _ in range(k):
        ids.append(int(draft(ids).argmax()))
    return ids[len(tokens) :]


class ArgmaxDraws:
    """Takes the best id of each q it returns: never drawn from it."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        tokens = torch.tensor([continued(sequence.tokens, max(lengths)) for sequence in sequences])
        probs = torch.zeros(*tokens.shape, V, dtype=torch.float64)
        for b, sequence in enumerate(sequences):
            for i in range(tokens.shape[1]):
                probs[b, i] = draft([*sequence.tokens, *tokens[b, :i].tolist()]).softmax(-1)
        return Draft(tokens.long(), list(lengths), probs)


class HotDraws:
    """Draws at another temperature than that of the q it returns."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Any:
        hot = TableProposer(lambda ids: draft(ids) / self.temperature, V).propose(sequences, lengths)
        for b, sequence in enumerate(sequences):
            for i in range(lengths[b]):
                hot.probs[b, i] = draft([*sequence.tokens, *hot.tokens[b, :i].tolist()]).softmax(-1)
        return hot


def sample(
    sampler: Sampler,
    proposer: Proposer,
    tokens: int,
    *,
    seed: int,
    chance: Callable[..., Chance] = Chance,
    per_request: int = 100,
    **settings: Any,
) -> tuple[Pipeline, list[Answer]]:
    """So many tokens out of the pipeline, in requests of equal length."""
    settings = {"temperature": 1.0, "max_new_tokens": min(per_request, tokens), **settings}
    pipeline = table_pipeline(target, V, proposer, sampler, gamma=GAMMA, seed=seed, **settings)
    answers = []
    for repeat in range(-(-tokens // per_request)):
        prompt = [repeat % V, (repeat // V) % V, seed % V]
        sequence = Sequence(prompt, pipeline.settings, chance=chance(seed, prompt, repeat))
        for _ in pipeline.decode(sequence):
            pass
        answers.append(Answer(prompt, sequence.new_tokens))
    return pipeline, answers


def judged(pipeline: Pipeline, answers: list[Answer], proposer: Proposer, seed: int = 0) -> Finding:
    """What the sampled-law test says of them."""
    law = SampledLaw(pipeline.verifier, pipeline.settings, frozenset(), ProposerLaw(proposer, pipeline.settings), seed)
    for answer in answers:
        law.add(answer)
    return law.finding()
