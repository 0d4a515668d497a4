"""Sliding windows: every layer sees what its window reaches, whatever was drafted, rejected or padded around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from specpipe.audit.reading import Answer, logits_of
from specpipe.audit.tables import FixedProposer, Rule
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from specpipe.verifier.cache import RowCache
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.support import plain_logits, rehearse
from specpipe.verifier.targets import Target
from specpipe.verifier.windows import LookBack, short_window
from tests.stand_ins import (
    TableModel,
    ToyTokenizer,
    context,
    greedy,
    own_greedy,
    right_but_at,
    sharpened,
    small,
    uncached,
    window,
)

# ---- a table model that knows no more of its window than the mask tells ----

ANCHORS = [
    ([1, 2, 3, 4, 5, 6], [0, 0, 0, 10, 7, 0, 7, 9, 1, 2, 4, 8, 6, 5, 10, 2, 6, 0, 9, 3]),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2], [5, 5, 4, 1, 5, 1, 3, 5, 8, 0, 6, 8, 4, 3, 5, 7, 9, 10, 9, 1]),
]


class Windowed(TableModel):
    """Applies its rule to the ids that it sees, so `context` becomes `window` if the masks are right."""

    def __init__(self, rule: Rule, size: int, width: int) -> None:
        super().__init__(rule, size)
        self.config.sliding_window = width

    def _visible(self, seen: Tensor, mask: Tensor, b: int, cached: bool) -> list[int]:
        if not cached:
            return super()._visible(seen, mask, b, cached)[-self.config.sliding_window :]
        ids, positions = seen[b, 0, mask].long().T.tolist()
        assert positions == list(range(positions[0], positions[-1] + 1)), "a position is missing or out of place"
        return ids


def pipeline_of(model: Any, proposer: Any, n: int) -> Pipeline:
    return Pipeline(
        verifier=EagerVerifier(Target(model, ToyTokenizer(), "model", None)),
        proposer=proposer,
        sampler=Rejection(),
        settings=GenerationSettings(max_new_tokens=n, ignore_eos=True),
        num_speculative_tokens=4,
    )


def together(pipeline: Pipeline, prompts: list[list[int]]) -> list[list[int]]:
    sequences = pipeline.sequences(prompts)
    for _ in pipeline.decode_together(sequences, len(prompts)):
        pass
    return [sequence.new_tokens for sequence in sequences]


@pytest.mark.parametrize(("prompt", "wanted"), ANCHORS)
@pytest.mark.parametrize("place", range(4))
def test_rejections_around_the_border_of_a_window_lose_nothing(
    prompt: list[int], wanted: list[int], place: int
) -> None:
    """C32."""
    rule = window(11, 8)
    assert greedy(rule, prompt, 20) == wanted
    pipeline = pipeline_of(Windowed(context(11), 11, 8), right_but_at(rule, place, 11), 20)
    assert pipeline.generate([prompt])[0].token_ids == wanted


@pytest.mark.parametrize("place", range(-1, 4))
def test_rows_of_a_batch_have_windows_of_their_own(place: int) -> None:
    """C32, C33: prompts on both sides of the border, and other lengths from step to step."""
    pipeline = pipeline_of(Windowed(context(11), 11, 8), right_but_at(window(11, 8), place, 11), 20)
    assert together(pipeline, [prompt for prompt, _ in ANCHORS]) == [wanted for _, wanted in ANCHORS]


Mask = Callable[..., Tensor]


def one_more(plain: Mask, width: int) -> Mask:
    """A window off by one."""
    return lambda cache, positions, window=None: plain(cache, positions, width + 1)


def one_less(plain: Mask, width: int) -> Mask:
    return lambda cache, positions, window=None: plain(cache, positions, width - 1)


def ring(plain: Mask, width: int) -> Mask:
    """A ring buffer: after a pass it has the last `width` entries, those of rejected drafts among them."""
    ended: dict[int, int] = {}

    def mask(cache: RowCache, positions: Tensor, window: int | None = None) -> Tensor:
        seen = plain(cache, positions, width)
        seen[..., : max(0, ended.get(id(cache), 0) - width)] = False
        ended[id(cache)] = max(ended.get(id(cache), 0), cache.end)
        return seen

    return mask


@pytest.mark.parametrize("wrong", [one_more, one_less, ring])
def test_other_windows_would_be_seen(wrong: Callable[[Mask, int], Mask], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, wanted = ANCHORS[0]
    pipeline = pipeline_of(Windowed(context(11), 11, 8), right_but_at(window(11, 8), 0, 11), 20)
    monkeypatch.setattr(RowCache, "mask", wrong(RowCache.mask, 8))
    assert pipeline.generate([prompt])[0].token_ids != wanted


# ---- models of `transformers` ----

MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
SLIDING: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma2": {"head_dim": 8, **MIXED},
    "Gemma3Text": {"head_dim": 8, **MIXED},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Cohere2": MIXED,
    "GptOss": {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "experts_implementation": "eager",
        **MIXED,
    },
}
WIDTH = 6
PROMPTS = [[5, 9, 5, 9, 5, 3, 2, 8, 1, 7], [4, 4], [9, 8, 7, 6, 5, 4, 3]]


def sliding(kind: str, width: int = WIDTH, **config: Any) -> Any:
    return sharpened(small(kind, sliding_window=width, **SLIDING.get(kind, {}) | config))


@pytest.mark.parametrize("kind", SLIDING)
def test_models_with_windows_decode_as_they_do_without_a_cache(kind: str) -> None:
    """C32: a proposer that errs at every place in turn; alone and in a ragged batch; logits to rounding.

    That of float32: norms and rotations compute in it in a float64 model too.
    """
    model = sliding(kind)
    wanted = [own_greedy(model, prompt, 14) for prompt in PROMPTS]
    known = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, wanted, strict=True)]

    def guess(tokens: list[int], k: int) -> list[int]:
        whole = next(ids for ids in known if ids[: len(tokens)] == tokens)
        return [(x + (i == len(tokens) % 5)) % 61 for i, x in enumerate(whole[len(tokens) :][:k])]

    pipeline = pipeline_of(model, FixedProposer(guess), 14)
    assert [done.token_ids for done in pipeline.generate(PROMPTS)] == wanted
    assert together(pipeline, PROMPTS) == wanted
    answers = [Answer(prompt, ids) for prompt, ids in zip(PROMPTS, wanted, strict=True)]
    passes = list(logits_of(pipeline.verifier, answers, 4))
    for b, ids in enumerate(known):
        exact = uncached(model, ids)[len(PROMPTS[b]) - 1 : -1]
        assert torch.allclose(torch.cat([rows[b] for rows in passes]), exact, atol=1e-5)
    wide = uncached(sliding(kind, width=48), known[0])
    assert not torch.allclose(uncached(model, known[0]), wide, atol=1e-2), "the window plays no part in this test"


def test_the_mask_is_that_of_transformers_at_every_row_and_position() -> None:
    own = sliding_window_causal_mask_function(WIDTH)
    cache = RowCache(1, rows=2)
    cache.lengths = [9, 2]
    positions = cache.place(3, torch.device("cpu"), [0, 1])
    seen = cache.mask(positions, WIDTH)
    assert seen.shape == (2, 1, 3, 12)
    for b, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(12)):
        assert seen[b, 0, i, j] == own(b, 0, positions[b, i], j)


def test_masks_come_by_kind_of_layer_only_where_kinds_differ() -> None:
    cache = RowCache(2, rows=1)
    positions = cache.place(WIDTH + 1, torch.device("cpu"), [0])
    mixed = LookBack(sliding("Qwen2")).masks(cache, positions)
    assert isinstance(mixed, dict)
    assert {kind: int(mask.sum(-1).max()) for kind, mask in mixed.items()} == {
        "full_attention": WIDTH + 1,
        "sliding_attention": WIDTH,
    }
    for model in (sliding("Mistral"), sliding("Qwen2", max_window_layers=2)):
        assert isinstance(LookBack(model).masks(cache, positions), Tensor)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("Mistral", {"width": 64}), ("Gemma2", {"width": 64}), ("Qwen2", {"use_sliding_window": False})],
)
def test_a_window_that_is_off_or_reaches_the_whole_context_is_none(kind: str, config: dict[str, Any]) -> None:
    model, cache = sliding(kind, **config), RowCache(2, rows=1)
    mask = LookBack(model).masks(cache, cache.place(9, model.device, [0]))
    assert isinstance(mask, Tensor)
    assert mask.shape == (1, 1, 9, 9)
    assert torch.equal(mask == 0 if mask.is_floating_point() else mask, torch.ones(1, 1, 9, 9).tril().bool())
    pipeline = pipeline_of(model, FixedProposer(lambda tokens, k: [1] * k), 14)
    assert pipeline.generate([PROMPTS[0]])[0].token_ids == own_greedy(model, PROMPTS[0], 14)


# ---- what the rehearsal finds out ----


def test_a_window_that_the_model_does_not_heed_is_found_out() -> None:
    """Its config names one, its own forward sees everything."""

    class Heedless(Windowed):
        def _visible(self, seen: Tensor, mask: Tensor, b: int, cached: bool) -> list[int]:
            return super()._visible(seen, mask, b, cached) if cached else seen[b, : int(mask.sum())].tolist()

    for model in (Heedless(context(11), 11, 8), sliding("GPTNeoX")):
        with pytest.raises(UserError, match="does not reproduce its own logits"):
            EagerVerifier(Target(model, ToyTokenizer(), "model", None))


@pytest.mark.parametrize("wrong", [one_more, one_less])
def test_a_wrong_window_fails_the_rehearsal(
    wrong: Callable[[Mask, int], Mask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the width of the model's own is: here one that no short text fills."""
    model = sliding("Mistral", width=48)
    expected = plain_logits(model)
    rehearse(model, expected)
    monkeypatch.setattr(RowCache, "mask", wrong(RowCache.mask, 2))
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        rehearse(model, expected)


def test_a_row_that_sees_its_neighbours_positions_fails_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask by column, right for a row alone, as of models that place tokens by the length of the cache."""
    model = sliding("Mistral")
    expected, plain = plain_logits(model), RowCache.mask
    monkeypatch.setattr(RowCache, "mask", lambda cache, positions, window: plain(cache, positions[:1], window))
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        rehearse(model, expected)


def test_the_rehearsal_gives_the_window_back() -> None:
    model = sliding("Mistral")
    EagerVerifier(Target(model, ToyTokenizer(), "model", None))
    assert model.config.sliding_window == WIDTH
    with pytest.raises(ZeroDivisionError), short_window(model, 0):
        1 / model.config.sliding_window
    assert model.config.sliding_window == WIDTH
