"""The target's own layers as a draft: the same drafts from the target's cache as from one of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import specpipe
from specpipe.errors import ProposerFailed, UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.layer_skip import LayerSkip, with_layers
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.cache import RowCache
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.reader import Borrower
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import Compared, ToyTokenizer, own_greedy, sharpened, small, uncached

TINY = ("target=tiny", "target.device=cpu", "generation=sample", "generation.max_new_tokens=30")
WINDOWS = {
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {"Llama": {}, "Gemma3Text": WINDOWS}
N = 9  # new tokens
PROMPTS = [[5, 9, 5, 9, 5, 3, 2, 8, 1, 7], [4, 4], [9, 8, 7, 6, 5, 4, 3]]


def four_layers(kind: str = "Llama") -> Any:
    return sharpened(small(kind, num_hidden_layers=4, **MODELS[kind]))


def pipeline_of(proposer: Any, model: Any, **settings: Any) -> Pipeline:
    return Pipeline(
        verifier=EagerVerifier(Target(model, ToyTokenizer(), "model", None)),
        proposer=proposer,
        sampler=Rejection(),
        settings=GenerationSettings(**{"max_new_tokens": N, "ignore_eos": True} | settings),
        num_speculative_tokens=4,
    )


def test_all_layers_are_the_target_and_fewer_are_a_draft() -> None:
    whole = specpipe.load(*TINY, "proposer=layer_skip", "proposer.layers=2")
    assert whole.generate("hello")[0].alpha == pytest.approx(1, abs=1e-4)
    part = specpipe.load(*TINY, "proposer=layer_skip", "proposer.layers=[1]")
    alpha = part.generate("hello")[0].alpha
    assert alpha is not None
    assert 0 < alpha < 0.99


@pytest.mark.parametrize("layers", [0, 3, [1, 0], [], [0, 0], "all", [0, 2]])
def test_layers_that_the_target_lacks_are_refused(layers: Any) -> None:
    with pytest.raises(UserError, match="layers"):
        LayerSkip(layers=layers).bind(tiny(device="cpu"))


@pytest.mark.parametrize(("kind", "layers"), [("Llama", [0, 1]), ("Gemma3Text", [1, 3]), ("Gemma3Text", [0, 3])])
def test_some_layers_are_the_model_that_has_only_those(kind: str, layers: list[int]) -> None:
    """Each with the mask and the rotation of its own kind; the target is left as it is."""
    model, config = four_layers(kind), dict(MODELS[kind])
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][i] for i in layers]
    alone = small(kind, num_hidden_layers=2, **config)
    alone.load_state_dict(model.state_dict(), strict=False)
    for layer, number in zip(alone.model.layers, layers, strict=True):
        layer.load_state_dict(model.model.layers[number].state_dict())
    before = uncached(model, PROMPTS[0])
    short = with_layers(model, layers)
    assert torch.allclose(uncached(short, PROMPTS[0]), uncached(alone, PROMPTS[0]), atol=1e-12)
    assert torch.equal(uncached(model, PROMPTS[0]), before)
    assert len(model.model.layers) == model.config.num_hidden_layers == 4
    assert short.model.layers[0] is model.model.layers[layers[0]]


# ---- in the target's cache ----


@pytest.mark.parametrize(
    ("kind", "batch_size", "temperature"),
    [("Llama", 1, 1.0), ("Llama", 2, 0.0), ("Gemma3Text", 1, 0.0), ("Gemma3Text", 2, 1.0)],
)
def test_the_targets_cache_gives_the_drafts_that_an_own_one_gives(
    kind: str, batch_size: int, temperature: float
) -> None:
    """Prompts of several lengths, rows that come and go; greedy ids are the target's own."""
    model, proposer = four_layers(kind), Compared(lambda: LayerSkip(layers=2))
    pipeline = pipeline_of(proposer, model, temperature=temperature)
    sequences = pipeline.sequences(PROMPTS)
    for _ in pipeline.decode_together(sequences, batch_size):
        pass
    assert proposer.drafted > 20
    if temperature == 0:
        assert [s.new_tokens for s in sequences] == [own_greedy(model, prompt, N) for prompt in PROMPTS]


def test_other_layers_in_the_targets_cache_would_be_seen() -> None:
    """Behind a gap a layer sees other inputs than it does in the target, and needs other keys."""

    class Reckless(LayerSkip):
        def attach(self, verifier: EagerVerifier) -> None:
            self._reader = Borrower(self._reader.model, verifier.reader)

    proposer = Compared(lambda: LayerSkip(layers=[0, 2]))
    proposer.sharing = Reckless(layers=[0, 2])
    with pytest.raises(ProposerFailed, match="AssertionError"):
        pipeline_of(proposer, four_layers(), temperature=1.0).generate(PROMPTS)


def test_the_prompt_is_read_once_and_a_draft_reads_one_token_a_pass() -> None:
    """Nothing is drafted until the target has read it."""
    model, proposer = four_layers(), LayerSkip(layers=2)
    pipeline = pipeline_of(proposer, model)
    first_layer, last_layer = model.model.layers[0], model.model.layers[3]
    widths: dict[Any, list[int]] = {first_layer: [], last_layer: []}
    for layer in widths:
        layer.register_forward_pre_hook(lambda layer, given: widths[layer].append(given[0].shape[1]))
    [sequence] = pipeline.sequences([PROMPTS[0]])
    steps = list(pipeline.decode(sequence))
    assert steps[0].drafted == 0
    assert all(step.drafted == min(4, step.asked) for step in steps[1:])
    assert widths[last_layer] == [len(PROMPTS[0]), *[step.drafted + 1 for step in steps[1:]]]
    of_drafts = sorted(widths[first_layer])
    for width in widths[last_layer]:
        of_drafts.remove(width)
    assert of_drafts == [1] * sum(step.drafted for step in steps)


def committed(pipeline: Pipeline, sequences: list[Sequence]) -> list[Any]:
    """What the target's cache holds of each sequence: lengths, then keys and values up to them, of every layer."""
    cache = pipeline.verifier.reader.cache
    entries = [
        kept[row, :, :length].clone()
        for row, length in enumerate(cache.lengths)
        for layer in cache.layers
        for kept in (layer.keys, layer.values)
    ]
    assert sorted(cache.lengths) == sorted(len(s.tokens) - 1 for s in sequences)
    return [list(cache.lengths), *entries]


def same(a: list[Any], b: list[Any]) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))


def fails_at(layer: Any, calls: int) -> Callable[[], None]:
    """Have the layer raise at its n-th call; returns what ends that."""
    left = [calls]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    return layer.register_forward_pre_hook(hook).remove


@pytest.mark.parametrize(("batch", "call"), [(1, 2), (3, 1), (3, 3), (3, None)])
def test_drafting_leaves_the_targets_rows_as_they_are_even_if_it_is_interrupted(batch: int, call: int | None) -> None:
    """Between two layers, before anything was read, and while drafting; decoding goes on as if nothing had been."""
    model = four_layers()
    pipeline = pipeline_of(LayerSkip(layers=2), model)
    sequences = pipeline.sequences(PROMPTS[:batch])
    while live := [s for s in sequences if s.finish_reason is None]:
        if all(s.steps and s.room(4) >= 3 for s in sequences):
            before = committed(pipeline, sequences)
            if call is None:
                pipeline.proposer.propose(sequences, [4] * batch)
            else:
                end = fails_at(model.model.layers[1], call)
                with pytest.raises(KeyboardInterrupt):
                    pipeline.step(sequences)
                end()
            assert same(committed(pipeline, sequences), before)
        pipeline.step(live)
    assert [s.new_tokens for s in sequences] == [own_greedy(model, prompt, N) for prompt in PROMPTS[:batch]]


def test_lengths_in_common_with_the_target_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "twin", lambda cache: cache)
    pipeline = pipeline_of(LayerSkip(layers=2), four_layers())
    sequences = pipeline.sequences(PROMPTS)
    pipeline.step(sequences)
    before = committed(pipeline, sequences)
    pipeline.proposer.propose(sequences, [4] * 3)
    with pytest.raises(AssertionError):
        assert same(committed(pipeline, sequences), before)


def test_an_interrupted_target_is_not_taken_for_one_that_has_read() -> None:
    """Ctrl-C while the target reads the prompt: its row is there, and empty."""
    model = four_layers()
    pipeline = pipeline_of(LayerSkip(layers=2), model)
    [sequence] = pipeline.sequences([PROMPTS[0]])
    end = fails_at(model.model.layers[3], 1)
    with pytest.raises(KeyboardInterrupt):
        pipeline.step([sequence])
    end()
    assert pipeline.step([sequence])[0].drafted == 0
    assert pipeline.step([sequence])[0].drafted == 4
    list(pipeline.decode(sequence))
    assert sequence.new_tokens == own_greedy(model, PROMPTS[0], N)


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_layers_that_are_not_the_first_read_for_themselves(layers: list[int]) -> None:
    """What they need is nowhere in the target's cache, so they draft from the first step on."""
    model = four_layers()
    pipeline = pipeline_of(LayerSkip(layers=layers), model)
    [sequence] = pipeline.sequences([PROMPTS[0]])
    assert [step.drafted for step in pipeline.decode(sequence)][:2] == [4, 4]
    assert sequence.new_tokens == own_greedy(model, PROMPTS[0], N)


def test_without_a_verifier_they_draft_for_any_request() -> None:
    """As the audit's second proposer does, whose requests nobody decodes."""
    pipeline = pipeline_of(LayerSkip(layers=2), four_layers())
    second = LayerSkip(layers=2)
    second.bind(pipeline.verifier.target)
    sequences = pipeline.sequences(PROMPTS)
    assert second.propose(sequences, [4, 4, 4]).lengths == [4, 4, 4]
    assert pipeline.proposer.propose(sequences, [4, 4, 4]).lengths == [0, 0, 0]
