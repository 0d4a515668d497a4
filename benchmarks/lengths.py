"""Does `draft_length=adaptive` find the length that pays? It and every fixed length on the same prompts, interleaved.

    python benchmarks/lengths.py --prompts FILE.jsonl --per-category 2 [--repeats 3] [--longest 8] [--tokens 128]
        [words ...]

`words` are of the command line, such as proposer=suffix. A prompt is decoded by all policies at once, step by step, the
one that is furthest behind next, so that they share what the machine is like at the time; each repeat is a run of its
own, which knows nothing of those before. By category three figures of tokens/s relative to a fixed length: with each
pass charged the time of its own draft, in which its length is chosen too, and for the rest the median of all passes of
its width in all repeats, which compares the choices without the noise of the machine; as measured, by the median time
of a prompt's repeats, relative to the length that is best by those charges; and relative to the one that came out best,
which of many noisy figures is too good. Prompt passes are not counted.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe.commands.parts import build_pipeline
from specpipe.config import build, compose
from specpipe.draft_length import Adaptive
from specpipe.pipeline import Pipeline
from specpipe.prompts import jsonl
from specpipe.sequence import Sequence, Step
from specpipe.verifier.reader import Reader


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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    prompts = jsonl(path=asked.prompts, per_category=asked.per_category)
    base = build_pipeline(compose("decode", words(asked)))
    base.generate(prompts.texts[0])  # warm-up
    order = random.Random(asked.seed)
    decoded: dict[str, dict[str, list[Repeats]]] = defaultdict(lambda: defaultdict(list))
    for repeat in range(asked.repeats):
        pipelines = made(base, asked)
        place: Counter[str] = Counter()
        for number, text in enumerate(prompts.texts):
            category = (prompts.categories or [None] * len(prompts.texts))[number] or "all"
            for name, steps in side_by_side(pipelines, text, order).items():
                if repeat == 0:
                    decoded[category][name].append([])
                decoded[category][name][place[category]].append(steps)
            place[category] += 1
            print(f"repeat {repeat + 1}: {number + 1}/{len(prompts.texts)}", end="\r", file=sys.stderr, flush=True)
    report(decoded)
    return 0


def side_by_side(pipelines: dict[str, Pipeline], text: str, order: random.Random) -> dict[str, list[Step]]:
    """Steps of each behind the prompt; all come to their ends at about the same time."""
    sequences = {name: pipeline.sequences([text])[0] for name, pipeline in pipelines.items()}
    while going := [name for name, sequence in sequences.items() if sequence.finish_reason is None]:
        name = min(going, key=lambda name: (len(sequences[name].new_tokens), order.random()))
        pipelines[name].step([sequences[name]])
    return {name: [step for step in sequence.steps if not step.prefill] for name, sequence in sequences.items()}


def words(asked: argparse.Namespace) -> list[str]:
    return [*asked.words, f"num_speculative_tokens={asked.longest}", f"generation.max_new_tokens={asked.tokens}"]


def made(base: Pipeline, asked: argparse.Namespace) -> dict[str, Pipeline]:
    """A pipeline for each policy, over one target; each has a proposer and a cache of its own."""
    config = compose("decode", words(asked))

    def verifier() -> Any:
        own = copy.copy(base.verifier)
        own.reader = Reader(base.verifier.reader.model)
        return own

    policies = {str(k): Always(k) for k in range(asked.longest + 1)} | {"adaptive": Adaptive()}
    return {
        name: Pipeline(
            verifier=verifier(),
            proposer=build(config.proposer, "proposer"),
            sampler=base.sampler,
            settings=base.settings,
            num_speculative_tokens=asked.longest,
            draft_length=policy,
        )
        for name, policy in policies.items()
    }


Repeats = list[list[Step]]  # one prompt's steps, by repeat


def report(decoded: dict[str, dict[str, list[Repeats]]]) -> None:
    seen: dict[int, list[float]] = defaultdict(list)
    for step in (
        step for by_name in decoded.values() for each in by_name.values() for r in each for s in r for step in s
    ):
        seen[step.drafted].append(seconds_of(step) - step.seconds["draft"])
    typical = {drafted: median(seconds) for drafted, seconds in seen.items()}

    def charge(step: Step) -> float:
        return step.seconds["draft"] + typical[step.drafted]

    print("median ms of a pass by drafted tokens:", {k: round(1000 * typical[k], 2) for k in sorted(typical)})
    drafting = {name: milliseconds_of_drafts(each) for name, each in pooled(decoded).items()}
    own, fixed_lengths = drafting.pop("adaptive"), sorted(drafting.values())
    print(f"mean ms of a draft: adaptive {own:.2f}, fixed lengths {fixed_lengths[0]:.2f} to {fixed_lengths[-1]:.2f}")
    print("                     tokens/s of adaptive relative to the fixed length that is")
    print("                         best by charges, charged   measured      best as measured")
    for category, by_name in [*decoded.items(), ("all", pooled(decoded))]:
        charged = {name: rate(each, charge) for name, each in by_name.items()}
        measured = {name: rate(each, seconds_of) for name, each in by_name.items()}
        fixed = [name for name in by_name if name != "adaptive"]
        best, worst = max(fixed, key=charged.__getitem__), min(fixed, key=charged.__getitem__)
        luckiest = max(fixed, key=measured.__getitem__)
        row = f"{category:<16}{best:>10}{charged['adaptive'] / charged[best]:>22.3f}"
        row += f"{measured['adaptive'] / measured[best]:>11.3f}"
        row += f"{luckiest:>10}{measured['adaptive'] / measured[luckiest]:>7.3f}"
        print(f"{row}   worst {worst}: {charged['adaptive'] / charged[worst]:.2f}", flush=True)


def pooled(decoded: dict[str, dict[str, list[Repeats]]]) -> dict[str, list[Repeats]]:
    together: dict[str, list[Repeats]] = defaultdict(list)
    for by_name in decoded.values():
        for name, each in by_name.items():
            together[name] += each
    return together


def milliseconds_of_drafts(prompts: list[Repeats]) -> float:
    """Mean time of a draft, in which its length is chosen too."""
    steps = [step for repeats in prompts for steps in repeats for step in steps]
    return 1000 * sum(step.seconds["draft"] for step in steps) / len(steps)


def seconds_of(step: Step) -> float:
    return sum(step.seconds.values())


def rate(prompts: list[Repeats], cost: Callable[[Step], float]) -> float:
    """Tokens per second with a cost for each step; of a prompt's repeats the median counts."""
    tokens = sum(median(sum(len(step.tokens) for step in steps) for steps in repeats) for repeats in prompts)
    return tokens / sum(median(sum(map(cost, steps)) for steps in repeats) for repeats in prompts)


if __name__ == "__main__":
    raise SystemExit(main())
