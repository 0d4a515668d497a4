"""What `generate` of `transformers` was asked for, as the settings of a request.

Its logits processors are all that shapes the law it draws from, its stopping criteria all that ends a row. A processor
is known by its exact type and becomes the setting with the same effect; both orders, theirs and that of
`distribution.py`, are the same. Whatever has no such setting is refused, never left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specpipe.errors import UserError
from specpipe.settings import GenerationSettings


@dataclass(frozen=True)
class Ends:
    """How rows end: after so many tokens in all, prompt and padding included; at an id; and by other criteria."""

    length: int
    stop_ids: frozenset[int]
    others: StoppingCriteriaList

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> Ends:
        """Of what `generate` prepared, which always holds a length."""
        lengths = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
        eos = [each.eos_token_id.flatten().tolist() for each in criteria if type(each) is EosTokenCriteria]
        others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
        stops = frozenset(token for ids in eos for token in ids if token >= 0)  # -1 is how some say "none"
        return cls(min(lengths), stops, StoppingCriteriaList(others))


@dataclass(frozen=True)
class Rows:
    """The prompts as `generate` has them: width in tokens, and how many of those are padding on the left, by row."""

    width: int
    padding: Items[int]


def settings_of(processors: Items[Any], ends: Ends, rows: Rows, *, sampled: bool) -> GenerationSettings:
    """The settings under which a request has the law of `generate`, and its limits.

    Args:
        processors: as prepared, in the order of their application.
        sampled: whether tokens are drawn; else the best is taken, whatever comes behind the temperature.

    Raises:
        UserError: for a processor, or an order of them, that no settings stand for.
    """
    given: dict[str, Any] = {"temperature": 1.0}
    before: list[type] = []
    for processor in processors:
        kind = type(processor)
        if kind not in READ:
            raise UserError(f"{kind.__name__} has no equal in speculative decoding.", key="logits_processor")
        if kind in before or any(STAGE[each] > STAGE[kind] for each in before):
            what = f"{kind.__name__} stands where generate itself does not put it"
            raise UserError(f"{what}; its effect there has no equal.", key="logits_processor")
        before.append(kind)
        _merge(given, READ[kind](processor, ends, rows))
    limit = ends.length - rows.width
    given["min_new_tokens"] = min(given.get("min_new_tokens", 0), limit)
    given |= {} if sampled else {"temperature": 0.0}
    return GenerationSettings(**given, max_new_tokens=limit, stop_token_ids=sorted(ends.stop_ids), ignore_eos=True)


def _merge(given: dict[str, Any], more: dict[str, Any]) -> None:
    """Add settings; two kinds of processors ban ids, and two of them put the end off."""
    for key, value in more.items():
        if key == "banned_token_ids":
            value = [*given.get(key, ()), *value]
        elif key == "min_new_tokens":
            value = max(given.get(key, 0), value)
        given[key] = value


def _biases(processor: Any, ends: Ends, rows: Rows) -> dict[str, Any]:
    return {"logit_bias": _of_single_ids(processor, "sequence_bias")}


def _bad_words(processor: Any, ends: Ends, rows: Rows) -> dict[str, Any]:
    return {"banned_token_ids": list(_of_single_ids(processor, "bad_words_ids"))}


def _of_single_ids(processor: Any, key: str) -> dict[int, float]:
    if longer := [ids for ids in processor.sequence_bias if len(ids) > 1]:
        raise UserError(f"{list(longer[0])} is more than one token; only single ids have an equal.", key=key)
    return {ids[0]: bias for ids, bias in processor.sequence_bias.items()}


def _suppressed(processor: Any, ends: Ends, rows: Rows) -> dict[str, Any]:
    return {"banned_token_ids": processor.suppress_tokens.tolist()}


def _penalty(processor: Any, ends: Ends, rows: Rows) -> dict[str, Any]:
    ignored = processor.prompt_ignore_length
    left_out = ignored.tolist() if isinstance(ignored, Tensor) else [ignored or 0] * len(rows.padding)
    if left_out != list(rows.padding):
        what = "penalises padding, or leaves tokens of the prompt out"
        raise UserError(f"{what}; prompt and output without padding is what has an equal.", key="repetition_penalty")
    return {"repetition_penalty": processor.penalty}


def _min_length(processor: Any, ends: Ends, rows: Rows) -> dict[str, Any]:
    return {"min_new_tokens": _before_end(processor, ends, processor.min_length - rows.width)}


def _min_new_tokens(processor: Any, ends: Ends, rows: Rows) -> dict[str, Any]:
    skipped = processor.prompt_length_to_skip - rows.width
    return {"min_new_tokens": _before_end(processor, ends, processor.min_new_tokens + skipped)}


def _before_end(processor: Any, ends: Ends, tokens: int) -> int:
    if (ids := {token for token in processor.eos_token_id.flatten().tolist() if token >= 0}) != ends.stop_ids:
        what = f"{type(processor).__name__} puts off {sorted(ids)}, but rows end at {sorted(ends.stop_ids)}"
        raise UserError(f"{what}.", key="logits_processor")
    return max(tokens, 0)


def _share(setting: str, attribute: str) -> Callable[[Any, Ends, Rows], dict[str, Any]]:
    """Of a processor that keeps a part of the law, the setting for how much."""

    def read(processor: Any, ends: Ends, rows: Rows) -> dict[str, Any]:
        if processor.filter_value != -math.inf or processor.min_tokens_to_keep > 1:
            what = f"{type(processor).__name__} keeps tokens that the setting takes away"
            raise UserError(f"{what}.", key="logits_processor")
        return {setting: getattr(processor, attribute)}

    return read


# What each processor says, and by stages when it is applied: inside a stage the order makes no difference.
_STAGES: tuple[dict[type, Callable[[Any, Ends, Rows], dict[str, Any]]], ...] = (
    {SequenceBiasLogitsProcessor: _biases},
    {RepetitionPenaltyLogitsProcessor: _penalty},
    {
        NoBadWordsLogitsProcessor: _bad_words,
        SuppressTokensLogitsProcessor: _suppressed,
        MinLengthLogitsProcessor: _min_length,
        MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    },
    {TemperatureLogitsWarper: lambda processor, ends, rows: {"temperature": processor.temperature}},
    {TopKLogitsWarper: _share("top_k", "top_k")},
    {TopPLogitsWarper: _share("top_p", "top_p")},
    {MinPLogitsWarper: _share("min_p", "min_p")},
    {TypicalLogitsWarper: _share("typical_p", "mass")},
    {LogitNormalization: lambda processor, ends, rows: {}},  # changes logits, not the law
)
READ = {kind: read for stage in _STAGES for kind, read in stage.items()}
STAGE = {kind: number for number, stage in enumerate(_STAGES) for kind in stage}
