"""Counts the n-grams of finished runs' outputs into a table for `proposer=table`. The shipped one was made with it:

    python -m specpipe decode proposer=none prompts=jsonl prompts.path=a.jsonl generation=sample \\
        generation.max_new_tokens=96 batch_size=16 hydra.run.dir=runs/sampled
    python -m specpipe decode proposer=none prompts=jsonl prompts.path=b.jsonl generation=greedy \\
        generation.max_new_tokens=96 batch_size=16 hydra.run.dir=runs/greedy
    python benchmarks/count_ngrams.py specpipe/proposers/smollm2_bigram.safetensors runs/sampled runs/greedy \\
        --singletons --source "..."

`a.jsonl` (256) and `b.jsonl` (105) held prompts of GPTeacher, Self-Instruct, tldr-pages and the training split of
GSM8K. Only what the target said is counted, no prompt. `--show` prints what a table says of itself: of how many tokens,
and from where.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe.proposers.counts import Origin, fit, load, save, vocabulary_hash
from specpipe.verifier.targets import hf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("runs", type=Path, nargs="*", help="folders with a result.json, all of one target")
    parser.add_argument("--order", type=int, default=2)
    parser.add_argument("--singletons", action="store_true", help="keep n-grams that occurred once")
    parser.add_argument("--source", default="", help="of the texts, and their licence")
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    if not asked.show:
        count(asked)
    counts, origin = load(asked.table)
    rows = ", ".join(f"{len(times)} {n}-grams" for n, times in enumerate(counts.times, 1))
    print(f"{asked.table.stat().st_size / 1000:.0f} kB: {rows} of {counts.tokens} tokens")
    print(origin)
    return 0


def count(asked: argparse.Namespace) -> None:
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in asked.runs]
    names = {result["target"]["model"] for result in results}
    if len(names) != 1:
        raise SystemExit(f"the runs are of {len(names)} targets: {', '.join(sorted(names))}")
    target = hf(model=results[0]["target"]["path"], device="cpu")
    texts = [request["token_ids"] for result in results for request in result["requests"]]
    counts = fit(texts, order=asked.order, size=target.vocabulary)
    kept = counts if asked.singletons else counts.without_singletons()
    save(kept, Origin(names.pop(), vocabulary_hash(target.tokenizer), asked.source), asked.table)


if __name__ == "__main__":
    raise SystemExit(main())
