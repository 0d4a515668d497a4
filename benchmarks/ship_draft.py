"""Puts what a training run made into the package, small: trained parts alone, the rest is the target's.

    python benchmarks/ship_draft.py outputs/train/RUN specpipe/proposers/smollm2_mlp

Heads stay in bfloat16; a distilled draft's matrices go to 8 bits with a scale for each row, since embedding and head
are most of a small model and the target has them. The card beside the weights says how they came about.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specpipe.proposers import artifact
from specpipe.proposers.distilled import KIND, save_trained_parts
from specpipe.proposers.heads import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("out", type=Path, help="folder in the package; replaced")
    asked = parser.parse_args()
    draft = asked.run / "draft"
    card, weights, ids = artifact.load(draft, [KIND, *KINDS])
    shutil.rmtree(asked.out, ignore_errors=True)
    if card.kind == KIND:
        model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16)
        save_trained_parts(asked.out, model, card, ids)
    else:
        artifact.save(asked.out, card, weights, ids)
    size = sum(file.stat().st_size for file in asked.out.iterdir())
    print(f"{asked.out}: {size / 1e6:.1f} MB, {card.kind} for {card.target}, {card.training['figures']['tau']:.3f} tau")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
