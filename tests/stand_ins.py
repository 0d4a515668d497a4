"""Models of a few lines: table models that read their own cache.

A table model computes logits from the ids it finds in the cache it was given, under the mask it was given, never from
anything beside it, so a lost, stale or doubled entry changes the result at once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specpipe.audit.tables import FixedProposer, Rule
from specpipe.pipeline import Pipeline
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target


def chain(size: int) -> Rule:
    return lambda ids: _peak(size, ids[-1] + 1)


def context(size: int) -> Rule:
    return lambda ids: _peak(size, 1 + sum(ids))


def window(size: int, width: int) -> Rule:
    return lambda ids: _peak(size, 1 + sum(ids[-width:]))


def constant(p: list[float]) -> Rule:
    logits = torch.tensor(p, dtype=torch.float64).log()
    return lambda ids: logits


def _peak(size: int, best: int) -> Tensor:
    logits = torch.zeros(size, dtype=torch.float64)
    logits[best % size] = 10.0
    return logits


class TableModel(nn.Module):
    """A causal LM of `transformers`' shape with one attention layer whose keys are the ids themselves."""

    def __init__(self, rule: Rule, size: int, context: int | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config: Any = SimpleNamespace(
            num_hidden_layers=1, vocab_size=size, max_position_embeddings=context, eos_token_id=None
        )
        self.config.get_text_config = lambda: self.config
        self.rule, self.size, self.dtype = rule, size, dtype
        self.calls: list[SimpleNamespace] = []

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
    ) -> Any:
        rows, width = input_ids.shape
        seen = input_ids
        if cache is not None:
            entries = torch.stack([input_ids, position_ids], -1).double()[:, None]  # [R, 1, W, 2]
            seen, _ = cache.update(entries, entries, 0)
            assert (seen[..., 0] == seen[..., 0].round()).all()
        if attention_mask is None:
            attention_mask = torch.ones(width, width, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
        self.calls.append(
            SimpleNamespace(ids=input_ids.tolist(), positions=None if cache is None else position_ids.tolist())
        )
        keep = range(width)[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep.tolist()
        logits = torch.zeros(rows, len(keep), self.size, dtype=self.dtype)
        for b in range(rows):
            for i, column in enumerate(keep):
                if cache is not None and column and position_ids[b, column] == position_ids[b, column - 1]:
                    continue  # padding behind a shorter row
                logits[b, i] = self.rule(self._visible(seen, attention_mask[b, 0, column], b, cache is not None))
        return SimpleNamespace(logits=logits)

    def _visible(self, seen: Tensor, mask: Tensor, b: int, cached: bool) -> list[int]:
        if not cached:
            return seen[b, : int(mask.sum())].tolist()
        entries = seen[b, 0, mask].long()  # [n, 2] of id, position
        assert entries[:, 1].tolist() == list(range(len(entries))), "a position is missing, doubled or out of place"
        return entries[:, 0].tolist()


class ToyTokenizer:
    """Ids as letters; no chat template."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def right_but_at(rule: Rule, place: int, size: int) -> FixedProposer:
    """Guesses greedily what the rule says, and one id too high at `place` of the block (-1: nowhere)."""

    def guess(tokens: list[int], k: int) -> list[int]:
        block: list[int] = []
        for i in range(k):
            best = int(rule([*tokens, *block]).argmax())
            block.append((best + (i == place)) % size)
        return block

    return FixedProposer(guess)


def pipeline_of(
    rule: Rule,
    size: int,
    proposer: Any,
    *,
    gamma: int = 4,
    sampler: Any = None,
    seed: int = 0,
    context: int | None = None,
    eos: int | list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Pipeline:
    model = TableModel(rule, size, context, dtype)
    model.config.eos_token_id = eos
    verifier = EagerVerifier(Target(model, ToyTokenizer(), "table", None))
    model.calls.clear()
    return Pipeline(
        verifier=verifier,
        proposer=proposer,
        sampler=sampler or Rejection(),
        settings=GenerationSettings(**settings),
        num_speculative_tokens=gamma,
        seed=seed,
    )


def greedy(rule: Rule, prompt: list[int], n: int) -> list[int]:
    """Plain greedy decoding by the rule itself."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(rule(ids).argmax()))
    return ids[len(prompt) :]
