"""Is greedy text the target's own? Compares with `transformers` generate on the same weights.

    python benchmarks/identity.py [--prompts FILE.jsonl] [--limit 20] [--tokens 128] [--dtype float32] [--gammas 1,3] \\
        [--pipeline "proposer=suffix"] [--pipeline "proposer=layer_skip proposer.layers=8"]

float32: every id must be equal. bf16: passes over several tokens round differently from passes over one, so the texts
may part at a near-tie; each parting is listed with the gap of the two best logits and the bound (4 bf16 steps).
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe import load
from specpipe.prompts import DEMO, jsonl


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default=DEMO)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--gammas", default="1,3,5,8")
    parser.add_argument("--pipeline", action="append", help="words of the command line; several are compared in turn")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --tokens, past the end of the answer")
    asked = parser.parse_args()
    texts = jsonl(path=asked.prompts, limit=asked.limit).texts
    common = (
        f"target.dtype={asked.dtype}",
        f"generation.max_new_tokens={asked.tokens}",
        f"generation.ignore_eos={asked.ignore_eos}",
    )
    pipelines = {words: load(*words.split(), *common) for words in asked.pipeline or ["proposer=ngram"]}
    plain_model = load("verifier=eager", f"target.dtype={asked.dtype}").verifier.target.model
    wrong = 0
    for number, text in enumerate(texts):
        prompt = next(iter(pipelines.values())).text.encode(text)
        plain = generate(plain_model, prompt, asked.tokens, asked.ignore_eos)
        for gamma, (words, pipeline) in product(map(int, asked.gammas.split(",")), pipelines.items()):
            pipeline.gamma = gamma
            done = pipeline.generate([prompt])[0]
            verdict, bad = compare(plain_model, prompt, plain, done.token_ids)
            wrong += bad
            accepted = done.spec_decode["num_accepted_draft_tokens"]
            what = f"prompt {number:2d}  {words}  k {gamma}"
            print(f"{what}  {len(plain):3d} tokens  {accepted:3d} accepted  {verdict}", flush=True)
    print(f"{len(texts)} prompts, {asked.dtype}: {wrong} differences that rounding does not explain")
    return int(wrong > 0)


def generate(model: torch.nn.Module, prompt: list[int], n: int, ignore_eos: bool) -> list[int]:
    ids = torch.tensor([prompt])
    more = {"eos_token_id": None} if ignore_eos else {}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, **more)
    return out[0, len(prompt) :].tolist()


def compare(model: torch.nn.Module, prompt: list[int], plain: list[int], ours: list[int]) -> tuple[str, bool]:
    """What to print, and whether it is a fault."""
    at = next((i for i, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b), None)
    if at is None:
        return ("identical", False) if len(plain) == len(ours) else ("one text is longer", True)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + plain[:at]])).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    step = 2.0 ** (torch.tensor(abs(best)).log2().floor().item() - 7)
    bound = 1e-3 if model.dtype == torch.float32 else 4 * step
    return f"parts at token {at}, gap {best - second:.4f}, bound {bound:.4f}", best - second > bound


if __name__ == "__main__":
    sys.exit(main())
