"""Which models the cache can roll back, decided before the first request.

Two gates: the model's own description of its layers, and a rehearsal that rolls the cache back once and compares with
a pass that never used it, windows and padding included. A model that fails is refused by the name of what fails; it is
never decoded wrongly.
"""

from __future__ import annotations

from typing import Any

import torch

from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import UserError, one_line
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.reader import Reader
from specpipe.verifier.windows import FULL, SLIDING, layer_kinds, short_window

# Largest difference of logits, as a share of their spread, that rounding may cause between two ways of reading a text.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
WINDOW = 2  # of sliding layers in the rehearsal: shorter than its text, whatever the model's own is


def refuse_unsupported(model: Any) -> None:
    """Raise UserError, naming the layer type, if some layer keeps state that setting a length cannot undo."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; only decoder-only models can be a target.", key="model")
    kinds = set(layer_kinds(config)) - {FULL, SLIDING}
    if not kinds and getattr(model, "_is_stateful", False):
        kinds = {"recurrent"}
    if kinds:
        raise UserError(f"{name} has {', '.join(sorted(kinds))} layers, which cannot be rolled back.", key="model")


def plain_logits(model: Any) -> torch.Tensor:
    """Logits [V] behind the rehearsal's text, from one pass without a cache: what `rehearse` must reproduce.

    Raises UserError for a model that gives no such logits: not finite, or changed by what stands behind a position.
    """
    a, b, c, d, _ = _text(model)
    device = next(model.parameters()).device
    with torch.inference_mode(), short_window(model, WINDOW):
        longer = model(input_ids=torch.tensor([[a, b, c, d]], device=device), use_cache=False).logits[0]
        shorter = model(input_ids=torch.tensor([[a, b]], device=device), use_cache=False).logits[0]
    name = type(model).__name__
    if longer.isnan().any() or not longer.isfinite().any():
        raise UserError(f"{name} gives logits that are not numbers: its weights are broken.", key="model")
    longer, shorter = in_own_type(model, longer), in_own_type(model, shorter)
    if not difference(longer[1], shorter[1]) <= ROUNDING[longer.dtype]:
        raise UserError(f"{name} looks at the tokens behind a position: it is not a causal model.", key="model")
    return longer[-1]


def rehearse(model: Any, expected: torch.Tensor) -> None:
    """Raise UserError unless reading, rolling back and reading on gives the `expected` logits.

    Two rows come to the same text by different steps, so that one of them is padded.
    """
    a, b, c, d, wrong = _text(model)
    name = type(model).__name__
    ahead, behind = (
        Sequence(prompt, GenerationSettings(max_new_tokens=4), chance=Chance(0)) for prompt in ([a, b], [a])
    )
    try:
        with short_window(model, WINDOW):
            reader = Reader(model)
            reader.read([ahead, behind], Draft.of([[c, wrong, wrong], [b, wrong]], reader.device))
            ahead.commit([c, d], 3, [])
            behind.commit([b, c], 2, [])
            reader.roll_back([ahead, behind])
            behind.commit([d], 0, [])
            rows = reader.read([ahead, behind], Draft.of([[], []], reader.device))
    except Exception as error:  # a model that expects another cache or mask may raise anything
        what = f"{name} cannot be read with a cache that rolls back"
        raise UserError(f"{what}: {one_line(error)}", key="model") from error
    off = max(difference(logits[-1], expected) for logits in rows)
    if not off <= ROUNDING[expected.dtype]:
        what = f"{name} does not reproduce its own logits after a roll-back"
        raise UserError(f"{what} (off by {off:.0%} of their spread).", key="model")


def same_bits(reader: Reader, drafted: int) -> bool:
    """Whether a text's logits are equal to the last bit, read one by one or in passes with so many drafts."""
    size, device = reader.model.config.get_text_config().vocab_size, reader.device
    ids = [(7 * i + 3) % size for i in range(2 * (1 + drafted))]
    whole, stepped = (
        Sequence(ids[:1], GenerationSettings(max_new_tokens=len(ids)), chance=Chance(0)) for _ in range(2)
    )
    for start in range(0, len(ids), 1 + drafted):
        drafts, more = ids[start + 1 : start + 1 + drafted], ids[start + 1 + drafted : start + 2 + drafted] or [0]
        [rows] = reader.read([whole], Draft.of([drafts], device))
        whole.commit([*drafts, *more], drafted, [])
        for row, token in zip(rows, [*drafts, *more], strict=True):
            if not torch.equal(reader.read([stepped], Draft.of([[]], device))[0][0], row):
                return False
            stepped.commit([token], 0, [])
    return True


def in_own_type(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits in the model's type, of whose roundings they are, where they are those numbers in a wider one."""
    narrow = logits.to(getattr(model, "dtype", logits.dtype))
    return narrow if torch.equal(narrow.to(logits.dtype), logits) else logits


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two rows of logits, as a share of their spread; equal infinities do not differ."""
    finite = b[b.isfinite()]
    return torch.where(a == b, 0.0, a - b).abs().max().item() / max((finite.max() - finite.min()).item(), 1e-9)


def _text(model: Any) -> list[int]:
    size = model.config.get_text_config().vocab_size
    return [(7 * i + 3) % size for i in range(5)]
