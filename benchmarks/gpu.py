"""What a GPU does: passes by width, what CUDA graphs would save of them, and the loop around them. Some minutes.

    python benchmarks/gpu.py [--shape 1b --shape 8b] [--context 512] [--repeats 20] [--no-tests]

Random weights of the shapes of Llama 3.2 1B and Llama 3.1 8B in bfloat16, made on the device, so nothing is downloaded.
For each width the median time of a pass kernel by kernel (`verifier=packed`) and recorded in a CUDA graph
(`verifier=compiled`), and of both over a pass of width 1: verification is cheap while that ratio is near 1. Then for
both a step of plain and of speculative greedy decoding, the width free or fixed, and how much of it is not in the
models. Last the tests marked `gpu`. Without a GPU `--shape tiny` runs the same on the CPU, without graphs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.none import NoProposer
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.compiled import CompiledVerifier
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target, tiny

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 128_256
WIDTHS = (1, 2, 4, 6, 9, 17)
WARM = 3  # passes that are not counted
STEPS = 100  # of the loop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--context", type=int, default=512, help="tokens that were read before")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-tests", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(torch.cuda.get_device_name() if device.type == "cuda" else "CPU", f"torch {torch.__version__}", flush=True)
    for name in asked.shape or (["1b", "8b"] if device.type == "cuda" else ["tiny"]):
        target = random_target(name, device)
        weights = sum(each.numel() * each.element_size() for each in target.model.parameters())
        print(f"\n{name}: {weights / 2**30:.1f} GiB of weights, {asked.context} tokens before", flush=True)
        verifiers = [EagerVerifier(target), CompiledVerifier(target)]
        passes(verifiers, asked.context, asked.repeats)
        for verifier in (*verifiers, CompiledVerifier(target, width="fixed")):
            loop(verifier, asked.context)
        del target, verifiers, verifier
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0 if asked.no_tests else subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], cwd=ROOT).returncode


def random_target(name: str, device: torch.device) -> Target:
    """A Llama of that shape with random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    letters = tiny(device="cpu").tokenizer
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, **SHAPES[name]
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model.eval().requires_grad_(False), letters, name, None)


def passes(verifiers: list[EagerVerifier], context: int, repeats: int) -> None:
    """Print a row for each width; the verifiers take turns."""
    device, vocabulary = verifiers[0].device, verifiers[0].target.vocabulary
    ids = [(7 * i + 3) % vocabulary for i in range(context)]
    texts = [Sequence(ids, GenerationSettings(max_new_tokens=1000), chance=Chance(0)) for _ in verifiers]
    for verifier, text in zip(verifiers, texts, strict=True):
        verifier.score([text], Draft.of([[]], device))
        text.commit([ids[0]], 0, [])
    print(f"{'width':<8}" + "".join(f"{verifier.engine:>12}{'to width 1':>12}" for verifier in verifiers))
    first: list[float] = []
    for width in WIDTHS:
        draft = Draft.of([[1] * (width - 1)], device)
        taken: list[list[float]] = [[] for _ in verifiers]
        for repeat in range(WARM + repeats):
            for verifier, text, seconds in zip(verifiers, texts, taken, strict=True):
                start = time.perf_counter()
                verifier.score([text], draft)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat >= WARM:
                    seconds.append(time.perf_counter() - start)
                verifier.roll_back([text])
        times = [median(seconds) for seconds in taken]
        first = first or times
        cells = [f"{1000 * each:>9.2f} ms{each / one:>11.2f}x" for each, one in zip(times, first, strict=True)]
        print(f"{width:<8}{''.join(cells)}", flush=True)


def loop(verifier: EagerVerifier, context: int) -> None:
    """Print the time of a step, and its share outside the models, of plain and of n-gram decoding."""
    for proposer in (NoProposer(), NgramProposer()):
        pipeline = Pipeline(
            verifier=verifier,
            proposer=proposer,
            sampler=Rejection(),
            settings=GenerationSettings(max_new_tokens=STEPS, ignore_eos=True),
            num_speculative_tokens=5,
        )
        for _ in range(2):  # once more than is looked at: recordings are made in the first
            sequence = pipeline.sequences([[(5 * i + 1) % 50 for i in range(context)]])[0]
            steps = [step.seconds for step in pipeline.decode(sequence) if not step.prefill]
        total = sum(sum(each.values()) for each in steps)
        outside = sum(seconds for each in steps for part, seconds in each.items() if part != "verify")
        name, ms = f"{verifier.engine}, {verifier.width} width, {type(proposer).__name__}", 1000 / len(steps)
        print(f"{name}: {ms * total:.2f} ms a step, {ms * outside:.2f} of it outside the target's pass", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
