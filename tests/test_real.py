"""The default target itself: what it says with drafts is what it says on its own. Few, and marked `real`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specpipe import cli, load
from specpipe.proposers.none import NoProposer
from specpipe.verifier.smollm2 import DIRECTORY, cache_root
from specpipe.verifier.targets import smollm2

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (cache_root() / DIRECTORY).is_dir() and os.environ.get("CI") != "true",
        reason="the default target is not in the cache; `make demo` fetches it",
    ),
]

PROMPT = "Repeat after me, twice: the quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def float32() -> Any:
    return load("proposer=ngram", "target.dtype=float32", "generation.max_new_tokens=40", "generation.ignore_eos=true")


def test_it_is_a_chat_model_that_answers(float32: Any) -> None:
    float32.settings.ignore_eos = False
    done = float32.generate("What is the capital of France?")[0]
    float32.settings.ignore_eos = True
    assert done.text == "The capital of France is Paris."
    assert done.finish_reason == "stop"


def test_float32_text_is_that_of_transformers_generate(float32: Any) -> None:
    """Same ids, no tolerance; the full measurement is benchmarks/identity.py."""
    ids = torch.tensor([float32.text.encode(PROMPT)])
    with torch.inference_mode():
        plain = smollm2(dtype="float32").model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=None
        )
    done = float32.generate(PROMPT)[0]
    assert done.token_ids == plain[0, ids.shape[1] :].tolist()
    assert done.spec_decode["num_accepted_draft_tokens"] > 0


def test_bf16_parts_from_plain_decoding_only_at_near_ties() -> None:
    """C36: at the first difference the two best logits are at most 4 bf16 steps apart."""
    pipeline = load("proposer=ngram", "verifier=packed", "generation.max_new_tokens=40", "generation.ignore_eos=true")
    drafted = pipeline.generate(PROMPT)[0].token_ids
    pipeline.proposer = NoProposer()
    plain = pipeline.generate(PROMPT)[0].token_ids
    gap, allowed = gap_at_first_difference(pipeline, PROMPT, plain, drafted)
    assert gap <= allowed


def test_compiled_bf16_text_is_plain_text() -> None:
    pipeline = load("proposer=ngram", "verifier=compiled", "generation.max_new_tokens=40", "generation.ignore_eos=true")
    drafted = pipeline.generate(PROMPT)[0].token_ids
    pipeline.proposer = NoProposer()
    assert pipeline.generate(PROMPT)[0].token_ids == drafted


def gap_at_first_difference(pipeline: Any, prompt: str, plain: list[int], other: list[int]) -> tuple[float, float]:
    """(gap of the plain run's two best logits where the texts part, 4 bf16 steps there); (0, 0) if they do not."""
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b), None)
    if at is None:
        return 0.0, 0.0
    ids = torch.tensor([[*pipeline.text.encode(prompt), *plain[:at]]])
    with torch.inference_mode():
        best, second = pipeline.verifier.target.model(input_ids=ids).logits[0, -1].float().topk(2).values.tolist()
    return best - second, 4 * 2.0 ** (torch.tensor(abs(best)).log2().floor().item() - 7)


def test_the_smoke_experiment_trains_heads_that_decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Text, training, validation and a real decode, as `python -m train experiment=smoke` does them."""
    words = ["experiment=smoke", "wandb=none", f"data.folder={tmp_path / 'text'}", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    assert cli.main("train") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    losses = [point["train/loss"] for point in result["curves"] if "train/loss" in point]
    assert losses[-1] < losses[0]
    assert result["summary"]["tau"] > 1
    pipeline = load("proposer=mlp", f"proposer.path={result['artifact']}", "generation.max_new_tokens=30")
    assert pipeline.generate(PROMPT)[0].spec_decode["num_draft_tokens"] > 0


@pytest.mark.parametrize("option", ["mlp", "distilled", "cascade"])
def test_what_ships_drafts_for_the_default_target(option: str, float32: Any) -> None:
    drafted = load(f"proposer={option}", "target.dtype=float32", "generation.max_new_tokens=40")
    drafted.settings.ignore_eos = True
    done = drafted.generate(PROMPT)[0]
    assert done.token_ids == float32.generate(PROMPT)[0].token_ids
    assert done.spec_decode["num_accepted_draft_tokens"] > 0
