"""What is handed to vLLM does there what it does here: `make test-vllm`, some minutes, not part of `make test`.

vLLM runs in an environment of its own (`.venv-vllm`), on a CPU, in float32, with the default target. Texts must be
equal, token for token. So must steps and drafts, as far as the two count alike: vLLM drafts in full where a text comes
to its limit, and counts what is accepted behind its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specpipe import load
from specpipe.sequence import Sequence
from specpipe.verifier.smollm2 import ensure_smollm2

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PROMPTS = [
    "What is the capital of France?",
    "Repeat after me, twice: the quick brown fox jumps over the lazy dog.",
    "Write the numbers from one to twenty as words, one on each line.",
    "yes yes yes yes yes yes yes yes",
]
TOKENS, GAMMA = 64, 3
PLAIN = "proposer.copy_bias=[]"  # which no artefact holds
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": str(ROOT),  # its workers import specpipe's classes from here
}
pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


class NotAtFirst:
    """Draft lengths as vLLM has them: the pass that reads the prompt carries no draft."""

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        return [longest if sequence.steps else 0 for sequence in sequences]


@dataclass
class Ours:
    """What the pipeline says: for each prompt the ids and what it counts."""

    ids: list[list[int]]
    texts: list[list[int]]
    counts: list[dict[str, Any]]


def ours(*words: str) -> Ours:
    """The pipeline's answers, with steps as vLLM makes them."""
    fixed = ("target.dtype=float32", f"generation.max_new_tokens={TOKENS}", f"num_speculative_tokens={GAMMA}")
    pipeline = load(*words, *fixed)
    pipeline.draft_length = NotAtFirst()
    done = pipeline.generate(PROMPTS)
    return Ours(
        [pipeline.text.encode(prompt) for prompt in PROMPTS],
        [each.token_ids for each in done],
        [each.spec_decode for each in done],
    )


def theirs(folder: Path, prompts: list[list[int]], speculation: dict[str, Any] | None) -> list[dict[str, Any]]:
    """vLLM's answers to the same prompts."""
    job = {
        "model": str(ensure_smollm2()),
        "prompts": prompts,
        "max_tokens": TOKENS,
        "speculative_config": speculation,
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [str(PYTHON), str(ROOT / "tests" / "vllm" / "serve.py"), "job.json", "answer.json"]
    run = subprocess.run(command, cwd=folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    print(f"vLLM {answer['version']}, {speculation}")
    answers: list[dict[str, Any]] = answer["answers"]
    return answers


# What is counted, and by how much more vLLM may count for a request: see above. A model of ours ends a draft behind an
# end-of-text id, vLLM's goes on, so that only steps and accepted tokens can be compared.
OF_MODELS = {"num_spec_steps": 1, "num_accepted_draft_tokens": GAMMA}
OF_TEXTS = {**OF_MODELS, "num_draft_tokens": GAMMA * (GAMMA + 1) // 2}


def compare(own: Ours, answers: list[dict[str, Any]], counted: dict[str, int]) -> None:
    """Texts and counts, prompt by prompt."""
    assert [answer["token_ids"] for answer in answers] == own.texts
    for counts, answer in zip(own.counts, answers, strict=True):
        found = answer["metrics"]
        print({key: (counts[key], found[key]) for key in OF_TEXTS})
        assert found["num_spec_tokens"] == GAMMA
        for key, most in counted.items():
            assert 0 <= found[key] - counts[key] <= most, key
    assert sum(answer["metrics"]["num_accepted_draft_tokens"] for answer in answers) > 0


def command(*words: str) -> None:
    """specpipe's or train's command line."""
    run = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


def test_plain_texts_are_equal(tmp_path: Path) -> None:
    """Without this the rest would say nothing."""
    own = ours("proposer=none")
    assert [answer["token_ids"] for answer in theirs(tmp_path, own.ids, None)] == own.texts


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Ngram", ("proposer=ngram",)),
        ("Suffix", ("proposer=suffix", "proposer.max_cached_tokens=0")),
        (
            "SuffixThenNgram",
            (
                "proposer=cascade",
                "proposer.members=[{_target_:specpipe.proposers.suffix.SuffixProposer,max_cached_tokens:0},ngram]",
            ),
        ),
    ],
)
def test_a_custom_class_drafts_as_the_proposer_does(kind: str, words: tuple[str, ...], tmp_path: Path) -> None:
    own = ours(*words)
    speculation = {
        "method": "custom_class",
        "model": f"specpipe.integrations.vllm.{kind}",
        "num_speculative_tokens": GAMMA,
    }
    compare(own, theirs(tmp_path, own.ids, speculation), OF_TEXTS)


def test_the_exported_draft_is_the_draft(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    run = f"hydra.run.dir={tmp_path / 'export'}"
    command("specpipe", "export", "proposer=distilled", PLAIN, "format=vllm", f"out={folder}", run)
    own = ours("proposer=distilled", PLAIN, "proposer.dtype=float32")
    compare(own, theirs(tmp_path, own.ids, _exported(folder)), OF_MODELS)


def test_exported_medusa_heads_are_the_heads(tmp_path: Path) -> None:
    """Heads of a minute's training: what they guess matters less than that both guess the same.

    Without the chat template one of the texts repeats itself, so that there is something to accept.
    """
    trained, folder = tmp_path / "trained", tmp_path / "heads"
    places = (f"data.folder={tmp_path / 'text'}", f"hydra.run.dir={trained}")
    command("train", "experiment=smoke", "student.form=medusa", "student.vocabulary=null", "wandb=none", *places)
    heads = f"proposer.path={trained / 'draft'}"
    run = f"hydra.run.dir={tmp_path / 'export'}"
    command("specpipe", "export", "proposer=mlp", heads, PLAIN, "format=medusa", f"out={folder}", run)
    own = ours("proposer=mlp", heads, PLAIN, "prompts.chat=false")
    compare(own, theirs(tmp_path, own.ids, _exported(folder)), OF_MODELS)


def _exported(folder: Path) -> dict[str, Any]:
    """What the artefact itself says that vLLM is to be told, with our number of tokens."""
    said: dict[str, Any] = json.loads((folder / "speculative_config.json").read_text(encoding="utf-8"))
    return {**said, "model": str(folder), "num_speculative_tokens": GAMMA}
