"""Several proposers in order: who drafts, with which q, counted apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specpipe import cli
from specpipe.audit.exact import largest_difference, output_law, target_law
from specpipe.audit.tables import FixedProposer, TableProposer, table
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.proposers.cascade import Cascade
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from tests.stand_ins import pipeline_of

HERE = "tests.test_cascade"
V = 3
P, Q = table(V, seed=3, zeros=0), table(V, seed=7, zeros=0)
EVEN = f"{HERE}.Even"


class Even:
    """Drafts one token behind an even number of tokens, nothing behind an odd one."""

    def __init__(self, *, token: int = 1) -> None:
        self.token = token

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return Draft.of(
            [[self.token][:k] if len(s.tokens) % 2 == 0 else [] for s, k in zip(sequences, lengths, strict=True)]
        )


class Soft(TableProposer):
    def __init__(self) -> None:
        super().__init__(Q, V)


def cascade(*members: Any) -> Cascade:
    return Cascade(members=list(members))


def sequences(*prompts: list[int]) -> list[Sequence]:
    return pipeline_of(P, V, FixedProposer(lambda tokens, k: []), temperature=1.0).sequences(list(prompts))


def bound(*members: Any) -> Cascade:
    made = cascade(*members)
    made.bind(pipeline_of(P, V, FixedProposer(lambda tokens, k: [])).verifier.target)
    return made


def test_the_first_member_with_a_draft_wins_row_by_row() -> None:
    made = bound({"_target_": EVEN}, {"_target_": f"{HERE}.Soft"})
    draft = made.propose(sequences([0, 0], [0], [0, 1]), [2, 2, 2])
    assert draft.lengths == [1, 2, 1]
    assert draft.sources == ["Even", "Soft", "Even"]
    assert draft.tokens[:, 0].tolist()[::2] == [1, 1]
    assert draft.probs is not None
    assert draft.probs[0, 0].tolist() == [0, 1, 0]  # deterministic beside a drawn one: its q is one-hot
    assert draft.probs[1, 0].sum() == pytest.approx(1)


def test_deterministic_members_need_no_q() -> None:
    draft = bound({"_target_": EVEN}, "ngram").propose(sequences([0], [0, 0]), [2, 2])
    assert (draft.probs, draft.lengths, draft.sources) == (None, [0, 1], [None, "Even"])


def test_the_mixture_keeps_the_targets_law() -> None:
    pipeline = pipeline_of(
        P, V, cascade({"_target_": EVEN}, {"_target_": f"{HERE}.Soft"}), gamma=2, max_new_tokens=3, temperature=1.0
    )
    wanted = target_law(P, [1, 0], 3, GenerationSettings(temperature=1.0))
    assert largest_difference(output_law(pipeline, [1, 0], 3), wanted) <= 1e-12


def test_members_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their option's name, one of the user's own among them; summary.members holds each one's counters."""
    (tmp_path / "conf" / "proposer").mkdir(parents=True)
    (tmp_path / "conf" / "proposer" / "even.yaml").write_text(f"_target_: {EVEN}\ntoken: 5\n")
    words = ["specpipe", "decode", "--config-dir", str(tmp_path / "conf"), "target=tiny", "target.device=cpu"]
    words += ["wandb=none", "proposer=cascade", "proposer.members=[even,ngram]", "prompt=abababab", "trace=true"]
    words += [f"hydra.run.dir={tmp_path / 'run'}", "generation.max_new_tokens=40", "generation.ignore_eos=true"]
    monkeypatch.setattr(sys, "argv", words)
    assert cli.main() == 0
    summary = json.loads((tmp_path / "run" / "result.json").read_text())["summary"]
    members = summary["members"]
    assert set(members) <= {"even", "ngram"}
    assert sum(each["num_draft_tokens"] for each in members.values()) == summary["spec_decode"]["num_draft_tokens"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    assert {line["source"] for line in lines if line["drafted"]} == set(members)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([], "is not a list of proposers"),
        ("ngram", "is not a list of proposers"),
        (["ngram", "ngram"], "names one proposer twice"),
        (["ngrm"], "Did you mean 'ngram'"),
        ([{"max_ngram": 3}], "neither a proposer's name nor a mapping"),
        ([{"_target_": EVEN, "tokn": 3}], "Did you mean 'token'"),
    ],
)
def test_members_that_are_none_are_named(members: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Cascade(members=members)
