"""What a step costs beside the models: decoding loop, acceptance rules and lookups, with a target that takes no time.

    python benchmarks/loop.py [--vocabulary 49152] [--tokens 300]

The target's logits lie ready and peak as those of a language model do, so all that is measured is Python and the laws.
Rows are medians of milliseconds a step, beside the first of their table; read the ratios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import Rows, probabilities
from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.none import NoProposer
from specpipe.proposers.suffix import SuffixProposer
from specpipe.samplers.block import Block
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.targets import tiny

GAMMA = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "nucleus .9": {"temperature": 1.0, "top_p": 0.9},
    "nucleus .9, flat": {"temperature": 2.0, "top_p": 0.9},
    "nucleus .9, penalty": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
}
LENGTHS = (1_000, 4_000, 16_000)  # tokens before a lookup


class Ready:
    """A verifier whose logits were made before: row t of the text is row t of a table."""

    device = torch.device("cpu")

    def __init__(self, vocabulary: int, rows: int = 64) -> None:
        letters = tiny(device="cpu").tokenizer
        self.target = SimpleNamespace(vocabulary=vocabulary, tokenizer=letters, eos_ids=(), context=None)
        torch.manual_seed(0)
        self.logits = torch.randn(rows, vocabulary) * 2
        self.logits[:, :16] += 14 + 2 * torch.randn(rows, 16)  # a few have most of the mass

    def score(self, sequences: list[Sequence], draft: Draft) -> list[Tensor]:
        return [self._rows(len(each.tokens), k + 1) for each, k in zip(sequences, draft.lengths, strict=True)]

    def roll_back(self, sequences: list[Sequence]) -> None:
        """Nothing is kept."""

    def _rows(self, at: int, n: int) -> Tensor:
        return self.logits[[(at + i) % len(self.logits) for i in range(n)]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--tokens", type=int, default=300)
    asked = parser.parse_args()
    verifier = Ready(asked.vocabulary)
    show("a step of the loop", steps(verifier, asked.tokens))
    show(f"acceptance of {GAMMA} drafts", rules(verifier))
    show("a draft of ngram, by tokens before", lookups(NgramProposer, asked.vocabulary))
    show("a draft of suffix, by tokens before", lookups(SuffixProposer, asked.vocabulary))
    return 0


def show(title: str, rows: Items[tuple[str, float]]) -> None:
    first = rows[0][1]
    print(
        f"{title}\n" + "".join(f"  {name:<40}{1000 * s:>9.3f} ms{s / first:>9.2f}x\n" for name, s in rows), flush=True
    )


def steps(verifier: Ready, tokens: int) -> list[tuple[str, float]]:
    """Everything but drafting and verifying, by settings and proposer."""
    rows = []
    for name, settings in SETTINGS.items():
        for proposer in (NoProposer(), NgramProposer()):
            pipeline = Pipeline(
                verifier=verifier,
                proposer=proposer,
                sampler=Rejection(),
                settings=GenerationSettings(max_new_tokens=tokens, ignore_eos=True, **settings),
                num_speculative_tokens=GAMMA,
            )
            [sequence] = pipeline.sequences([[i % 16 for i in range(64)]])
            parts = [step.seconds for step in pipeline.decode(sequence)]
            took = median(sum(each.values()) - each.get("verify", 0.0) for each in parts)
            rows.append((f"{name}, {type(proposer).__name__}", took))
    return rows


def rules(verifier: Ready) -> list[tuple[str, float]]:
    """One call of each rule at temperature 1, drafts drawn from a law close to the target's."""
    settings = GenerationSettings(temperature=1.0, max_new_tokens=1)
    logits = verifier.logits[: GAMMA + 1]
    q = probabilities(logits[:GAMMA] + torch.randn(GAMMA, 1), settings)
    chance = Chance(0)
    x = [chance.propose(row) for row in q]
    return [
        (type(rule).__name__, timed(lambda rule=rule: rule.accept(x, Rows(logits, settings), q, chance)))
        for rule in (Rejection(), Block(), ExactMatch())
    ]


def lookups(kind: type, vocabulary: int) -> list[tuple[str, float]]:
    """A proposal and what it takes to follow the text by one token."""
    rows = []
    for length in LENGTHS:
        proposer = kind()
        if hasattr(proposer, "bind"):
            proposer.bind(SimpleNamespace(vocabulary=vocabulary))
        settings = GenerationSettings(max_new_tokens=10**6)
        text = Sequence([(i * i + i // 7) % 997 for i in range(length)], settings, chance=Chance(0))
        proposer.propose([text], [GAMMA])

        def follow(text: Sequence = text, proposer: Any = proposer) -> None:
            text.commit([text.tokens[-40]], 0, [])
            proposer.propose([text], [GAMMA])

        rows.append((f"{length:,}", timed(follow)))
    return rows


def timed(work: Callable[[], Any], repeats: int = 200) -> float:
    """Seconds, the median."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


if __name__ == "__main__":
    raise SystemExit(main())
