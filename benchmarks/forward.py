"""How long a pass of the target takes by its width, for several engines in one run.

    python benchmarks/forward.py [--engine "verifier=packed verifier.fuse=false"] [--engine ...] [words ...]

`words` are of the command line, such as target.dtype=float32, and hold for all; each `--engine` adds words of its own.
The first is the one that the others are compared with; without any, the plain modules, packed ones, packed and fused
ones, and compiled ones. They take turns, pass by pass, over one text; medians. Read ratios: milliseconds are this
machine's, today.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from specpipe.chance import Chance
from specpipe.config import build, compose
from specpipe.draft import Draft
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings

ENGINES = ("verifier=eager", "verifier=packed verifier.fuse=false", "verifier=packed", "verifier=compiled")
WIDTHS = (1, 2, 4, 6, 8, 9)
WARM = 3  # passes of each engine and width that are not counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", help="its words")
    parser.add_argument("--context", type=int, default=200, help="tokens that were read before")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    names = asked.engine or list(ENGINES)
    engines = {name: engine([*asked.words, *name.split()]) for name in names}
    texts = {name: begun(each, asked.context) for name, each in engines.items()}
    print(f"{'width':<8}" + "".join(f"{name or 'as configured':>46}" for name in names))
    for width in WIDTHS:
        draft = Draft.of([[1] * (width - 1)], engines[names[0]].device)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(WARM + asked.repeats):
            for name in names:
                took = passed(engines[name], texts[name], draft)
                if repeat >= WARM:
                    seconds[name].append(took)
        first = median(seconds[names[0]])
        cells = [f"{1000 * median(seconds[name]):.1f} ms  {first / median(seconds[name]):.2f}x" for name in names]
        print(f"{width:<8}" + "".join(f"{cell:>46}" for cell in cells), flush=True)
    return 0


def engine(words: list[str]) -> Any:
    """A verifier with a target of its own: packing changes a model in place."""
    config = compose("decode", words)
    return build(config.verifier, "verifier", target=build(config.target, "target"))


def begun(verifier: Any, context: int) -> Sequence:
    """A text of so many tokens that the verifier has read."""
    ids = [(7 * i + 3) % verifier.target.vocabulary for i in range(context)]
    sequence = Sequence(ids, GenerationSettings(max_new_tokens=10), chance=Chance(0))
    verifier.score([sequence], Draft.of([[]], verifier.device))
    sequence.commit([ids[0]], 0, [])
    return sequence


def passed(verifier: Any, sequence: Sequence, draft: Draft) -> float:
    """Seconds of one pass over the last token and a draft, which is then forgotten."""
    start = time.perf_counter()
    verifier.score([sequence], draft)
    if verifier.device.type == "cuda":
        torch.cuda.synchronize(verifier.device)
    took = time.perf_counter() - start
    verifier.roll_back([sequence])
    return took


if __name__ == "__main__":
    raise SystemExit(main())
