"""Up to which batch size does speculation pay? Speculative against plain decoding of the same engine, interleaved.

    python benchmarks/batches.py [--sizes 1,2,4,8] [--repeats 3] [--tokens 128] [--out DIR] [words ...]

`words` are of the command line, such as proposer=suffix. For each size: tokens/s of both behind the prompt passes,
alpha, and the speedup, the ratio of the two (median, lowest and highest of the repeats). DIR/result.json holds the
figures of each repeat.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe.commands.parts import build_pipeline
from specpipe.config import build, compose
from specpipe.pipeline import Pipeline
from specpipe.prompts import demo
from specpipe.results import provenance
from specpipe.stats import summarise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    config = compose("decode", [*asked.words, f"generation.max_new_tokens={asked.tokens}"])
    first, texts = build_pipeline(config), demo().texts
    first.generate(texts[0])  # warm-up
    cells = []
    print("size   plain tok/s   speculative   alpha   speedup (lowest to highest)")
    for size in map(int, asked.sizes.split(",")):
        pairs = [both(config, first, texts, size, repeat) for repeat in range(asked.repeats)]
        speedups = [ours["tokens_per_s"] / plain["tokens_per_s"] for plain, ours in pairs]
        speedup = {"mean": median(speedups), "low": min(speedups), "high": max(speedups)}
        cells.append({"batch_size": size, "speedup": speedup, "repeats": [{"plain": p, "ours": o} for p, o in pairs]})
        plain, ours = (median(pair[i]["tokens_per_s"] for pair in pairs) for i in (0, 1))
        interval = "{mean:.2f} ({low:.2f} to {high:.2f})".format(**speedup)
        print(f"{size:4}   {plain:11.1f}   {ours:11.1f}   {pairs[0][1]['alpha']['mean']:5.3f}   {interval}", flush=True)
        if asked.out:
            asked.out.mkdir(parents=True, exist_ok=True)
            content = {"words": asked.words, "cells": cells, "provenance": provenance()}
            (asked.out / "result.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    return 0


def both(config: Any, first: Pipeline, texts: list[str], size: int, repeat: int) -> tuple[dict[str, Any], ...]:
    """The summaries of plain and of speculative decoding, in either order."""
    gammas = {"plain": 0, "ours": config.num_speculative_tokens}
    done = {}
    for name in random.Random(f"{size}/{repeat}").sample(list(gammas), 2):
        pipeline = Pipeline(
            verifier=first.verifier,
            proposer=build(config.proposer, "proposer"),
            sampler=first.sampler,
            settings=first.settings,
            num_speculative_tokens=gammas[name],
            draft_length=build(config.draft_length, "draft_length"),
        )
        sequences = pipeline.sequences(texts)
        for _ in pipeline.decode_together(sequences, size):
            pass
        done[name] = summarise([sequence.steps for sequence in sequences], gammas[name])
    return done["plain"], done["ours"]


if __name__ == "__main__":
    raise SystemExit(main())
