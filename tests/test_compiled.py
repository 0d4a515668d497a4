"""A compiled target is the same target; where it cannot be compiled it runs as it is, and says so once."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier import compiled
from specpipe.verifier.compiled import MOST, CompiledModel, CompiledVerifier, Stack
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import ToyTokenizer, sharpened, small

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral, window": ("Mistral", {"sliding_window": 3}),
    "Qwen2, window in one layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Programs are the layers as they would be traced, run as Python; the numbers of rows that they were given."""
    rows: list[int] = []

    def program(stack: Stack, *others: Any) -> Any:
        return lambda states, *angles: rows.append(len(states)) or stack(states, *angles)

    monkeypatch.setattr(compiled, "_program", program)
    return rows


def target_of(kind: str = "Llama") -> Target:
    name, config = KINDS[kind]
    return Target(sharpened(small(name, **config)), ToyTokenizer(), kind, None)


def rows_read(verifier: Any) -> list[torch.Tensor]:
    """Logits of two texts read side by side in passes of several widths, drafts rejected and accepted."""
    one, two = (
        Sequence(prompt, GenerationSettings(max_new_tokens=20), chance=Chance(0)) for prompt in ([5, 9, 3, 20, 7], [8])
    )
    seen = []
    for drafts, (block_one, block_two) in (
        ([[4, 6], [1]], ([4, 30], [2])),
        ([[], []], ([11], [12])),
        ([[9, 9, 9], []], ([9, 9, 1], [40])),
        ([[], [3, 3]], ([6], [3, 3, 5])),
    ):
        draft = Draft.of(drafts, verifier.device)
        seen += verifier.score([one, two], draft)
        one.commit(block_one, len(drafts[0]), [])
        two.commit(block_two, len(drafts[1]), [])
        verifier.roll_back([one, two])
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_target_reads_as_the_plain_one(kind: str, uncompiled: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verifier = CompiledVerifier(target_of(kind))
    assert isinstance(verifier.reader.model, CompiledModel)
    for ours, plain in zip(rows_read(verifier), rows_read(EagerVerifier(target_of(kind))), strict=True):
        assert (ours - plain).abs().max() < 1e-10
    assert {1, 2, 8} < set(uncompiled)


def test_prompts_are_read_uncompiled(uncompiled: list[int]) -> None:
    verifier = CompiledVerifier(target_of())
    uncompiled.clear()
    text = Sequence(list(range(MOST // 2)), GenerationSettings(max_new_tokens=3), chance=Chance(0))
    verifier.score([text], Draft.of([[2] * (MOST // 2 + 1)], verifier.device))
    assert uncompiled == []
    verifier.roll_back([text])
    text.commit([1], 0, [])
    verifier.score([text], Draft.of([[2, 2]], verifier.device))
    assert uncompiled == [4]  # the last token of the prompt was forgotten with the drafts


@pytest.mark.parametrize("why", ["no compiler", "wrong logits", "unknown kind"])
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(
    why: str, uncompiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, said = target_of(), "there is no C++ compiler"
    if why == "no compiler":
        monkeypatch.setattr(compiled, "_program", no_compiler)
    if why == "wrong logits":
        monkeypatch.setattr(compiled, "norm", lambda module, x: 3 * x)
        said = "its logits are off by"
    if why == "unknown kind":
        target, said = Target(small("GPT2"), ToyTokenizer(), "GPT2", None), "GPT2LMHeadModel is of no kind"
    with pytest.warns(UserWarning, match=re.escape(said)) as told:
        verifier = CompiledVerifier(target)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert not isinstance(verifier.reader.model, CompiledModel)
    assert rows_read(verifier)


def no_compiler(*given: Any) -> Any:
    raise RuntimeError("there is no C++ compiler\nand more about it")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_programs_are_compiled_once_and_kept_and_round_as_the_modules_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real compiler, two layers in bfloat16; then without a compiler, from the files."""
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")  # which another test may have imported
    plain = rows_read(EagerVerifier(tiny(dtype="bfloat16", device="cpu")))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", message="Reliance on distutils")
            verifier = CompiledVerifier(tiny(dtype="bfloat16", device="cpu"))
        assert isinstance(verifier.reader.model, CompiledModel)
        assert all(torch.equal(*both) for both in zip(rows_read(verifier), plain, strict=True))
        monkeypatch.setattr(compiled, "_compile", no_compiler)
    assert len(list((tmp_path / "compiled").glob("*.pt2"))) == 2
