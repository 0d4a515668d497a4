"""Several proposers in order: who drafts, with which q, counted apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specpipe import cli
from specpipe.audit.exact import largest_difference, output_law, target_law
from specpipe.audit.tables import FixedProposer, TableProposer, table
from specpipe.draft import Draft
from specpipe.errors import ContractError, UserError
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


class OneSoft(Soft):
    """Draws one token at most."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return super().propose(sequences, [min(k, 1) for k in lengths])


class SoftBehind(Soft):
    """Draws behind the drafts of others as well."""

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        together = [shadow(s, x) for s, x in zip(sequences, drafts, strict=True)]
        return self.propose(together, lengths)


class SoftBeside(Soft):
    """Draws as if there were no draft: a poor guess, but the q that it returns is the one it drew from."""

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        return self.propose(sequences, lengths)


class WrongQ(SoftBehind):
    """Draws behind the drafts and returns the q of a draw without them."""

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        draft = super().extend(sequences, drafts, lengths)
        assert draft.probs is not None
        for b, sequence in enumerate(sequences):
            for i in range(draft.lengths[b]):
                draft.probs[b, i] = self._law((*sequence.tokens, *draft.tokens[b, :i].tolist()))
        return draft


class Recorder:
    """Drafts two tokens and notes what it is asked; `attach`ed, it says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[int]]] = []
        self.verifier: object = None

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        self.asked.append((drafts, lengths))
        return Draft.of([[2, 2][:k] for k in lengths])

    def attach(self, verifier: object) -> None:
        self.verifier = verifier


def shadow(sequence: Sequence, draft: list[int]) -> Any:
    return SimpleNamespace(tokens=[*sequence.tokens, *draft], chance=sequence.chance)


def cascade(*members: Any, extend: bool = False) -> Cascade:
    return Cascade(members=list(members), extend=extend)


def sequences(*prompts: list[int]) -> list[Sequence]:
    return pipeline_of(P, V, FixedProposer(lambda tokens, k: []), temperature=1.0).sequences(list(prompts))


def bound(*members: Any, extend: bool = False) -> Cascade:
    made = cascade(*members, extend=extend)
    made.bind(pipeline_of(P, V, FixedProposer(lambda tokens, k: [])).verifier.target)
    return made


def test_the_first_member_with_a_draft_wins_row_by_row() -> None:
    made = bound({"_target_": EVEN}, {"_target_": f"{HERE}.Soft"})
    draft = made.propose(sequences([0, 0], [0], [0, 1]), [2, 2, 2])
    assert draft.lengths == [1, 2, 1]
    assert draft.sources == ["Even", "Soft", "Even"]
    assert draft.tokens[:, 0].tolist()[::2] == [1, 1]
    assert draft.probs is not None
    assert [draft.law(b) is None for b in range(3)] == [True, False, True]  # as it would be alone
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


def recorder(made: Cascade) -> Recorder:
    return made._members["Recorder"]  # type: ignore[return-value]


def test_a_short_draft_is_lengthened_by_the_members_behind_it() -> None:
    """Row 0: one token of Even, then two; row 1: all of the second's own; row 2: full already."""
    made = bound({"_target_": EVEN}, {"_target_": f"{HERE}.Recorder"}, extend=True)
    draft = made.propose(sequences([0, 0], [0], [0, 1]), [4, 4, 1])
    assert [draft.row(b)[0] for b in range(3)] == [[1, 2, 2], [2, 2], [1]]
    assert recorder(made).asked == [([[1], []], [3, 4])]
    assert draft.sources == ["Even", "Recorder", "Even"]


@pytest.mark.parametrize("extend", [False, True])
def test_nobody_lengthens_unasked_for_or_its_own_draft_or_without_the_method(extend: bool) -> None:
    """Off; in the other order; behind a member that can only propose."""
    first = bound({"_target_": f"{HERE}.Recorder"}, {"_target_": EVEN}, extend=extend)
    assert first.propose(sequences([0, 0]), [4]).row(0)[0] == [2, 2]
    second = bound({"_target_": EVEN}, {"_target_": f"{HERE}.Recorder"}, extend=extend)
    assert second.propose(sequences([0, 0]), [4]).row(0)[0] == ([1, 2, 2] if extend else [1])


def test_nothing_is_proposed_behind_a_stop() -> None:
    made = bound({"_target_": EVEN}, {"_target_": f"{HERE}.Recorder"}, extend=True)
    stopping = pipeline_of(P, V, made, stop_token_ids=[1]).sequences([[0, 0]])
    assert made.propose(stopping, [4]).row(0)[0] == [1]
    assert recorder(made).asked == []


SUFFIX = {"_target_": "specpipe.proposers.suffix.SuffixProposer", "max_cached_tokens": 0, "min_probability": 0}


@pytest.mark.parametrize(
    ("members", "lawful"),
    [
        ([EVEN, f"{HERE}.SoftBehind"], True),  # a certain token, then drawn ones
        ([f"{HERE}.OneSoft", SUFFIX], True),  # a drawn one, then certain ones
        ([f"{HERE}.OneSoft", "ngram"], True),
        ([f"{HERE}.OneSoft", f"{HERE}.SoftBeside"], True),
        ([EVEN, f"{HERE}.OneSoft", SUFFIX, f"{HERE}.SoftBehind"], True),
        ([EVEN, f"{HERE}.WrongQ"], False),
    ],
)
def test_lengthened_drafts_keep_the_targets_law(members: list[Any], lawful: bool) -> None:
    """Exactly; and a q that is not the one drawn from is found out."""
    named = [{"_target_": each} if isinstance(each, str) and "." in each else each for each in members]
    pipeline = pipeline_of(P, V, cascade(*named, extend=True), gamma=3, max_new_tokens=4, temperature=1.0)
    wanted = target_law(P, [1, 0], 4, GenerationSettings(temperature=1.0))
    difference = largest_difference(output_law(pipeline, [1, 0], 4), wanted)
    assert difference <= 1e-12 if lawful else difference > 1e-3


def test_certain_tokens_beside_drawn_ones_have_a_one_hot_q() -> None:
    draft = bound({"_target_": EVEN}, {"_target_": f"{HERE}.SoftBehind"}, extend=True).propose(
        sequences([0, 0], [0]), [3, 2]
    )
    assert draft.probs is not None
    assert draft.probs[0, 0].tolist() == [0, 1, 0]
    for i in (1, 2):
        assert draft.probs[0, i].tolist() == Q([0, 0, *draft.row(0)[0][:i]]).softmax(-1).tolist()


def test_lengthened_drafts_leave_no_trace_in_the_members() -> None:
    """A sampled text, most drafts rejected: behind each step members draft as new ones do that never saw a draft."""
    members: list[Any] = [{"_target_": f"{HERE}.OneSoft"}, SUFFIX, "ngram"]
    made = cascade(*members, extend=True)
    pipeline = pipeline_of(P, V, made, gamma=3, max_new_tokens=40, temperature=1.0)
    (sequence,) = pipeline.sequences([[1, 0]])
    for step in pipeline.decode(sequence):
        for name, fresh in bound(*members[1:])._members.items():
            known = made._members[name]
            assert known.propose([sequence], [6]).row(0)[0] == fresh.propose([sequence], [6]).row(0)[0]
        assert step.source in ("OneSoft", None)
    assert sum(step.drafted - step.accepted for step in sequence.steps) > 20


def test_the_verifier_is_handed_to_members_that_want_it() -> None:
    made = cascade({"_target_": EVEN}, {"_target_": f"{HERE}.Recorder"})
    pipeline = pipeline_of(P, V, made)
    assert recorder(made).verifier is pipeline.verifier


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


def test_extend_is_true_or_false() -> None:
    with pytest.raises(UserError, match="'maybe' is not true or false"):
        Cascade(extend="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([], "is not a list of proposers"),
        ("ngram", "is not a list of proposers"),
        (["ngram", "ngram"], "names one proposer twice"),
        (["ngrm"], "Did you mean 'ngram'"),
        ([{"max_ngram": 3}], "not a proposer with its settings"),
        ([3], "neither a proposer's name nor one with its settings"),
        ([{"ngram": {"max_ngrm": 3}}], "Did you mean 'max_ngram'"),
        (["ngram", "cascade"], r"members\[1\]: is a cascade"),
        ([{"_target_": EVEN, "tokn": 3}], "Did you mean 'token'"),
    ],
)
def test_members_that_are_none_are_named(members: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Cascade(members=members)


def test_a_member_takes_other_settings_than_its_file_has() -> None:
    made = bound({"ngram": {"max_ngram": 2}}, "ngram")
    assert list(made._members) == ["ngram", "ngram 2"]
    assert [member.max_ngram for member in made._members.values()] == [2, 3]


def test_members_of_one_class_are_numbered_and_faulty_ones_named() -> None:
    made = bound({"_target_": EVEN, "token": 1}, {"_target_": EVEN, "token": 2})
    assert list(made._members) == ["Even", "Even 2"]
    with pytest.raises(ContractError, match="Even proposed"):
        bound({"_target_": EVEN, "token": 99}).propose(sequences([0, 0]), [1])


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ("nope", r"members\[0\]: no option 'nope'"),
        ("draft", r"members\[0\]\.model: has no value"),
        ({"_target_": "builtins.dict"}, r"members\[0\]: dict has no method"),
    ],
)
def test_what_is_wrong_with_a_member_is_told_at_its_place(member: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Cascade(members=[member])
