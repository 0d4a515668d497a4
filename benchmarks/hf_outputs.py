"""Samples with `transformers` generate, written as `audit file=` reads them.

    python benchmarks/hf_outputs.py outputs.jsonl [--samples 64] [--tokens 128] [--temperature 1.0] [--top-k 0]
    python -m specpipe audit file=outputs.jsonl generation=sample target.dtype=float32

With --top-k 50, which is what generate(do_sample=True) does unless told otherwise, or another --temperature, the file
does not follow the plain law and the verdict must be `biased`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe import load
from specpipe.audit.outputs import write_outputs
from specpipe.audit.reading import Answer
from specpipe.prompts import DEMO, jsonl


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", default=DEMO)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    pipeline = load("verifier=eager", "target.dtype=float32")
    texts = jsonl(path=asked.prompts).texts
    prompts = [pipeline.text.encode(texts[i % len(texts)]) for i in range(asked.samples)]
    torch.manual_seed(asked.seed)
    outputs = generate(pipeline.verifier.target, prompts, asked)
    answers = [Answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    asked.file.write_text(write_outputs(answers), encoding="utf-8")
    print(f"{sum(map(len, outputs))} tokens of {len(outputs)} samples in {asked.file}")
    return 0


def generate(target, prompts: list[list[int]], asked: argparse.Namespace) -> list[list[int]]:
    """All prompts in one batch, padded on the left; each output ends with its end-of-text id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = target.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=1.0,
            max_new_tokens=asked.tokens,
            pad_token_id=target.eos_ids[0],
        )
    return [until_end(row, target.eos_ids) for row in out[:, width:].tolist()]


def until_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    end = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: end + 1]


if __name__ == "__main__":
    sys.exit(main())
