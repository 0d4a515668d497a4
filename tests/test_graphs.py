"""Passes recorded and played back are the model's own, whatever the recording was made with.

On a CPU the operations of one run stand for a CUDA graph (`stand_ins.played`): the same ones over the same memory, with
the numbers that Python passed to them then.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.proposers.ngram import NgramProposer
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from specpipe.verifier import cache
from specpipe.verifier.cache import RowCache, RowLayer
from specpipe.verifier.compiled import CompiledVerifier
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.graphs import MOST, WIDTHS, Recorder, Recording, unrecorded
from specpipe.verifier.support import difference
from specpipe.verifier.targets import Target
from tests.stand_ins import TableModel, ToyTokenizer, chain, recordable, sharpened, small
from tests.test_compiled import CLOSE, KINDS, TYPES, rows_read, target_of, text

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("GPT2", {}),
    "softcapped logits, two kinds of layers": ("Gemma2", {"sliding_window": 3}),
}


@pytest.fixture(autouse=True)
def _recordable() -> Iterator[None]:
    with recordable():
        yield


def recorded(target: Target) -> CompiledVerifier:
    """Recorded, not a fallback."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verifier = CompiledVerifier(target)
    assert verifier.engine == "graphs"
    return verifier


def recordings(verifier: Any) -> dict[Any, Recording]:
    made: dict[Any, Recording] = verifier.reader.model._made
    return made


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_target_reads_as_the_plain_one(kind: str, dtype: str) -> None:
    verifier = recorded(target_of(kind, dtype))
    plain = rows_read(EagerVerifier(target_of(kind, dtype), prepack=False, fuse=False))
    assert max(itertools.starmap(differences, zip(rows_read(verifier), plain, strict=True))) < CLOSE[dtype]
    assert {width for _, width, _ in recordings(verifier)} == {1, 4, 8}


@pytest.mark.parametrize("kind", OTHERS)
def test_so_do_models_whose_layers_are_not_known(kind: str) -> None:
    name, config = OTHERS[kind]
    ours, theirs = (Target(sharpened(small(name, **config)), ToyTokenizer(), kind, None) for _ in range(2))
    plain = rows_read(EagerVerifier(theirs, prepack=False, fuse=False))
    verifier = recorded(ours)
    assert max(itertools.starmap(differences, zip(rows_read(verifier), plain, strict=True))) < 1e-6
    assert recordings(verifier)


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return max(map(difference, ours, theirs))


def frozen_positions(self: Recording, ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
    self.ids[:, : ids.shape[1]] = ids
    self.replay()
    return self.logits, self.states


def frozen_ids(self: Recording, ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
    self.position_ids[:, : ids.shape[1]] = position_ids
    self.replay()
    return self.logits, self.states


def frozen_lengths(self: RowCache, positions: torch.Tensor, end: int) -> Any:
    end = max(self.lengths[row] for row in self.rows) + positions.shape[1]
    return self._row_layers[0].place._replace(end=end)


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (Recording, "play", frozen_positions),
        (Recording, "play", frozen_ids),
        (RowCache, "place_within", frozen_lengths),
    ],
)
def test_what_a_recording_froze_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, wrong: Any
) -> None:
    """Angles, tokens or places of the pass that it was made with."""
    plain = rows_read(EagerVerifier(target_of(), prepack=False, fuse=False))
    verifier = recorded(target_of())
    monkeypatch.setattr(where, name, wrong)
    assert max(itertools.starmap(differences, zip(rows_read(verifier), plain, strict=True))) > 0.01


def pipeline_of(verifier: Any, tokens: int = 40) -> Pipeline:
    return Pipeline(
        verifier=verifier,
        proposer=NgramProposer(),
        sampler=Rejection(),
        settings=GenerationSettings(max_new_tokens=tokens),
        num_speculative_tokens=5,
    )


def test_recordings_are_made_anew_where_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """C29: also up to the end of the context."""
    monkeypatch.setattr(cache, "SMALLEST", 8)
    verifier, plain = recorded(target_of()), EagerVerifier(target_of())
    ours, theirs = (pipeline_of(each, 99).generate([[1, 2, 3, 1, 2]])[0] for each in (verifier, plain))
    assert ours.token_ids == theirs.token_ids
    assert ours.finish_reason == "context"
    assert len(verifier.reader.cache._row_layers[0].keys[0, 0]) >= 64


def alone_beside_and_alone(verifier: Any) -> list[torch.Tensor]:
    """Logits of a text whose row moves in memory when a second one is seated."""
    one, two = text([1, 2, 3]), text([4, 5])
    seen = []
    for together in ([one], [one], [one, two], [one], [one]):
        seen.append(verifier.score(together, Draft.of([[] for _ in together], verifier.device))[0])
        for each in together:
            each.commit([7], 0, [])
    return seen


def test_recordings_are_made_anew_where_rows_move() -> None:
    ours, theirs = alone_beside_and_alone(recorded(target_of())), alone_beside_and_alone(EagerVerifier(target_of()))
    assert max(itertools.starmap(differences, zip(ours, theirs, strict=True))) < CLOSE["float32"]


def test_a_recording_over_memory_that_was_left_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "memory", lambda self: ())
    ours, theirs = alone_beside_and_alone(recorded(target_of())), alone_beside_and_alone(EagerVerifier(target_of()))
    assert max(itertools.starmap(differences, zip(ours, theirs, strict=True))) > 0.01


def test_logits_do_not_depend_on_what_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: neither on the first pass of all, which allocates, nor on longer texts with a larger cache."""
    monkeypatch.setattr(cache, "SMALLEST", 8)
    verifier = recorded(target_of())
    first, again = alone_beside_and_alone(verifier), alone_beside_and_alone(verifier)
    pipeline_of(verifier, 50).generate([[1, 2, 3, 1, 2]])
    then = alone_beside_and_alone(verifier)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, then))


def test_requests_that_come_and_go_leave_recordings_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are moved where they are: with four at most there is one recording for each width and number of rows."""
    made = []
    record = Recorder.__call__

    def counted(self: Recorder, run: Any, device: torch.device) -> Any:
        made.append(run)
        return record(self, run, device)

    monkeypatch.setattr(Recorder, "__call__", counted)
    verifier, plain = recorded(target_of()), EagerVerifier(target_of())
    prompts = [[n, 2, 3, n, 2][: 1 + n % 5] for n in range(1, 20)]
    made.clear()
    wanted = [done.token_ids for done in pipeline_of(plain, 12).generate(prompts)]
    pipeline = pipeline_of(verifier, 12)
    sequences = pipeline.sequences(prompts)
    for _ in pipeline.decode_together(sequences, 4):
        pass
    assert [sequence.new_tokens for sequence in sequences] == wanted
    keys = set(recordings(verifier))
    assert len(made) <= 3 * len(keys)
    assert len(keys) <= MOST


def test_there_are_no_more_recordings_than_stated() -> None:
    verifier = recorded(target_of())
    texts = [text([n + 1]) for n in range(6)]
    none = Draft.of([[]], verifier.device)
    verifier.score(texts, Draft.of([[]] * 6, verifier.device))
    for each in texts:
        each.commit([5], 0, [])
    for width in (1, 2, 3, 5, 9):
        for each in texts:  # each row by itself
            verifier.score([each], Draft.of([[1] * (width - 1)], verifier.device) if width > 1 else none)
            verifier.roll_back([each])
    assert len(recordings(verifier)) == MOST
    assert {width for _, width, _ in recordings(verifier)} <= set(WIDTHS)


def test_a_pass_that_looks_at_a_number_is_the_models_own_and_it_is_said_once() -> None:
    """A table in Python: tried at load, so the engine that runs is named."""
    target = Target(TableModel(chain(8), 8), ToyTokenizer(), "table", None)
    with pytest.warns(UserWarning, match="is not compiled, which would be faster") as said:
        verifier = CompiledVerifier(target)
    assert len(said) == 1
    assert verifier.engine == "eager"
    assert pipeline_of(verifier, 5).generate([[1]])[0].token_ids == [2, 3, 4, 5, 6]


def test_so_it_is_where_it_shows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, plain = recorded(target_of()), EagerVerifier(target_of())
    monkeypatch.setattr(Recorder, "__call__", fails)
    with pytest.warns(UserWarning, match="not recorded in CUDA graphs, which would be faster: no memory") as said:
        ours = pipeline_of(verifier).generate([[1, 2, 3, 1, 2]])[0]
    assert len(said) == 1
    assert ours.token_ids == pipeline_of(plain).generate([[1, 2, 3, 1, 2]])[0].token_ids


def fails(self: Recorder, run: Any, device: torch.device) -> Any:
    run()
    raise RuntimeError("no memory")


def test_a_target_that_is_recorded_wrongly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "play", frozen_ids)
    with pytest.warns(UserWarning, match="does not reproduce its own logits"):
        verifier = CompiledVerifier(target_of())
    assert verifier.engine == "packed"


def test_a_row_keeps_its_place_in_memory_as_long_as_there_is_room() -> None:
    layer, holder = RowLayer(), RowCache(1, rows=3)
    holder._row_layers[0] = layer
    holder.place(2, torch.device("cpu"), [0, 1, 2])
    new = torch.arange(6.0).view(3, 1, 2, 1).expand(3, 1, 2, 4)
    layer.update(new, new)
    before = holder.memory()
    layer.rearrange([2, None])
    layer.rearrange([1, None, 0])
    assert holder.memory() == before
    assert layer.keys is not None
    assert layer.keys[2, 0, :2, 0].tolist() == [4, 5]
    layer.rearrange([2, 2, None, None])
    assert layer.keys[1, 0, :2, 0].tolist() == [4, 5]
    assert layer.keys.shape[0] == 4


def test_recordings_of_memory_of_another_shape_are_not_played() -> None:
    """Behind `forget` the same bytes may come back for fewer rows with more places."""
    verifier, plain = recorded(target_of()), EagerVerifier(target_of())
    texts = [[n, 2, 3, 4] for n in range(4)]
    for number in (4, 2):
        ours, theirs = ([text(ids) for ids in texts[:number]] for _ in range(2))
        for _ in range(3):
            draft = Draft.of([[]] * number, verifier.device)
            for a, b in zip(verifier.score(ours, draft), plain.score(theirs, draft), strict=True):
                assert differences(a, b) < CLOSE["float32"]
            for each in (*ours, *theirs):
                each.commit([7], 0, [])
        verifier.forget()
        assert not recordings(verifier)


def test_shapes_are_part_of_what_a_recording_is_of() -> None:
    new = torch.zeros(2, 1, 4, 8)
    holders = [RowCache(1, rows=rows) for rows in (2, 1)]
    for holder, rows in zip(holders, ([0, 1], [0]), strict=True):
        holder.place(4, torch.device("cpu"), rows)
        holder._row_layers[0].update(new[: len(rows)], new[: len(rows)])
    one, other = holders
    assert one._row_layers[0].keys is not None
    other._row_layers[0].keys = other._row_layers[0].values = one._row_layers[0].keys.view(1, 1, -1, 8)
    one._row_layers[0].values = one._row_layers[0].keys
    assert one.memory() != other.memory()


def test_some_of_the_targets_layers_are_recorded_too() -> None:
    """Others than the first have a cache of their own, in which the rest of the layers hold nothing."""
    from specpipe.proposers.layer_skip import LayerSkip

    pipeline = Pipeline(
        verifier=recorded(target_of()),
        proposer=LayerSkip(layers=[1]),
        sampler=Rejection(),
        settings=GenerationSettings(max_new_tokens=20),
        num_speculative_tokens=3,
    )
    pipeline.generate([[1, 2, 3]])
    assert pipeline.proposer._reader.model._made  # type: ignore[attr-defined]


def test_a_model_on_two_devices_is_not_recorded() -> None:
    model = small("Llama")
    model.lm_head.to("meta")
    assert unrecorded(model) == "it is on 2 devices"
    assert unrecorded(small("Llama")) == "it is on cpu"


def test_passes_of_a_fixed_width_reach_over_as_many_places_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the prompt: plain and speculative decoding would see a larger cache at different tokens."""
    monkeypatch.setattr(cache, "SMALLEST", 8)
    verifier = CompiledVerifier(target_of(), width="fixed")
    places, play = set(), Recording.play

    def watched(self: Recording, *given: torch.Tensor) -> Any:
        places.add(self.place.end)
        return play(self, *given)

    monkeypatch.setattr(Recording, "play", watched)
    pipeline = pipeline_of(verifier, 20)  # 3 + 20 + 6 = 29
    places.clear()
    pipeline.generate([[1, 2, 3]])
    assert places == {32}
