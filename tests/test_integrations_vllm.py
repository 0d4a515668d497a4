"""Inside vLLM: a batch that behaves as vLLM's does asks for drafts, and gets those that the pipeline would score.

The real thing is `make test-vllm`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specpipe.chance import Chance
from specpipe.integrations import vllm
from specpipe.integrations.vllm import TO_THE_END
from specpipe.proposers import Proposer
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.suffix import SuffixProposer
from specpipe.sequence import Sequence

CONTEXT, GAMMA, EOS, SIZE = 64, 3, 2, 12


def config(eos: Any = EOS) -> Any:
    """The parts of a `VllmConfig` that are looked at."""
    generation = {} if eos is None else {"eos_token_id": eos}
    model = SimpleNamespace(
        max_model_len=CONTEXT,
        hf_config=SimpleNamespace(eos_token_id=7),
        get_vocab_size=lambda: SIZE,
        try_get_generation_config=lambda: generation,
    )
    return SimpleNamespace(model_config=model, speculative_config=SimpleNamespace(num_speculative_tokens=GAMMA))


def following(tokens: list[int]) -> int:
    """What the target says: a text that repeats itself with changes."""
    return (tokens[-1] * 3 + tokens[-2] + len(tokens) // 7) % SIZE


class Batch:
    """vLLM's batch of running requests: rows of one array, the last moved into the place of one that ends."""

    def __init__(self, drafter: vllm.HistoryProposer, prompts: list[list[int]]) -> None:
        self.drafter = drafter
        self.ids = np.zeros((len(prompts) + 2, CONTEXT), dtype=np.int32)
        self.rows: list[Row] = [Row(list(prompt)) for prompt in prompts]

    def step(self) -> list[Row]:
        """One pass, then the drafts for the next."""
        sampled = [row.say() for row in self.rows]
        for place, row in enumerate(self.rows):
            self.ids[place, : len(row.text)] = row.text
        lengths = np.array([len(row.text) for row in self.rows] + [0, 0])
        drafts = self.drafter.propose(sampled, lengths, self.ids, slot_mappings=None)
        for row, draft in zip(self.rows, drafts, strict=True):
            row.draft = draft
        return self.rows

    def end(self, place: int) -> None:
        last = self.rows.pop()
        if place < len(self.rows):
            self.rows[place] = last


@dataclass
class Row:
    """A request; `pieces` more passes read its prompt before it says anything."""

    text: list[int]
    pieces: int = 0
    draft: list[int] = field(default_factory=list)

    def say(self) -> list[int]:
        """The accepted drafts and one more token."""
        if self.pieces:
            self.pieces -= 1
            return []
        said: list[int] = []
        for x in [*self.draft, None]:
            said.append(following([*self.text, *said]))
            if x != said[-1]:
                break
        self.text += said
        return said


def alone(proposer: Proposer, text: list[int]) -> list[int]:
    """The draft behind a text that is read at once."""
    sequence = Sequence(text, TO_THE_END, stop_ids=[EOS], context=CONTEXT, chance=Chance(0))
    return proposer.propose([sequence], [sequence.room(GAMMA)]).row(0)[0]


PROMPTS = [[1, 4, 1, 5, 9], [3, 3], [8, 1, 8, 1, 8, 1, 8]]
CLASSES: dict[type, Any] = {vllm.Ngram: NgramProposer, vllm.Suffix: lambda: SuffixProposer(max_cached_tokens=0)}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_drafts_are_those_of_the_proposer_behind_each_text(kind: Any) -> None:
    """Requests end, others move into their rows, a new one comes whose prompt is read in pieces."""
    batch, drafted = Batch(kind(config()), PROMPTS), 0
    for number in range(12):
        if number == 4:
            batch.end(0)
            batch.rows.append(Row([6, 2, 6, 2, 6], pieces=2))
        for row in batch.step():
            reading = number in (4, 5) and row.text == [6, 2, 6, 2, 6]
            assert row.draft == ([] if reading else alone(CLASSES[kind](), row.text))
            drafted += len(row.draft)
    assert drafted > 20


def test_a_request_is_read_once_wherever_its_row_is() -> None:
    """It goes on with the index it has; a request that stands in the row of another does not get that one's."""
    drafter = vllm.Ngram(config())
    made: list[list[int]] = []
    new = drafter._new
    drafter._new = lambda prompt: (made.append(prompt), new(prompt))[1]  # type: ignore[method-assign]
    batch = Batch(drafter, PROMPTS)
    for number in range(8):
        if number == 3:
            batch.end(0)
        batch.step()
    assert made == PROMPTS


def test_two_requests_of_one_text_are_two() -> None:
    drafter = vllm.Ngram(config())
    batch = Batch(drafter, [[1, 4, 1], [1, 4, 1]])
    for _ in range(3):
        batch.step()
    known = [sequence for each in drafter._known.values() for sequence in each]
    assert len({id(sequence) for sequence in known}) == 2


def test_a_request_that_ended_is_forgotten() -> None:
    drafter = vllm.Ngram(config())
    batch = Batch(drafter, PROMPTS)
    batch.step()
    batch.end(1)
    batch.step()
    assert sum(map(len, drafter._known.values())) == 2


def test_no_draft_reaches_beyond_the_models_length() -> None:
    drafter = vllm.Ngram(config())
    ids = np.arange(CONTEXT, dtype=np.int32)[None] % 5
    drafted = [len(drafter.propose([[0]], [n], ids)[0]) for n in range(CONTEXT - 5, CONTEXT + 1)]
    assert drafted == [3, 3, 2, 1, 0, 0]


def test_nothing_is_drafted_behind_an_end_of_text() -> None:
    ids = np.array([[5, EOS, 8, 5]], dtype=np.int32)
    assert vllm.Ngram(config()).propose([[5]], [4], ids) == [[EOS]]
    assert vllm.Ngram(config(eos=[8, 3])).propose([[5]], [4], ids) == [[EOS, 8]]
    assert vllm.Ngram(config(eos=None)).propose([[5]], [4], ids) == [[EOS, 8, 5]]


def test_no_rows_are_no_drafts() -> None:
    assert vllm.Ngram(config()).propose([], [], np.zeros((2, CONTEXT), dtype=np.int32)) == []


def test_the_cascade_is_the_first_that_drafts() -> None:
    ids = np.array([[4, 9, 1, 6, 4], [4, 9, 4, 9, 4]], dtype=np.int32)
    suffix, ngram, cascade = (
        kind(config()).propose([[4], [4]], [5, 5], ids) for kind in (vllm.Suffix, vllm.Ngram, vllm.SuffixThenNgram)
    )
    assert cascade == [first or second for first, second in zip(suffix, ngram, strict=True)]


def test_a_class_of_ones_own_says_what_drafts() -> None:
    class Mine(vllm.HistoryProposer):
        def make(self) -> Proposer:
            return NgramProposer(min_ngram=2)

    ids = np.array([[4, 9, 1, 4]], dtype=np.int32)
    assert Mine(config()).propose([[4]], [4], ids) == [[]]
    assert vllm.Ngram(config()).propose([[4]], [4], ids) == [[9, 1, 4]]
    with pytest.raises(NotImplementedError, match="HistoryProposer does not say what drafts"):
        vllm.HistoryProposer(config())


def test_vllm_itself_is_not_needed_to_import_the_classes() -> None:
    assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules)
