"""Models of a few lines: table models that read their own cache, and the exact law of a pipeline's output.

A table model computes logits from the ids it finds in the cache it was given, under the mask it was given, never from
anything beside it, so a lost, stale or doubled entry changes the result at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specpipe.chance import Chance
from specpipe.distribution import Prefix, probabilities
from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target

Rule = Callable[[list[int]], Tensor]  # ids of a prefix -> logits [V]


def chain(size: int) -> Rule:
    return lambda ids: _peak(size, ids[-1] + 1)


def context(size: int) -> Rule:
    return lambda ids: _peak(size, 1 + sum(ids))


def window(size: int, width: int) -> Rule:
    return lambda ids: _peak(size, 1 + sum(ids[-width:]))


def constant(p: list[float]) -> Rule:
    logits = torch.tensor(p, dtype=torch.float64).log()
    return lambda ids: logits


def table(size: int, seed: int, zeros: float = 0.3) -> Rule:
    """A law of its own for every prefix; in some, tokens have no mass."""

    @cache
    def row(ids: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *ids)) % 2**63)
        weights = torch.rand(size, generator=generator, dtype=torch.float64) ** 2 + 0.01
        dropped = torch.rand(size, generator=generator) < zeros
        dropped[int(torch.randint(size, (1,), generator=generator))] = False
        return weights.masked_fill(dropped, 0.0).log()

    return lambda ids: row(tuple(ids))


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


class Scripted:
    """Proposes what a function of the committed tokens and the limit says."""

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        self.guess = guess

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return Draft.of([self.guess(s.tokens, k)[:k] for s, k in zip(sequences, lengths, strict=True)])


class Drawn:
    """Draws drafts from a table of its own, one token after another, and returns the q it drew from."""

    def __init__(self, rule: Rule, size: int) -> None:
        self.rule, self.size = rule, size

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        longest = max(lengths)
        tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
        probs = torch.zeros(len(sequences), longest, self.size, dtype=torch.float64)
        for b, (sequence, k) in enumerate(zip(sequences, lengths, strict=True)):
            for i in range(k):
                probs[b, i] = self.rule([*sequence.tokens, *tokens[b, :i].tolist()]).softmax(-1)
                tokens[b, i] = sequence.chance.propose(probs[b, i])
        return Draft(tokens, list(lengths), probs)


def right_but_at(rule: Rule, place: int, size: int) -> Scripted:
    """Guesses greedily what the rule says, and one id too high at `place` of the block (-1: nowhere)."""

    def guess(tokens: list[int], k: int) -> list[int]:
        block: list[int] = []
        for i in range(k):
            best = int(rule([*tokens, *block]).argmax())
            block.append((best + (i == place)) % size)
        return block

    return Scripted(guess)


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


# ---- the exact law of a pipeline's output ----


class Explorer(Chance):
    """Takes the decisions it is told to, and notes the options of the first one it was not told."""

    def __init__(self, path: list[int]) -> None:
        self._path = path
        self._taken = 0
        self.mass = 1.0
        self.options: list[int] | None = None

    def propose(self, q: Tensor) -> int:
        return self._decide(q)

    def draw(self, law: Tensor) -> int:
        return self._decide(law)

    def passes(self, p: float, q: float) -> bool:
        accept = min(1.0, p / q)
        return bool(self._decide(torch.tensor([1 - accept, accept], dtype=torch.float64)))

    def _decide(self, law: Tensor) -> int:
        weights = (law.double() / law.double().sum()).tolist()
        if self._taken == len(self._path):
            self.options = [i for i, weight in enumerate(weights) if weight > 0]
            raise Undecided
        choice = self._path[self._taken]
        self._taken += 1
        self.mass *= weights[choice]
        return choice


class Undecided(Exception):
    pass


def step_law(
    pipeline: Pipeline, prompt: list[int], emitted: tuple[int, ...] = (), n: int = 99
) -> dict[tuple[int, ...], float]:
    """What one step appends behind `prompt` and `emitted`, with its probability, at most up to n tokens in all."""
    law: dict[tuple[int, ...], float] = {}
    paths: list[list[int]] = [[]]
    settings = copy.copy(pipeline.settings)
    settings.max_new_tokens = len(emitted) + pipeline.gamma + 1
    while paths:
        path = paths.pop()
        chance = Explorer(path)
        sequence = Sequence(prompt, settings, stop_ids=settings.stop_token_ids, chance=chance)
        sequence.tokens += emitted
        try:
            step = pipeline.step([sequence])[0]
        except Undecided:
            paths += [[*path, option] for option in chance.options or []]
            continue
        block = tuple(step.tokens[: n - len(emitted)])
        law[block] = law.get(block, 0.0) + chance.mass
    return law


def output_law(pipeline: Pipeline, prompt: list[int], n: int) -> dict[tuple[int, ...], float]:
    """The joint law of the first n tokens out of the pipeline: every decision of every step, explored."""
    unfinished: dict[tuple[int, ...], float] = {(): 1.0}
    finished: dict[tuple[int, ...], float] = {}
    stops = set(pipeline.settings.stop_token_ids)
    while unfinished:
        emitted, mass = unfinished.popitem()
        for block, share in step_law(pipeline, prompt, emitted, n).items():
            after = emitted + block
            goal = finished if len(after) == n or stops & set(block) else unfinished
            goal[after] = goal.get(after, 0.0) + mass * share
    return finished


def target_law(rule: Rule, prompt: list[int], n: int, settings: GenerationSettings) -> dict[tuple[int, ...], float]:
    """The joint law of n tokens drawn one by one from the target, fewer where a stop id ends them."""
    stops = frozenset(settings.stop_token_ids)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        longer: dict[tuple[int, ...], float] = {}
        for ids, mass in law.items():
            if stops & set(ids):
                longer[ids] = mass
                continue
            p = probabilities(rule([*prompt, *ids]), settings, Prefix(prompt, ids, stops))
            longer |= {(*ids, x): mass * weight for x, weight in enumerate(p.tolist()) if weight > 0}
        law = longer
    return law


def largest_difference(a: dict[Any, float], b: dict[Any, float]) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


def total_variation(a: dict[Any, float], b: dict[Any, float]) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2
