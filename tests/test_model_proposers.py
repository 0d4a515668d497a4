"""Models that draft: their cache follows what was committed, and q is the law each draft came from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import specpipe
from specpipe.audit.exact import largest_difference, output_law, target_law
from specpipe.audit.tables import Rule, table
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.draft import DraftModel, refuse_other_tokenizer
from specpipe.proposers.layer_skip import LayerSkip
from specpipe.proposers.model import ModelProposer
from specpipe.samplers.block import Block
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.targets import tiny
from tests.stand_ins import TableModel, chain, context, greedy, pipeline_of

V = 3
P, Q = table(V, seed=3, zeros=0), table(V, seed=7, zeros=0)
SAMPLE = {"temperature": 1.0}


class Drafting(ModelProposer):
    """Drafts with a table model."""

    def __init__(self, rule: Rule, size: int, context: int | None = None, **asked: Any) -> None:
        super().__init__(**asked)
        self.drafter = TableModel(rule, size, context)

    def bind(self, target: Any) -> None:
        self._use(self.drafter, target.vocabulary, self.drafter.config.max_position_embeddings)


def steps_of(pipeline: Pipeline, prompt: list[int]) -> tuple[list[int], list[Any]]:
    [sequence] = pipeline.sequences([prompt])
    steps = list(pipeline.decode(sequence))
    return sequence.new_tokens, steps


@pytest.mark.parametrize("settings", [{}, SAMPLE, {"temperature": 0.7, "frequency_penalty": 0.4}])
@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_a_draft_that_is_the_target_is_accepted_whole(gamma: int, settings: dict[str, Any]) -> None:
    """C29: in every step, after full acceptance too; the first step behind the prompt and the last one included."""
    rule = table(11, seed=2, zeros=0)
    pipeline = pipeline_of(rule, 11, Drafting(rule, 11), gamma=gamma, max_new_tokens=30, **settings)
    _, steps = steps_of(pipeline, [1, 2, 3])
    assert all(step.accepted == step.drafted for step in steps)
    assert all(overlap == pytest.approx(1) for step in steps for overlap in step.overlaps)


def test_a_draft_that_was_idle_catches_up() -> None:
    """C29: steps without a draft in between; the cache then lacks several committed tokens."""
    rule = context(11)

    class NowAndThen(Drafting):
        def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
            idle = len(sequences[0].steps) % 3 == 1
            return super().propose(sequences, [0 if idle else k for k in lengths])

    pipeline = pipeline_of(rule, 11, NowAndThen(rule, 11), gamma=3, max_new_tokens=25)
    tokens, steps = steps_of(pipeline, [1, 2, 3])
    assert tokens == greedy(rule, [1, 2, 3], 25)
    assert {step.drafted for step in steps} >= {0, 3}
    assert all(step.accepted == step.drafted for step in steps)


@pytest.mark.parametrize("asked", [{}, {"draw": "argmax"}, {"min_confidence": 0.5}])
@pytest.mark.parametrize("sampler", [Rejection, Block])
def test_the_output_has_exactly_the_targets_law(sampler: type, asked: dict[str, Any]) -> None:
    """Also where a draft ends because its next token is not sure enough."""
    pipeline = pipeline_of(P, V, Drafting(Q, V, **asked), gamma=2, sampler=sampler(), max_new_tokens=3, **SAMPLE)
    wanted = target_law(P, [1, 0], 3, GenerationSettings(**SAMPLE))
    assert largest_difference(output_law(pipeline, [1, 0], 3), wanted) <= 1e-12


def test_a_token_dropped_after_it_was_drawn_would_be_seen() -> None:
    """A draft that ends by what was drawn keeps only likely tokens, and q is no longer their law."""

    class Picky(Drafting):
        def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
            draft = super().propose(sequences, lengths)
            x, q = draft.row(0)
            sure = next((i for i, token in enumerate(x) if q is not None and q[i, token] < 0.5), len(x))
            return Draft(draft.tokens, [sure], draft.probs)

    pipeline = pipeline_of(P, V, Picky(Q, V), gamma=2, max_new_tokens=3, **SAMPLE)
    wanted = target_law(P, [1, 0], 3, GenerationSettings(**SAMPLE))
    assert largest_difference(output_law(pipeline, [1, 0], 3), wanted) > 1e-3


@pytest.mark.parametrize("size", [2, 5])
def test_embeddings_of_another_size_are_no_matter(size: int) -> None:
    """C18: ids the target lacks are never drafted, ids the draft lacks have no mass."""
    pipeline = pipeline_of(P, V, Drafting(table(size, seed=5, zeros=0), size), gamma=2, max_new_tokens=3, **SAMPLE)
    wanted = target_law(P, [1, 0], 3, GenerationSettings(**SAMPLE))
    assert largest_difference(output_law(pipeline, [1, 0], 3), wanted) <= 1e-12


def test_drafts_know_the_settings() -> None:
    """C16: bans and temperature of the request shape q before it is drawn from."""
    settings = {"temperature": 1.0, "banned_token_ids": [1], "top_k": 1}
    pipeline = pipeline_of(P, V, Drafting(P, V), gamma=3, max_new_tokens=12, **settings)
    tokens, steps = steps_of(pipeline, [0])
    assert 1 not in tokens
    assert all(step.accepted == step.drafted for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_batch_draft_as_they_do_alone(temperature: float) -> None:
    """C33, C37: ragged prompts, ends and acceptances; ids and seeds are those of each request alone."""
    rule, other = table(11, seed=4, zeros=0), table(11, seed=5, zeros=0)
    settings = {"temperature": temperature, "stop_token_ids": [0], "max_new_tokens": 20}
    prompts = [[1, 2, 3], [4], [5, 6], [7, 7, 7, 7, 7]]
    pipeline = pipeline_of(rule, 11, Drafting(other, 11), gamma=3, **settings)
    alone = [done.token_ids for done in pipeline.generate(prompts)]
    sequences = pipeline.sequences(prompts)
    for _ in pipeline.decode_together(sequences, 3):
        pass
    assert [sequence.new_tokens for sequence in sequences] == alone


def test_a_draft_with_the_shorter_context_falls_back_to_plain_steps_with_one_warning() -> None:
    """C27: the draft never sees a position above its last."""
    rule = context(11)
    proposer = Drafting(rule, 11, context=8)
    pipeline = pipeline_of(rule, 11, proposer, gamma=3, context=32, max_new_tokens=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens, steps = steps_of(pipeline, [1, 2, 3, 4, 5, 6])
    assert tokens == greedy(rule, [1, 2, 3, 4, 5, 6], 20)
    assert len(caught) == 1
    assert "context of 8" in str(caught[0].message)
    assert max(max(row) for call in proposer.drafter.calls for row in call.positions) == 7
    assert steps[0].drafted == 3
    assert steps[-1].drafted == 0


def test_nothing_is_drafted_behind_a_stop() -> None:
    """C21, C25."""
    pipeline = pipeline_of(chain(32), 32, Drafting(chain(32), 32), gamma=5, stop_token_ids=[6], max_new_tokens=20)
    tokens, steps = steps_of(pipeline, [3])
    assert tokens == [4, 5, 6]
    assert steps[0].drafted == 3


def test_a_model_that_is_not_sure_drafts_nothing() -> None:
    pipeline = pipeline_of(P, V, Drafting(Q, V, min_confidence=1.0), gamma=3, max_new_tokens=8, **SAMPLE)
    assert all(step.drafted == 0 for step in steps_of(pipeline, [1])[1])


@pytest.mark.parametrize("wrong", [{"draw": "best"}, {"min_confidence": 1.5}, {"min_confidence": "high"}])
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Drafting(P, V, **wrong)


# ---- a model from a directory, layers of the target ----


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    target = tiny(device="cpu")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


TINY = ("target=tiny", "target.device=cpu", "generation=sample", "generation.max_new_tokens=30")


def test_a_draft_from_a_directory_with_the_targets_weights_is_accepted_whole(directory: Path) -> None:
    pipeline = specpipe.load(*TINY, "proposer=draft", f"proposer.model={directory}", "proposer.dtype=float32")
    done = pipeline.generate("hello")[0]
    assert done.spec_decode["num_accepted_draft_tokens"] == done.spec_decode["num_draft_tokens"] > 0
    assert done.alpha == pytest.approx(1, abs=1e-4)


def test_a_draft_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^proposer\.model: "):
        specpipe.load(*TINY, "proposer=draft", f"proposer.model={tmp_path}")


def test_another_tokenizer_is_refused_by_the_first_token_that_differs() -> None:
    """C18 (c): maps are compared, not sizes."""

    class Tokens:
        def __init__(self, *tokens: str) -> None:
            self.tokens = tokens

        def get_vocab(self) -> dict[str, int]:
            return {token: i for i, token in enumerate(self.tokens)}

    refuse_other_tokenizer(Tokens("a", "b"), Tokens("a", "b"), "big", "small")
    with pytest.raises(UserError, match="small has another tokenizer than big: 'b' is 1 there and 2 here"):
        refuse_other_tokenizer(Tokens("a", "b", "c"), Tokens("a", "c", "b"), "big", "small")


def test_all_layers_are_the_target_and_fewer_are_a_draft() -> None:
    whole = specpipe.load(*TINY, "proposer=layer_skip", "proposer.layers=2")
    assert whole.generate("hello")[0].alpha == pytest.approx(1, abs=1e-4)
    part = specpipe.load(*TINY, "proposer=layer_skip", "proposer.layers=[1]")
    alpha = part.generate("hello")[0].alpha
    assert alpha is not None
    assert 0 < alpha < 0.99


def test_the_target_is_left_as_it_is() -> None:
    """Its layers are shared, not taken out."""
    target = tiny(device="cpu")
    ids = torch.tensor([[1, 2, 3]])
    before = target.model(input_ids=ids).logits
    proposer = LayerSkip(layers=1)
    proposer.bind(target)
    assert torch.equal(target.model(input_ids=ids).logits, before)
    assert len(target.model.model.layers) == 2
    assert proposer._reader.model.model.layers[0] is target.model.model.layers[0]


@pytest.mark.parametrize("layers", [0, 3, [1, 0], [], [0, 0], "all", [0, 2]])
def test_layers_that_the_target_lacks_are_refused(layers: Any) -> None:
    with pytest.raises(UserError, match="layers"):
        LayerSkip(layers=layers).bind(tiny(device="cpu"))


def test_a_draft_model_checks_its_values_before_it_loads() -> None:
    with pytest.raises(UserError, match="prepack"):
        DraftModel(model="no/such", prepack="yes")  # type: ignore[arg-type]
