"""verifier.width=fixed: a token is read in the same shapes whatever is drafted, so it has the same logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from specpipe.audit.tables import FixedProposer
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.none import NoProposer
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from specpipe.verifier import eager
from specpipe.verifier.compiled import CompiledVerifier
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.support import same_bits
from specpipe.verifier.targets import Target
from tests.stand_ins import TableModel, ToyTokenizer, context, recordable
from tests.test_compiled import target_of, text

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 1, 2, 3, 4, 5, 6]]


def pipeline_of(verifier: Any, proposer: Any, gamma: int = 3) -> Pipeline:
    return Pipeline(
        verifier=verifier,
        proposer=proposer,
        sampler=Rejection(),
        settings=GenerationSettings(max_new_tokens=12),
        num_speculative_tokens=gamma,
    )


def wrong_now_and_then(tokens: list[int], k: int) -> list[int]:
    right = [(1 + sum(tokens)) % 11]
    for _ in range(k - 1):
        right.append((2 * right[-1]) % 11)
    return right[: 1 + len(tokens) % 3]


def shapes(width: str, proposer: Any, size: int = 1) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """What was decoded, and rows and width of each pass that did so."""
    model = TableModel(context(11), 11)
    verifier = EagerVerifier(Target(model, ToyTokenizer(), "table", None), width=width)
    pipeline = pipeline_of(verifier, proposer)
    model.calls.clear()
    sequences = pipeline.sequences(PROMPTS)
    for _ in pipeline.decode_together(sequences, size):
        pass
    return [each.new_tokens for each in sequences], [(len(call.ids), len(call.ids[0])) for call in model.calls]


def test_every_pass_behind_a_prompt_has_one_shape_drafts_or_none() -> None:
    plain, without = shapes("fixed", NoProposer())
    drafted, with_drafts = shapes("fixed", FixedProposer(wrong_now_and_then))
    assert plain == drafted == shapes("free", NoProposer())[0]
    assert len(with_drafts) < len(without)
    read = [(1, len(prompt) - 1) for prompt in PROMPTS if len(prompt) > 1]  # but the last token
    for each in (without, with_drafts):
        assert [shape for shape in each if shape != (1, 4)] == read


def test_free_passes_are_as_wide_as_their_drafts() -> None:
    assert {width for _, width in shapes("free", FixedProposer(wrong_now_and_then))[1]} > {2, 3}


def test_a_ragged_batch_decodes_what_its_requests_decode_alone() -> None:
    alone, _ = shapes("fixed", FixedProposer(wrong_now_and_then))
    together, passes = shapes("fixed", FixedProposer(wrong_now_and_then), 3)
    assert together == alone
    assert {width for rows, width in passes if rows == 3} == {4}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_or_it_is_said_that_it_has_not(dtype: str) -> None:
    """Kernels are the machine's, so nothing can be promised, but it can be tried."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        verifier = EagerVerifier(target_of(dtype=dtype), width="fixed")
        verifier.expect(5)
    ids = [(7 * i * i + 3) % 60 for i in range(60)]
    plain, drafted = text(ids[:45]), text(ids[:45])
    rows, one_by_one = [], []
    for start in range(45, 57, 6):
        rows += verifier.score([drafted], Draft.of([ids[start : start + 5]], verifier.device))[0]
        drafted.commit(ids[start : start + 6], 5, [])
        verifier.roll_back([drafted])
    for token in ids[45:57]:
        one_by_one += verifier.score([plain], Draft.of([[]], verifier.device))[0]
        plain.commit([token], 0, [])
        verifier.roll_back([plain])
    assert said or all(map(torch.equal, rows, one_by_one))


def test_numbers_that_depend_on_what_shares_a_pass_are_seen() -> None:
    """The wrong variant: free passes."""
    assert not same_bits(EagerVerifier(target_of()).reader, 5)


def test_and_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer drafts are tried anew, shorter ones are not."""
    tried: list[int] = []
    monkeypatch.setattr(eager, "same_bits", lambda reader, drafted: tried.append(drafted))
    verifier = EagerVerifier(target_of(), width="fixed")
    with pytest.warns(UserWarning, match="logits depend on drafts in passes of a fixed width too"):
        verifier.expect(5)
    verifier.expect(3)
    verifier.expect(5)
    assert tried == [5]


def test_a_recorded_target_has_one_recording_behind_prompts() -> None:
    with recordable():
        verifier = CompiledVerifier(target_of(), width="fixed")
        free = CompiledVerifier(target_of())
        texts = [
            pipeline_of(each, proposer, 5).generate(PROMPTS[0:1])[0].token_ids
            for each in (verifier, free)
            for proposer in (NoProposer(), FixedProposer(wrong_now_and_then))
        ]
        assert all(each == texts[0] for each in texts)
        assert {width for _, width, _ in verifier.reader.model._made} == {2, 8}  # 2: of the prompt, but its last token
        assert {width for _, width, _ in free.reader.model._made} > {1, 2}


def test_the_compiled_program_needs_no_padding() -> None:
    verifier = CompiledVerifier(target_of(), width="fixed")
    verifier.expect(5)
    assert verifier.engine == "compiled"
    assert verifier.reader.width is None


def test_an_unknown_width_is_refused() -> None:
    with pytest.raises(UserError, match="'wide' is not one of free, fixed"):
        EagerVerifier(target_of(), width="wide")
