"""The state that a reader hands over is the one that the newest token was drawn from, whatever the step did."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import ProposerFailed
from specpipe.pipeline import Pipeline
from specpipe.proposers.layer_skip import with_layers
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier import states
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.reader import Borrower, Reader
from specpipe.verifier.states import States
from specpipe.verifier.targets import Target
from tests.stand_ins import TableModel, ToyTokenizer, chain, own_greedy, sharpened, small

PROMPTS = [[5, 9, 5, 9, 5, 3, 2, 8, 1, 7], [4, 4], [9], [8, 7, 6, 5, 4, 3], [11, 12]]
N = 20  # new tokens


def plain_states(model: Any, ids: list[int]) -> Tensor:
    """[n, H] in front of the head, from a pass without a cache."""
    with torch.inference_mode():
        hidden: Tensor = model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return hidden


class Watching:
    """Drafts some right and some wrong tokens, or none, and looks at the state of each request before."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen = model, 0

    def attach(self, verifier: EagerVerifier) -> None:
        self.reader = verifier.reader

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        for sequence in sequences:
            self.look(sequence)
        return Draft.of([self.guess(s, k) for s, k in zip(sequences, lengths, strict=True)])

    def look(self, sequence: Sequence) -> None:
        state = self.reader.state(sequence)
        assert (state is not None) == bool(sequence.steps)
        if state is not None:
            wanted = plain_states(self.model, sequence.tokens)[-2]
            assert torch.allclose(state, wanted, atol=1e-9)
            self.seen += 1

    def guess(self, sequence: Sequence, k: int) -> list[int]:
        chance = random.Random(str(sequence.tokens))
        draft = own_greedy(self.model, sequence.tokens, chance.randint(0, k))
        place = chance.randint(0, 4)
        return [token ^ (i == place) for i, token in enumerate(draft)]


def decoded(model: Any, batch_size: int) -> tuple[Watching, list[Sequence]]:
    proposer = Watching(model)
    pipeline = Pipeline(
        verifier=EagerVerifier(Target(model, ToyTokenizer(), "model", None)),
        proposer=proposer,
        sampler=Rejection(),
        settings=GenerationSettings(max_new_tokens=N, ignore_eos=True),
        num_speculative_tokens=3,
    )
    sequences = pipeline.sequences(PROMPTS)
    for _ in pipeline.decode_together(sequences, batch_size):
        pass
    return proposer, sequences


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("Llama", 1), ("Llama", 3), ("Gemma3Text", 3), ("GPT2", 3), ("Qwen2", 5)]
)
def test_the_state_is_the_one_behind_the_newest_token(kind: str, batch_size: int) -> None:
    """After rejections at several places, full acceptance and plain steps, in batches that rows join and leave."""
    proposer, sequences = decoded(sharpened(small(kind)), batch_size)
    steps = [step for sequence in sequences for step in sequence.steps]
    kinds = {(step.drafted, step.accepted) for step in steps}
    assert kinds >= {(0, 0), (1, 1), (3, 3)}
    assert {accepted for drafted, accepted in kinds if accepted < drafted} >= {0, 1}
    assert proposer.seen == len(steps) - len(PROMPTS)


def one_place_on(kept: Any, accepted: int) -> int:
    return accepted + 1


def one_place_back(kept: Any, accepted: int) -> int:
    return accepted - 1


def of_the_last_draft(kept: Any, accepted: int) -> int:
    return -1


def of_the_pending_token(kept: Any, accepted: int) -> int:
    return 0


@pytest.mark.parametrize("place", [one_place_on, one_place_back, of_the_last_draft, of_the_pending_token])
def test_another_place_would_be_seen(monkeypatch: pytest.MonkeyPatch, place: Callable[[Any, int], int]) -> None:
    def of(self: States, sequence: Sequence) -> Tensor | None:
        kept = self._kept.get(sequence)
        return (
            None if kept is None else kept.states[place(kept, len(sequence.tokens) - 2 - kept.start) % len(kept.states)]
        )

    monkeypatch.setattr(States, "of", of)
    with pytest.raises(ProposerFailed, match="AssertionError"):
        decoded(sharpened(small("Llama")), 1)


def request(tokens: list[int]) -> Sequence:
    return Sequence(tokens, GenerationSettings(max_new_tokens=9), chance=Chance(0))


def test_there_is_none_behind_tokens_that_were_not_read() -> None:
    """Other tokens than the drafts it read, more tokens than it read, and requests it never saw."""
    model = small("Llama")
    reader = Reader(model)
    right, wrong, beyond = (request([5, 9, 4]) for _ in range(3))
    reader.read([right, wrong, beyond], Draft.of([[7, 8]] * 3))
    assert reader.state(right) is None  # of the prompt's last place it knows what comes behind it
    right.commit([7, 8, 3], 2, [])
    wrong.commit([7, 9, 3], 2, [])
    beyond.commit([7, 8, 3, 1], 2, [])
    state = reader.state(right)
    assert state is not None
    assert torch.allclose(state, plain_states(model, [5, 9, 4, 7, 8])[-1])
    assert reader.state(wrong) is reader.state(beyond) is reader.state(request([5, 9, 4, 7])) is None


def test_an_interrupted_pass_leaves_the_state_as_it_was() -> None:
    model = small("Llama")
    reader, sequence = Reader(model), request([5, 9, 4])
    reader.read([sequence], Draft.of([[]]))
    sequence.commit([7], 0, [])
    end = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reader.read([sequence], Draft.of([[1, 2]]))
    end.remove()
    state = reader.state(sequence)
    assert state is not None
    assert torch.allclose(state, plain_states(model, [5, 9, 4])[-1])
    assert not model.lm_head._forward_pre_hooks


def kept_bytes(prompt: int) -> int:
    reader, sequence = Reader(small("Llama")), request([3] * prompt)
    reader.read([sequence], Draft.of([[]]))
    sequence.commit([7], 0, [])
    state = reader.state(sequence)
    assert state is not None
    return state.untyped_storage().nbytes()


def test_a_prompts_other_states_are_not_kept_alive() -> None:
    assert kept_bytes(40) == kept_bytes(1) == 32 * 8


def test_a_view_into_a_whole_prompt_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_alone", lambda states: states)
    assert kept_bytes(40) > 32 * 8


def test_finished_requests_are_forgotten() -> None:
    reader, first, second = Reader(small("Llama")), request([5, 9]), request([4])
    reader.read([first], Draft.of([[]]))
    first.commit([7], 0, [])
    reader.read([second], Draft.of([[]]))
    assert reader.state(first) is not None  # it only rests
    first.finish_reason = "stop"
    second.commit([7], 0, [])
    reader.read([second], Draft.of([[]]))
    assert reader.state(first) is None


def test_a_borrower_keeps_the_states_of_its_own_layers() -> None:
    """Of guesses that it read and that were committed; not of guesses that were not."""
    model = sharpened(small("Llama"))
    reader, sequence = Reader(model), request([5, 9, 4])
    borrower = Borrower(with_layers(model, [0]), reader)
    reader.read([sequence], Draft.of([[]]))
    sequence.commit([7], 0, [])
    reader.roll_back([sequence])
    borrower.read([sequence], Draft.of([[8, 1]]))
    other = request([5, 9, 4, 7])
    sequence.commit([8, 3], 2, [])
    state = borrower.state(sequence)
    assert state is not None
    assert torch.allclose(state, plain_states(borrower.model, [5, 9, 4, 7, 8])[-1])
    assert borrower.state(other) is None
    sequence.tokens[-2] = 2
    assert borrower.state(sequence) is None


def test_a_model_that_names_no_head_is_read_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TableModel, "get_output_embeddings")
    reader, sequence = Reader(TableModel(chain(8), 8)), request([1, 2])
    assert reader.read([sequence], Draft.of([[]]))[0].argmax().item() == 3
    sequence.commit([3], 0, [])
    assert reader.state(sequence) is None
