"""Heads as a proposer: from which state and tokens they guess, for which target, and from which law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specpipe
from specpipe.audit.exact import largest_difference, target_law
from specpipe.audit.tables import table
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.bound_heads import heads_in
from specpipe.proposers.compiled_heads import CompiledHeads
from specpipe.proposers.heads import Heads, MedusaHeads, MlpHeads
from specpipe.proposers.mlp import HeadsProposer
from specpipe.samplers.block import Block
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.linear import HalfLinear, OneDnnLinear
from specpipe.verifier.states import States
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import (
    Compared,
    TableModel,
    ToyTokenizer,
    chain,
    law,
    own_greedy,
    random_heads,
    saved_heads,
    sharpened,
    small,
)

KINDS = ("mlp", "medusa")
SAMPLE: dict[str, Any] = {"temperature": 1.0}
PROMPTS = [[5, 9, 5, 9, 5, 3, 2, 8, 1, 7], [4, 4], [9, 8, 7, 6, 5, 4, 3]]


class Letters(ToyTokenizer):
    """Of so many letters; `first` is what the first is called."""

    def __init__(self, size: int, first: str = "a") -> None:
        self.pieces = [first, *(chr(ord("a") + i) for i in range(1, size))]

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}


def target_of(model: Any) -> Target:
    return Target(model, Letters(model.config.vocab_size), "target", None)


def proposer_of(folder: Path, heads: Heads, target: Target, ids: list[int] | None = None, **asked: Any) -> Any:
    return HeadsProposer(path=str(saved_heads(folder, heads, target, ids)), **asked)


def pipeline_of(proposer: Any, target: Target, gamma: int = 3, sampler: Any = None, **settings: Any) -> Pipeline:
    return Pipeline(
        verifier=EagerVerifier(target),
        proposer=proposer,
        sampler=sampler or Rejection(),
        settings=GenerationSettings(**{"max_new_tokens": 12, "ignore_eos": True} | settings),
        num_speculative_tokens=gamma,
    )


def request(ids: list[int], stop: tuple[int, ...] = (), **settings: Any) -> Sequence:
    return Sequence(ids, GenerationSettings(**settings), stop_ids=stop, chance=Chance(0, ids))


# ---- compiled ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 3])
def test_compiled_heads_have_the_logits_of_plain_ones(count: int, dtype: str, tmp_path: Path) -> None:
    target = tiny(dtype=dtype, device="cpu")
    ids = list(range(0, target.vocabulary, 3))
    plain = heads_in(saved_heads(tmp_path, random_heads("mlp", 64, count), target, ids))
    plain.bind(target)
    assert CompiledHeads.fits(plain)
    ours = CompiledHeads(plain)
    generator = torch.Generator().manual_seed(1)
    carry = other = torch.randn(5, 64, generator=generator)
    for i in range(count):
        tokens = torch.randint(0, target.vocabulary, (5,), generator=generator)
        carry, features = plain.step(i, carry, tokens)
        other, logits = ours.step(i, other, tokens)
        close = {"rtol": 0.02, "atol": 0.02} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(other, carry, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.logits(i, logits), plain.logits(i, features).float(), **close)


def test_with_a_compiled_target_the_heads_are_compiled_and_draft_the_same(tmp_path: Path) -> None:
    target = tiny(device="cpu")
    folder = saved_heads(tmp_path, random_heads("mlp", 64), target, None)
    words = [
        "target=tiny",
        "target.device=cpu",
        "proposer=mlp",
        f"proposer.path={folder}",
        "generation.max_new_tokens=30",
    ]
    found = []
    for verifier in ("packed", "compiled"):
        pipeline = specpipe.load(
            *words, f"verifier={verifier}", "num_speculative_tokens=3", "generation.ignore_eos=true"
        )
        assert isinstance(pipeline.proposer.heads, CompiledHeads) == (verifier == "compiled")
        [sequence] = pipeline.sequences(["abcab"])
        found.append([(step.drafted, step.accepted, step.tokens) for step in pipeline.decode(sequence)])
    assert found[0] == found[1]


def test_medusa_heads_stay_as_they_are(tmp_path: Path) -> None:
    target = tiny(device="cpu")
    assert not CompiledHeads.fits(heads_in(saved_heads(tmp_path, random_heads("medusa", 64), target, None)))


# ---- which state, which tokens ----

V = 7


def turned(times: int, strength: float = 1.0) -> Tensor:
    """[V, V]: id x becomes id x + times."""
    return strength * torch.eye(V).roll(times, 0)


def counting(kind: str) -> Heads:
    """Heads that guess one id more each time, from the state or from the token before; a state peaks at its token."""
    if kind == "medusa":
        medusa = MedusaHeads(hidden=V, heads=3)
        for i, block in enumerate(medusa.blocks):
            block.data = turned(i + 1, 100.0)
        return medusa
    heads = MlpHeads(hidden=V, heads=3)
    heads.proj_0.data, heads.proj_1.data, heads.inner.data = torch.zeros(3, V, V).unbind()
    if kind == "mlp, from the state":
        heads.proj_0.data, heads.proj_1.data = turned(1), turned(1)
    else:
        heads.inner.data = turned(1).T
    return heads


COUNTING = ("medusa", "mlp, from the state", "mlp, from the token")


def counted(folder: Path, kind: str) -> list[Any]:
    """The steps of a text that counts, drafted by heads that do."""
    target = target_of(TableModel(chain(V), V))
    pipeline = pipeline_of(proposer_of(folder, counting(kind), target), target)
    [sequence] = pipeline.sequences([[3, 4]])
    return list(pipeline.decode(sequence))


@pytest.mark.parametrize("kind", COUNTING)
def test_heads_go_on_from_the_newest_token_and_its_state(kind: str, tmp_path: Path) -> None:
    """All that they guess is right, behind the prompt and behind full acceptance."""
    steps = counted(tmp_path, kind)
    assert [(step.drafted, step.accepted) for step in steps] == [(0, 0), (3, 3), (3, 3), (2, 2)]


def earlier(self: States, sequence: Sequence) -> Tensor | None:
    kept = self._kept.get(sequence)
    return None if kept is None else kept.states[len(sequence.tokens) - 3 - kept.start]


@pytest.mark.parametrize("kind", COUNTING[:2])
def test_the_state_before_would_be_seen(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "of", earlier)
    assert any(step.accepted < step.drafted for step in counted(tmp_path, kind))


def test_the_token_before_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behind = property(lambda row: [*row.sequence.tokens[-2:], *row.given, *row.drafted])
    monkeypatch.setattr("specpipe.proposers.mlp._Row.behind", behind)
    assert any(step.accepted < step.drafted for step in counted(tmp_path, "mlp, from the token"))


@pytest.mark.parametrize("kind", COUNTING)
def test_heads_lengthen_the_draft_of_another(kind: str, tmp_path: Path) -> None:
    """They are told its tokens, and there are as many in all as there are heads; none behind a stop."""
    target = target_of(TableModel(chain(V), V))
    proposer = proposer_of(tmp_path, counting(kind), target)
    proposer.bind(target)
    sequences = [request([1, 2, 3], (5,)) for _ in range(5)]
    draft = proposer.extend(sequences, [[], [4], [4, 4], [4, 5], [4, 4, 4]], [3, 1, 9, 1, 1])
    told = 5 if kind == "mlp, from the token" else 6  # behind 4, 4
    assert [draft.row(b)[0] for b in range(5)] == [[4, 5], [5], [told], [], []]


# ---- the law ----


RULE = table(3, seed=3, zeros=0)


def law_error(proposer: Any, target: Target, sampler: Any, **settings: Any) -> float:
    pipeline = pipeline_of(proposer, target, gamma=2, sampler=sampler, max_new_tokens=4, **settings)
    return largest_difference(law(pipeline, [1, 0]), target_law(RULE, [1, 0], 4, pipeline.settings))


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, SAMPLE),
        ({"draw": "argmax"}, SAMPLE),
        ({"min_confidence": 0.55}, SAMPLE),
        ({}, {"temperature": 0.7, "banned_token_ids": [0, 2]}),
    ],
)
@pytest.mark.parametrize("sampler", [Rejection, Block])
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_has_exactly_the_targets_law(
    kind: str, sampler: type, asked: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """With a trimmed vocabulary; also where the request bans all of it. With all settings: test_every_proposer."""
    target = target_of(TableModel(RULE, 3, 64))
    proposer = proposer_of(tmp_path, random_heads(kind, 3), target, [0, 2], **asked)
    assert law_error(proposer, target, sampler(), **settings) <= 1e-12


class OffByOne(HeadsProposer):
    """Says that it drew each token from the next head's law."""

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        draft = super().extend(sequences, drafts, lengths)
        probs = None if draft.probs is None else draft.probs.roll(1, dims=1)
        return Draft(draft.tokens, draft.lengths, probs, drawn=draft.drawn)


def test_a_law_of_the_next_head_would_be_seen(tmp_path: Path) -> None:
    target = target_of(TableModel(RULE, 3, 64))
    proposer = OffByOne(path=str(saved_heads(tmp_path, random_heads("mlp", 3), target, [0, 2])))
    assert law_error(proposer, target, Rejection(), **SAMPLE) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_draft_as_they_do_alone(kind: str, tmp_path: Path) -> None:
    """C33, C37: ragged limits and beginnings, one row without a draft, stops."""
    target = target_of(small("Llama"))
    proposer = proposer_of(tmp_path, random_heads(kind, 32, 4), target)
    proposer.bind(target)
    prompts, given, lengths = [*PROMPTS, [3, 1], [7]], [[], [5], [], [1, 2, 3], []], [4, 2, 0, 3, 4]
    batch = proposer.extend([request(ids, (60,), **SAMPLE) for ids in prompts], given, lengths)
    assert batch.lengths == [4, 2, 0, 1, 0]  # there is no state before a prompt of one token
    for b, (ids, draft, k) in enumerate(zip(prompts, given, lengths, strict=True)):
        alone, q = proposer.extend([request(ids, (60,), **SAMPLE)], [draft], [k]).row(0)
        x, probs = batch.row(b)
        assert x == alone
        assert not x or torch.allclose(probs, q, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_extending_a_draft_is_proposing_behind_it(kind: str, tmp_path: Path) -> None:
    target = target_of(small("Llama"))
    proposer = proposer_of(tmp_path, random_heads(kind, 32), target)
    proposer.bind(target)
    x, q = proposer.propose([request(PROMPTS[0], **SAMPLE)], [3]).row(0)
    for n in (1, 2):
        _, r = proposer.extend([request(PROMPTS[0], **SAMPLE)], [x[:n]], [3]).row(0)
        assert torch.allclose(r[0], q[n], atol=1e-12)
        assert len(r) == 1 or len(r) == 3 - n


# ---- with and without a verifier ----


@pytest.mark.parametrize(
    ("kind", "model_kind", "batch_size", "temperature"),
    [("mlp", "Llama", 1, 1.0), ("mlp", "Llama", 2, 0.0), ("medusa", "Gemma3Text", 2, 1.0), ("mlp", "GPT2", 2, 1.0)],
)
def test_without_a_verifier_the_drafts_are_the_same(
    kind: str, model_kind: str, batch_size: int, temperature: float, tmp_path: Path
) -> None:
    """Prompts of several lengths, rows that come and go; greedy ids are the target's own."""
    model = sharpened(small(model_kind))
    target = target_of(model)
    folder = str(saved_heads(tmp_path, random_heads(kind, 32), target))
    proposer = Compared(lambda: HeadsProposer(path=folder))
    pipeline = pipeline_of(proposer, target, temperature=temperature)
    sequences = pipeline.sequences(PROMPTS)
    for _ in pipeline.decode_together(sequences, batch_size):
        pass
    assert proposer.drafted > 20
    if temperature == 0:
        assert [s.new_tokens for s in sequences] == [own_greedy(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("model_kind", ["Gemma2", "Cohere", "Granite", "Phi"])
def test_heads_draft_for_a_target_that_changes_its_logits(model_kind: str, tmp_path: Path) -> None:
    """By a cap, a scale or a bias, which the heads leave out."""
    model = sharpened(small(model_kind))
    target = target_of(model)
    pipeline = pipeline_of(proposer_of(tmp_path, random_heads("mlp", 32), target), target)
    [done] = pipeline.generate([PROMPTS[0]])
    assert done.token_ids == own_greedy(model, PROMPTS[0], 12)
    assert done.alpha is not None


def test_in_a_pipeline_nothing_is_read_for_the_heads(tmp_path: Path) -> None:
    """One pass of the target a step; nothing is drafted until it has read the prompt, also if that was interrupted."""
    model = TableModel(table(11, seed=2, zeros=0), 11)
    target = target_of(model)
    pipeline = pipeline_of(proposer_of(tmp_path, random_heads("mlp", 11), target), target, gamma=5)
    [sequence] = pipeline.sequences([[1, 2, 3]])
    model.calls.clear()
    commit, sequence.commit = sequence.commit, lambda *_, **__: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(ZeroDivisionError):
        pipeline.step([sequence])
    sequence.commit = commit  # type: ignore[method-assign]
    steps = list(pipeline.decode(sequence))
    assert len(model.calls) == 1 + len(steps)
    assert steps[0].drafted == 0
    assert all(step.drafted == min(3, step.asked) for step in steps[1:])


def test_heads_draft_for_requests_that_no_verifier_reads(tmp_path: Path) -> None:
    """As the audit's second proposer does; one that a pipeline has attached waits for the pipeline's target."""
    target = target_of(small("Llama"))
    folder = str(saved_heads(tmp_path, random_heads("mlp", 32), target))
    pipeline = pipeline_of(HeadsProposer(path=folder), target)
    second = HeadsProposer(path=folder)
    second.bind(target)
    sequences = pipeline.sequences(PROMPTS)
    assert second.propose(sequences, [4, 4, 2]).lengths == [3, 3, 2]
    assert second.propose(sequences, [4, 4, 2]).lengths == [3, 3, 2]  # nothing new to read
    assert pipeline.proposer.propose(sequences, [4, 4, 4]).lengths == [0, 0, 0]


# ---- the target ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_embedding_and_head_are_there_before_and_after_packing(dtype: str, tied: bool) -> None:
    model = small("Llama", tie_word_embeddings=tied).to(getattr(torch, dtype))
    embedding, head = model.model.embed_tokens.weight.clone(), model.lm_head.weight.clone()
    assert torch.equal(embedding, head) == tied
    target = target_of(model)
    for _ in range(2):
        assert torch.equal(target.embedding_weight, embedding)
        assert torch.equal(target.head_weight, head)
        assert target.head_weight.dtype == head.dtype
        EagerVerifier(target)
    assert isinstance(model.lm_head, (OneDnnLinear, HalfLinear))


def test_a_target_without_a_head_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TableModel, "get_output_embeddings")
    with pytest.raises(UserError, match="no output embeddings"):
        _ = target_of(TableModel(chain(V), V)).head_weight


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_decodes_the_plain_text_with_heads(kind: str, tmp_path: Path) -> None:
    """Heads of float32 for a packed target; the texts of two requests are the target's own."""
    folder = saved_heads(tmp_path, random_heads(kind, 64), tiny(device="cpu"))
    words = ("target=tiny", "target.device=cpu", "generation=greedy", "generation.max_new_tokens=20")
    plain = specpipe.load(*words, "proposer=none").generate(["hello", "a"])
    done = specpipe.load(*words, "proposer=mlp", f"proposer.path={folder}").generate(["hello", "a"])
    assert [each.token_ids for each in done] == [each.token_ids for each in plain]
    assert all(each.alpha is not None for each in done)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads_draft_for_a_target_in_half_precision(dtype: str, tmp_path: Path) -> None:
    target = tiny(device="cpu", dtype=dtype)
    proposer = proposer_of(tmp_path, random_heads("mlp", 64), target, [*range(0, 200, 2)])
    EagerVerifier(target)
    proposer.bind(target)
    x, q = proposer.propose([request([5, 6, 7], **SAMPLE)], [3]).row(0)
    assert len(x) == 3
    assert all(token in range(0, 200, 2) for token in x)
    assert q.dtype == torch.float32
    assert (q[:, 1::2] == 0).all()


# ---- refusals ----


def test_heads_for_another_target_are_refused_with_the_remedy(tmp_path: Path) -> None:
    target = target_of(TableModel(chain(V), V))
    other_words = Target(target.model, Letters(V, first="z"), "other", None)
    wider = Target(small("Llama", vocab_size=V), Letters(V), "wider", None)
    fewer = Target(TableModel(chain(V - 1), V - 1), Letters(V), "fewer", None)
    proposer = proposer_of(tmp_path, random_heads("mlp", V), target)
    for refused, what in (
        (other_words, "other has another vocabulary"),
        (fewer, "fewer has another vocabulary"),
        (wider, "a hidden size of 7, and wider has 32"),
    ):
        with pytest.raises(UserError, match=f"for target.*{what}.*python -m train student=mlp target=") as caught:
            proposer.bind(refused)
        assert caught.value.key == "path"


def test_a_wider_head_suits_medusa_heads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the embedding has another size than what the head is given."""
    target = target_of(TableModel(chain(V), V))
    mlp, medusa = (proposer_of(tmp_path / kind, random_heads(kind, V), target) for kind in KINDS)
    monkeypatch.setattr(Target, "embedding_weight", torch.ones(V, V + 1))
    medusa.bind(target)
    assert medusa.propose([request([1, 2])], [3]).lengths == [3]
    with pytest.raises(UserError, match="hidden size of 7, and target has 8"):
        mlp.bind(target)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"path": 3}, "path: 3 is not the path of a folder"),
        ({"path": "nowhere"}, "path: there are no trained heads.*python -m train student=mlp"),
        ({"draw": "best"}, "draw"),
        ({"min_confidence": 2}, "min_confidence"),
    ],
)
def test_wrong_values_are_refused(asked: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        HeadsProposer(**asked)
