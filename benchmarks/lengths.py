"""Does `draft_length=adaptive` find the length that pays? It and every fixed length on the same prompts, interleaved.

    python benchmarks/lengths.py --prompts FILE.jsonl --per-category 2 [--longest 8] [--tokens 128] [words ...]

`words` are of the command line, such as proposer=suffix. Each prompt is decoded by all policies in shuffled order. Two
figures by category: tokens/s relative to the best fixed length, as measured; and the same with each pass charged the
median time of all passes of its width in the whole run, which compares the policies' choices without the noise of the
machine (the best of many noisy figures is too good). Prompt passes are not counted.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe.commands.parts import build_pipeline
from specpipe.config import build, compose
from specpipe.draft_length import Adaptive
from specpipe.pipeline import Pipeline
from specpipe.prompts import jsonl
from specpipe.sequence import Sequence, Step


class Always:
    """A fixed length below the pipeline's longest."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        return [self.length] * len(sequences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    prompts = jsonl(path=asked.prompts, per_category=asked.per_category)
    pipelines = made(asked)
    next(iter(pipelines.values())).generate(prompts.texts[0])  # warm-up
    order = random.Random(asked.seed)
    steps: dict[str, dict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for number, text in enumerate(prompts.texts):
        category = (prompts.categories or [None] * len(prompts.texts))[number] or "all"
        for name in order.sample(list(pipelines), len(pipelines)):
            sequence = pipelines[name].sequences([text])[0]
            steps[category][name] += [step for step in pipelines[name].decode(sequence) if not step.prefill]
        print(f"{number + 1}/{len(prompts.texts)}", end="\r", file=sys.stderr, flush=True)
    report(steps)
    return 0


def made(asked: argparse.Namespace) -> dict[str, Pipeline]:
    """A pipeline for each policy, over one target; each has a proposer of its own."""
    words = [*asked.words, f"num_speculative_tokens={asked.longest}", f"generation.max_new_tokens={asked.tokens}"]
    config = compose("decode", words)
    first = build_pipeline(config)
    policies = {str(k): Always(k) for k in range(asked.longest + 1)} | {"adaptive": Adaptive()}
    return {
        name: Pipeline(
            verifier=first.verifier,
            proposer=build(config.proposer, "proposer"),
            sampler=first.sampler,
            settings=first.settings,
            num_speculative_tokens=asked.longest,
            draft_length=policy,
        )
        for name, policy in policies.items()
    }


def report(steps: dict[str, dict[str, list[Step]]]) -> None:
    seen: dict[int, list[float]] = defaultdict(list)
    for by_name in steps.values():
        for each in by_name.values():
            for step in each:
                seen[step.drafted].append(sum(step.seconds.values()))
    typical = {drafted: median(seconds) for drafted, seconds in seen.items()}
    print("median ms of a pass by drafted tokens:", {k: round(1000 * typical[k], 1) for k in sorted(typical)})
    print("                                 as measured          by median times")
    print("category          best worst    adaptive/best /worst    adaptive/best /worst")
    for category, by_name in [*steps.items(), ("all", pooled(steps))]:
        measured = {name: rate(each, lambda step: sum(step.seconds.values())) for name, each in by_name.items()}
        charged = {name: rate(each, lambda step: typical[step.drafted]) for name, each in by_name.items()}
        row = f"{category:<16}"
        for figures, width in ((measured, 14), (charged, 18)):
            fixed = {name: value for name, value in figures.items() if name != "adaptive"}
            best, worst = max(fixed, key=fixed.__getitem__), min(fixed, key=fixed.__getitem__)
            if figures is measured:
                row += f"{best:>5}{worst:>6}  "
            row += f"{figures['adaptive'] / fixed[best]:>{width}.3f}{figures['adaptive'] / fixed[worst]:>8.3f}   "
        print(row, flush=True)


def pooled(steps: dict[str, dict[str, list[Step]]]) -> dict[str, list[Step]]:
    together: dict[str, list[Step]] = defaultdict(list)
    for by_name in steps.values():
        for name, each in by_name.items():
            together[name] += each
    return together


def rate(steps: list[Step], cost: Callable[[Step], float]) -> float:
    """Tokens per second with a cost for each step."""
    return sum(len(step.tokens) for step in steps) / sum(cost(step) for step in steps)


if __name__ == "__main__":
    raise SystemExit(main())
