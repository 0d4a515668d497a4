"""Is speculation faster than plain decoding, and plain decoding not slower than `transformers` generate?

    python benchmarks/speed.py [--dtype bfloat16] [--repeats 3] [--limit 12] [--tokens 128] [--gamma 5]

The three decode the same prompts in one run, prompt by prompt in rotating order, so that a machine that drifts favours
none of them. Every figure is a ratio of total times over the prompts; the median over the repeats is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe import load
from specpipe.prompts import DEMO, jsonl
from specpipe.proposers.none import NoProposer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default=DEMO)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=5)
    asked = parser.parse_args()
    engines = make_engines(asked)
    prompts = jsonl(path=asked.prompts, limit=asked.limit).texts
    for run in engines.values():  # warm-up
        run(prompts[0])
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, int] = {}
    names = list(engines)
    for repeat in range(asked.repeats):
        total = dict.fromkeys(names, 0.0)
        tokens = dict.fromkeys(names, 0)
        for number, prompt in enumerate(prompts):
            shift = (number + repeat) % len(names)
            for name in names[shift:] + names[:shift]:
                start = time.perf_counter()
                tokens[name] += engines[name](prompt)
                total[name] += time.perf_counter() - start
        for name in names:
            seconds[name].append(total[name])
        print(f"repeat {repeat}: " + ", ".join(f"{n} {tokens[n] / total[n]:.1f} tokens/s" for n in names), flush=True)
    print(f"{asked.dtype}, {len(prompts)} prompts, {tokens} tokens")
    for a, b in (("none", "generate"), ("ngram", "none"), ("ngram", "generate")):
        ratios = [seconds[b][i] / tokens[b] / (seconds[a][i] / tokens[a]) for i in range(asked.repeats)]
        print(f"{a} against {b}: {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")


def make_engines(asked: argparse.Namespace) -> dict[str, Callable[[str], int]]:
    """Name -> decode one prompt, return the number of tokens."""
    same = (
        f"target.dtype={asked.dtype}",
        f"generation.max_new_tokens={asked.tokens}",
        f"num_speculative_tokens={asked.gamma}",
    )
    pipeline = load("proposer=ngram", *same)
    model = load("verifier.prepack=false", *same).verifier.target.model  # unchanged modules, weights of its own
    ngram, none = pipeline.proposer, NoProposer()

    def with_proposer(proposer: object) -> Callable[[str], int]:
        def run(prompt: str) -> int:
            pipeline.proposer = proposer  # type: ignore[assignment]
            return len(pipeline.generate(prompt)[0].token_ids)

        return run

    def generate(prompt: str) -> int:
        ids = torch.tensor([pipeline.text.encode(prompt)])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.tokens, do_sample=False)
        return out.shape[1] - ids.shape[1]

    return {"generate": generate, "none": with_proposer(none), "ngram": with_proposer(ngram)}


if __name__ == "__main__":
    main()
