"""Models that draft: their cache follows what was committed, and q is the law each draft came from."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specpipe
from specpipe.audit.exact import largest_difference, output_law, target_law
from specpipe.audit.tables import Rule, table
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.draft import DraftModel
from specpipe.proposers.model import ModelProposer
from specpipe.samplers.block import Block
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.targets import tiny
from tests.stand_ins import TableModel, chain, constant, context, greedy, pipeline_of, saved_tiny

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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_ends_where_the_models_own_best_token_is_not_likely_enough(temperature: float) -> None:
    """At temperature 0 too, where the law under the settings is certain of everything."""
    sure, unsure = (constant([0.9, 0.05, 0.05]), constant([0.4, 0.3, 0.3]))
    for rule, drafted in ((sure, 3), (unsure, 0)):
        proposer = Drafting(rule, V, min_confidence=0.6)
        pipeline = pipeline_of(P, V, proposer, gamma=3, max_new_tokens=8, temperature=temperature)
        assert steps_of(pipeline, [1])[1][0].drafted == drafted


@pytest.mark.parametrize("wrong", [{"draw": "best"}, {"min_confidence": 1.5}, {"min_confidence": "high"}])
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Drafting(P, V, **wrong)


def test_accepted_guesses_are_not_read_again() -> None:
    """Behind a block that was kept whole, its last guess and the bonus token are all that is new."""
    rule = context(11)
    proposer = Drafting(rule, 11)
    steps_of(pipeline_of(rule, 11, proposer, gamma=3, max_new_tokens=12), [1, 2, 3])
    assert [len(call.ids[0]) for call in proposer.drafter.calls] == [3, 1, 1, 2, 1, 1, 2, 1, 1]


# ---- behind tokens that are not committed ----


def alone(rule: Rule, tokens: list[int]) -> list[float]:
    """The law of the first draft behind `tokens`, by a model that has read nothing else."""
    return laws_of(bound(rule), [request(tokens)], [[]], [1])[0][0]


def bound(rule: Rule) -> Drafting:
    proposer = Drafting(rule, 11)
    proposer.bind(SimpleNamespace(vocabulary=11))
    return proposer


def request(tokens: list[int], **asked: Any) -> Sequence:
    return Sequence(tokens, GenerationSettings(temperature=1.0, **asked), stop_ids=[10], chance=Chance(0))


def laws_of(
    proposer: ModelProposer, sequences: list[Sequence], given: list[list[int]], lengths: list[int]
) -> list[list[list[float]]]:
    draft = proposer.extend(sequences, given, lengths)
    assert draft.lengths == [k if 10 not in x else 0 for x, k in zip(given, lengths, strict=True)]
    return [[] if q is None else q.tolist() for _, q in (draft.row(b) for b in range(len(sequences)))]


@pytest.fixture
def endless() -> Rule:
    """Table laws that never draw the stop id, 10."""
    rule = table(11, seed=2, zeros=0)
    return lambda ids: rule(ids).index_fill(0, torch.tensor(10), -torch.inf)


def test_guesses_of_a_step_that_others_finished_are_forgotten(endless: Rule) -> None:
    """A cascade asks another member in between: by then the text is longer than what the model had guessed."""
    proposer, sequence = bound(endless), request([1, 2, 3])
    drafted = proposer.propose([sequence], [3]).tokens[0].tolist()
    wrong = [(token + 1) % 10 for token in drafted]
    sequence.commit([*wrong, 4, 5], 0, [])
    assert laws_of(proposer, [sequence], [[]], [2])[0][0] == alone(endless, sequence.tokens)


def test_extending_is_proposing_behind_tokens_as_if_they_were_committed(endless: Rule) -> None:
    """Ragged rows, one of which has ended; what was given is forgotten with the next read, accepted or not."""
    proposer = bound(endless)
    sequences, given, lengths = (
        [request(x) for x in ([1, 2], [3], [4, 5, 6], [7])],
        [[8, 9], [], [1], [2, 10]],
        [3, 2, 1, 4],
    )
    laws = laws_of(proposer, sequences, given, lengths)
    for sequence, x, law in zip(sequences, given, laws, strict=True):
        assert law == [] if 10 in x else law[0] == alone(endless, [*sequence.tokens, *x])
    sequences[0].commit([8, 3], 2, [])
    again = laws_of(proposer, sequences, [[], [4, 4], [], []], [1, 1, 1, 1])
    assert again == [[alone(endless, tokens)] for tokens in ([1, 2, 8, 3], [3, 4, 4], [4, 5, 6], [7])]


def test_extending_sees_the_given_tokens_in_the_settings(endless: Rule) -> None:
    proposer = bound(endless)
    settings = {"frequency_penalty": 1e9}
    draft = proposer.extend([request([1], **settings)], [[2, 3]], [1])
    assert draft.probs is not None
    assert (draft.probs[0, 0, [2, 3]] == 0).all()


def test_extending_leaves_room_for_the_given_tokens() -> None:
    rule = context(11)
    proposer = Drafting(rule, 11, context=8)
    proposer.bind(SimpleNamespace(vocabulary=11))
    assert proposer.extend([request([1, 2, 3, 4])], [[5, 6]], [9]).lengths == [3]
    assert proposer.extend([request([1, 2, 3, 4])], [[5, 6, 7, 8, 9]], [9]).lengths == [0]


# ---- a model from a directory ----


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tiny(tmp_path_factory.mktemp("draft"))


TINY = ("target=tiny", "target.device=cpu", "generation=sample", "generation.max_new_tokens=30")


def test_a_draft_from_a_directory_with_the_targets_weights_is_accepted_whole(directory: Path) -> None:
    pipeline = specpipe.load(*TINY, "proposer=draft", f"proposer.model={directory}", "proposer.dtype=float32")
    done = pipeline.generate("hello")[0]
    assert done.spec_decode["num_accepted_draft_tokens"] == done.spec_decode["num_draft_tokens"] > 0
    assert done.alpha == pytest.approx(1, abs=1e-4)


def test_a_draft_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^proposer\.model: "):
        specpipe.load(*TINY, "proposer=draft", f"proposer.model={tmp_path}")


def test_a_draft_with_broken_weights_is_refused_as_a_target_is(tmp_path: Path) -> None:
    model, tokenizer = tiny_parts()
    model.model.norm.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^proposer\.model: .* gives logits that are not numbers"):
        specpipe.load(*TINY, "proposer=draft", f"proposer.model={tmp_path}")


def test_a_draft_that_cannot_read_all_ids_of_its_tokenizer_is_refused(tmp_path: Path) -> None:
    model, tokenizer = tiny_parts()
    model.resize_token_embeddings(200)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^proposer\.model: the ids of its tokenizer go up to \d+, .* to 199:"):
        specpipe.load(*TINY, "proposer=draft", f"proposer.model={tmp_path}")


def tiny_parts() -> tuple[Any, Any]:
    """Model and tokenizer of the target `tiny`."""
    target = tiny(device="cpu")
    return target.model, target.tokenizer


def test_a_draft_model_checks_its_values_before_it_loads() -> None:
    with pytest.raises(UserError, match="min_confidence"):
        DraftModel(model="no/such", min_confidence="high")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"quantize": "int4"}, {"quantize": "int8", "dtype": "float32"}])
def test_weights_in_eight_bits_that_do_not_work_are_refused_before_anything_is_loaded(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="quantize: "):
        DraftModel(model="no/such", **wrong)


def test_weights_in_eight_bits_are_refused_on_another_device() -> None:
    target = SimpleNamespace(model=torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(UserError, match=r"^quantize: int8 weights work on a CPU, and the target is on meta"):
        DraftModel(model="no/such", quantize="int8").bind(target)  # type: ignore[arg-type]


def test_a_draft_in_eight_bits_is_close_to_the_target_and_drawn_from_its_own_law(directory: Path) -> None:
    asked = (*TINY, "proposer=draft", f"proposer.model={directory}")
    pipeline = specpipe.load(*asked, "proposer.quantize=int8")
    kinds = [type(part).__name__ for part in pipeline.proposer._reader.model.modules()]  # type: ignore[attr-defined]
    assert kinds.count("Int8Linear") == 8  # two layers of four products
    done, full = pipeline.generate("hello")[0], specpipe.load(*asked).generate("hello")[0]
    assert done.alpha is not None
    assert full.alpha is not None
    assert 0.9 < done.alpha < full.alpha <= 1
