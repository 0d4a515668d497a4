"""What ships, exported for the default target and loaded back. Few, and marked `real`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from specpipe import load
from tests.command_line import Run
from tests.test_real import PROMPT, pytestmark  # noqa: F401, marks this file too

V, H, KEPT = 49152, 576, 8192
LONG = ("generation.max_new_tokens=60", "generation.ignore_eos=true")


def names(folder: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name; nothing is read."""
    with safe_open(Path(folder, "model.safetensors"), "pt") as held:
        return {name: tuple(held.get_slice(name).get_shape()) for name in held.keys()}  # noqa: SIM118, not a mapping


def exported(specpipe: Run, *words: str) -> dict[str, Any]:
    ran = specpipe("export", *words, "out=made", "hydra.run.dir=run")
    assert ran.code == 0, ran.err
    assert shlex.split(ran.out)[:2] == ["vllm", "serve"]
    return json.loads(Path("run", "result.json").read_text())


@pytest.mark.parametrize("head", ["penalty", "small"])
def test_the_shipped_draft_is_exported(head: str, specpipe: Run) -> None:
    found = exported(specpipe, "proposer=distilled", "format=vllm", f"head={head}")
    check = found["check"]
    assert check["difference"] < 1e-4
    assert check["strays"] == 0
    assert check["outside"] == 0
    rows = KEPT if head == "small" else V
    assert names("made")["model.embed_tokens.weight"] == (rows, H)
    assert names("made").get("lm_head.weight") == (None if head == "small" else (V, H))


def test_the_shipped_heads_are_exported_and_imported(specpipe: Run) -> None:
    """The text is the same; the tables are rounded to bfloat16, so now and then a guess is another one."""
    found = exported(specpipe, "proposer=mlp", "format=mlp_speculator", "flavour=arctic")
    assert found["check"]["outside"] == 0
    assert found["check"]["difference"] < 0.02
    assert names("made")["speculator.head.2.weight"] == (V, H)
    shipped, imported = (
        load("proposer=mlp", *path, "target.dtype=float32", *LONG).generate(PROMPT)[0]
        for path in ([], ["proposer.path=made"])
    )
    assert shipped.token_ids == imported.token_ids
    accepted = [done.spec_decode["num_accepted_draft_tokens"] for done in (shipped, imported)]
    assert abs(accepted[0] - accepted[1]) <= 2 < accepted[0]
