"""Table models: every prefix has a law of its own, so that a shifted row or a wrong prefix changes what comes out.

Small enough to enumerate. Targets answer the pipeline's verifier interface straight from the table; proposers draw from
another table and return the q they drew from.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import cache

import torch
from torch import Tensor

from specpipe.distribution import in_vocabulary
from specpipe.draft import Draft
from specpipe.sequence import Sequence

Rule = Callable[[list[int]], Tensor]  # ids of a prefix -> logits [V], float64


def table(size: int, seed: int, zeros: float = 0.3) -> Rule:
    """A law of its own for every prefix; a share of `zeros` of the tokens has no mass, never all of a row."""

    @cache
    def row(ids: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *ids)) % 2**63)
        weights = torch.rand(size, generator=generator, dtype=torch.float64) ** 2 + 0.01
        dropped = torch.rand(size, generator=generator) < zeros
        dropped[int(torch.randint(size, (1,), generator=generator))] = False
        return weights.masked_fill(dropped, 0.0).log()

    return lambda ids: row(tuple(ids))


class TableTarget:
    """What a pipeline must know of its target: ids 0 .. size - 1, no text, no end."""

    tokenizer = None
    eos_ids: tuple[int, ...] = ()
    context = None

    def __init__(self, size: int) -> None:
        self.vocabulary = size


class TableVerifier:
    """The verifier interface on a rule: logits straight from the prefix, nothing cached, nothing to roll back."""

    device = torch.device("cpu")

    def __init__(self, rule: Rule, size: int) -> None:
        self.rule = rule
        self.target = TableTarget(size)

    def score(self, sequences: list[Sequence], draft: Draft) -> list[Tensor]:
        """Row b: logits [k_b + 1, V]."""
        return [self._rows(sequence.tokens, draft.row(b)[0]) for b, sequence in enumerate(sequences)]

    def roll_back(self, sequences: list[Sequence]) -> None:
        """Nothing was kept."""

    def _rows(self, tokens: list[int], x: list[int]) -> Tensor:
        return torch.stack([self.rule([*tokens, *x[:i]]) for i in range(len(x) + 1)])


class TableProposer:
    """Draws drafts one after another from a table of its own and returns the q it drew from.

    Args:
        rule: logits over the proposer's own ids.
        size: ids of the target.
        ids: the target's id of each of the proposer's ids; None: the same ids, those from `size` up being padding.
    """

    def __init__(self, rule: Rule, size: int, ids: Items[int] | None = None) -> None:
        self.size = size
        own = None if ids is None else torch.tensor(ids)
        self._law = cache(lambda prefix: in_vocabulary(rule(list(prefix)), size, own).softmax(-1))

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        longest = max(lengths)
        tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
        probs = torch.zeros(len(sequences), longest, self.size, dtype=torch.float64)
        for b, (sequence, k) in enumerate(zip(sequences, lengths, strict=True)):
            for i in range(k):
                probs[b, i] = self._law((*sequence.tokens, *tokens[b, :i].tolist()))
                tokens[b, i] = sequence.chance.propose(probs[b, i])
        return Draft(tokens, list(lengths), probs)


class FixedProposer:
    """Deterministic drafts: what a function of the committed tokens and the limit says."""

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        self.guess = guess

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return Draft.of([self.guess(s.tokens, k)[:k] for s, k in zip(sequences, lengths, strict=True)])
