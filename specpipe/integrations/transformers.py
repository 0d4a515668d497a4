"""`model.generate(...)` of Hugging Face, speculatively: callables for its argument `custom_generate`.

    model.generate(**inputs, custom_generate=speculative("ngram"), max_new_tokens=64, do_sample=False)

`generate` prepares inputs, settings and limits as it always does; the rows are decoded by a `Pipeline` with the model
as its target, and come back in the form in which `generate` returns them. Greedy tokens are those of `generate` (in
float32; see the README on rounding), sampled ones follow the law it draws from. What cannot be kept so is refused in
one line before anything is decoded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, StoppingCriteriaList

from specpipe.config import build, option
from specpipe.errors import UserError, flag, having
from specpipe.integrations.asked import Ends, Rows, settings_of
from specpipe.pipeline import Pipeline
from specpipe.proposers import Proposer
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.stats import summarise
from specpipe.verifier.compiled import CompiledVerifier
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
CACHES = ("cache", "past_key_values")  # the latter before transformers 5.24
UNDERSTOOD = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHES)
SEEDS = 2**63 - 1


def speculative(
    proposer: str | Proposer = "ngram",
    *,
    num_speculative_tokens: int = 5,
    sampler: Any = "rejection",
    draft_length: Any = "fixed",
    tokenizer: Any = None,
    prepare: bool = False,
) -> Speculative:
    """For `custom_generate`: decode with the model that generates as the target, and its weights as they are.

    What it returns may be kept and used again, which spares looking at the model once more; with another model it
    starts anew.

    Args:
        proposer, sampler, draft_length: options of these groups by name, or objects.
        num_speculative_tokens: longest draft of a step.
        tokenizer: the model's, for proposers that compare theirs with it: drafts that were trained, draft models.
        prepare: let the model's layers be replaced by faster equivalents, for good, as `verifier=auto` does: compiled,
            where that can be, else packed. It can then no longer be trained or saved. If not, nothing of it is changed.

    Raises:
        UserError: for a wrong value.
    """
    parts = {
        "proposer": having("proposer", _component("proposer", proposer), "propose"),
        "sampler": having("sampler", _component("sampler", sampler), "accept"),
        "draft_length": _component("draft_length", draft_length),
        "num_speculative_tokens": num_speculative_tokens,
    }
    return Speculative(_ForAnyModel(parts, tokenizer, flag("prepare", prepare)))


def pipelined(pipeline: Pipeline) -> Speculative:
    """For `custom_generate` of the pipeline's own target: decode with the pipeline.

    How tokens are drawn, when a row ends and the seed are `generate`'s; everything else is the pipeline's.
    """

    def for_its_target(model: Any) -> Pipeline:
        if model is not pipeline.verifier.target.model:
            raise UserError("the pipeline is for another model than the one that generates.", key="custom_generate")
        return pipeline

    return Speculative(for_its_target)


class Speculative:
    """What `generate` calls behind its preparations, in the place of its own loop.

    `summary` is that of `result.json` for the last call, acceptance and time by part, None before the first.

    Args:
        pipeline_for: the pipeline for the model that generates.
    """

    def __init__(self, pipeline_for: Callable[[Any], Pipeline]) -> None:
        self._pipeline_for = pipeline_for
        self.summary: dict[str, Any] | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Items[Any],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The prompts and what follows them, [B, L]; rows that ended before the longest are padded.

        Raises:
            UserError: for an argument of `generate` whose effect cannot be kept.
        """
        kept_back = _kept_back(sys._getframe(1))
        _refuse(generation_config, model_kwargs, kept_back)
        streamer = kept_back.get("streamer") if streamer is None else streamer
        prompts = _prompts(input_ids, model_kwargs)
        ends, rows = Ends.of(stopping_criteria), _rows(input_ids, prompts)
        sampled = bool(generation_config.do_sample)
        pipeline = self._pipeline_for(model)
        asked = _under(pipeline, settings_of(logits_processor, ends, rows, sampled=sampled))
        sequences = _requests(asked, prompts)
        _watch(sequences, ends.others, input_ids)
        pad = _padding_id(generation_config, ends, len(prompts))
        told = Columns(sequences, pad, streamer)
        for _ in asked.decode_together(sequences, len(sequences)):
            told.push()
        if streamer is not None:
            streamer.end()
        asked.verifier.forget()  # as behind generate, the memory is free for other things
        self.summary = summarise([sequence.steps for sequence in sequences], asked.gamma)
        texts: Any = torch.cat([input_ids, told.all().to(input_ids)], dim=1)
        return GenerateDecoderOnlyOutput(sequences=texts) if generation_config.return_dict_in_generate else texts


class Columns:
    """The new tokens of some rows, place by place; rows that have ended are padded.

    A streamer is told each place as `generate` tells it, as soon as every row has come that far: a single row's tokens
    as they are accepted.

    Args:
        pad: id that stands behind the end of a row.
        streamer: of `transformers`, or None.
    """

    def __init__(self, sequences: list[Sequence], pad: int, streamer: Any) -> None:
        self._sequences, self._pad, self._streamer = sequences, pad, streamer
        self._told = 0

    def push(self) -> None:
        """Tell the streamer what all rows have by now."""
        if self._streamer is None:
            return
        unfinished = [_new(sequence) for sequence in self._sequences if sequence.finish_reason is None]
        ready = min(unfinished, default=self._longest)
        for place in range(self._told, ready):
            self._streamer.put(self._place(place))
        self._told = max(self._told, ready)

    def all(self) -> Tensor:
        """[B, N] of rows that are finished."""
        places = [self._place(place) for place in range(self._longest)]
        return torch.stack(places, dim=1)

    @property
    def _longest(self) -> int:
        return max(map(_new, self._sequences))

    def _place(self, place: int) -> Tensor:
        tokens = [s.tokens[s.prompt_length + place] if place < _new(s) else self._pad for s in self._sequences]
        return torch.tensor(tokens)


class Watch:
    """Says when one of `generate`'s criteria is met by a row, told its new ids one by one.

    Args:
        criteria: neither a length nor end-of-text ids, which the request knows itself.
        row: [1, L] the prompt as `generate` has it.
    """

    def __init__(self, criteria: StoppingCriteriaList, row: Tensor) -> None:
        self._criteria, self._row = criteria, row

    def __call__(self, token: int) -> bool:
        self._row = torch.cat([self._row, self._row.new_tensor([[token]])], dim=1)
        return bool(self._criteria(self._row, None).any())


class NoTokenizer:
    """Stands for a tokenizer that was not given, until one is needed."""

    chat_template = None

    def __getattr__(self, name: str) -> Any:
        raise UserError("compares tokenizers; give it the model's: speculative(..., tokenizer=...).")


class _ForAnyModel:
    """Makes the pipeline for a model at its first call, and anew if the model is another or has changed since.

    Args:
        parts: of the pipeline.
        tokenizer, prepare: see `speculative`.
    """

    def __init__(self, parts: dict[str, Any], tokenizer: Any, prepare: bool) -> None:
        self._parts, self._prepare = parts, prepare
        self._tokenizer = NoTokenizer() if tokenizer is None else tokenizer
        self._made: tuple[Any, Pipeline] | None = None

    def __call__(self, model: Any) -> Pipeline:
        if model.training:
            raise UserError("is in training mode, in which every pass may differ; call its eval() first.", key="model")
        if self._made is None or self._made[0] != _kind(model):
            pipeline = Pipeline(verifier=self._verifier(model), settings=GenerationSettings(), **self._parts)
            self._made = _kind(model), pipeline
        return self._made[1]

    def _verifier(self, model: Any) -> EagerVerifier:
        name = getattr(model, "name_or_path", "") or type(model).__name__
        if self._prepare:
            return CompiledVerifier(Target(model, self._tokenizer, name, None), warn=False)
        with _left_as_it_is(model):
            return EagerVerifier(Target(model, self._tokenizer, name, None), prepack=False, fuse=False)


def _kind(model: Any) -> tuple[Any, ...]:
    """What a reader of the model relies on."""
    return model, model.device, model.dtype, model.config.get_text_config()._attn_implementation


@contextmanager
def _left_as_it_is(model: Any) -> Iterator[None]:
    """What making a target of a model changes in it is put back: gradients of its weights, its kind of attention."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    attention = model.config.get_text_config()._attn_implementation
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)
        if model.config.get_text_config()._attn_implementation != attention:
            model.set_attn_implementation(attention)


def _component(group: str, given: Any) -> Any:
    return build(option(group, given), group) if isinstance(given, str) else given


def _kept_back(caller: FrameType) -> dict[str, Any]:
    """Arguments that `generate` does not hand on to a callable, though they are meant for it (transformers 5.24)."""
    if caller.f_code.co_name != "generate":
        return {}
    return {name: caller.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}


def _refuse(config: GenerationConfig, model_kwargs: dict[str, Any], kept_back: dict[str, Any]) -> None:
    """Raise UserError for what was asked beside tokens of a single text per row, drawn one after another."""
    mode = config.get_generation_mode(kept_back.get("assistant_model"))
    if mode not in MODES:
        what = f"decodes greedily or samples; generate was asked for {mode.value.replace('_', ' ')}"
        raise UserError(f"{what}.", key="custom_generate")
    for name in config.extra_output_flags:
        if getattr(config, name):
            raise UserError("is of passes over one token each, which are not made.", key=name)
    if config.cache_implementation not in (None, "dynamic"):
        raise UserError(f"{config.cache_implementation!r} is not the cache that is used.", key="cache_implementation")
    if kept_back.get("synced_gpus"):
        raise UserError("devices that wait for each other's passes cannot speculate.", key="synced_gpus")
    for name, value in model_kwargs.items():
        theirs = name in CACHES and value is not None and _holds_something(value)
        if theirs or (name not in UNDERSTOOD and value is not None):
            raise UserError("is for passes that generate makes itself; leave it out.", key=name)


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The ids of each row without padding. Raises UserError for padding or positions elsewhere than on the left."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    seen = torch.ones_like(input_ids) if mask is None else (mask != 0).to(input_ids)
    if (seen.diff(dim=1) < 0).any():
        raise UserError("hides tokens behind others; padding goes to the left.", key="attention_mask")
    if positions is not None:
        counted = (seen.cumsum(1) - 1).clamp(min=0)
        alike = positions.dim() == 2 and bool(((positions.to(counted) == counted) | (seen == 0)).all())
        if not alike:
            raise UserError("does not count the tokens of each row from 0.", key="position_ids")
    return [ids[kept].tolist() for ids, kept in zip(input_ids, seen.bool(), strict=True)]


def _rows(input_ids: Tensor, prompts: list[list[int]]) -> Rows:
    width = input_ids.shape[1]
    return Rows(width, [width - len(prompt) for prompt in prompts])


def _under(pipeline: Pipeline, settings: GenerationSettings) -> Pipeline:
    """The pipeline under the settings of a call; its seed comes from torch's generator, so that `manual_seed` fixes it.

    Greedy decoding draws nothing, and leaves the generator as it is.
    """
    asked = pipeline.variant(
        sampler=pipeline.sampler,
        settings=settings,
        num_speculative_tokens=pipeline.gamma,
        draft_length=pipeline.draft_length,
    )
    asked.seed = int(torch.randint(SEEDS, ())) if settings.temperature else 0
    return asked


def _requests(asked: Pipeline, prompts: list[list[int]]) -> list[Sequence]:
    """A request for each row. Raises UserError where the target's context would end one before `generate` does."""
    context, limit = asked.verifier.target.context, asked.settings.max_new_tokens or 0
    longest = max(map(len, prompts))
    if context is not None and longest + limit > context:
        what = f"{limit} tokens behind {longest} do not fit the model's context of {context}"
        raise UserError(f"{what}.", key="max_new_tokens")
    return asked.sequences(prompts)


def _watch(sequences: list[Sequence], criteria: StoppingCriteriaList, input_ids: Tensor) -> None:
    """Let criteria end a row. Raises UserError where they would not be asked as `generate` asks them."""
    if not criteria:
        return
    name = type(criteria[0]).__name__
    if len(sequences) > 1:
        what = f"{name} may look at all rows at once, which do not grow at one pace"
        raise UserError(f"{what}.", key="stopping_criteria")
    if sequences[0].settings.min_new_tokens:
        raise UserError(f"{name} may end a row before it has min_new_tokens.", key="stopping_criteria")
    sequences[0].stop_text = Watch(criteria, input_ids)


def _padding_id(config: GenerationConfig, ends: Ends, rows: int) -> int:
    """What follows the end of a row; UserError if there is nothing and rows may end before others."""
    pad = config._pad_token_tensor
    if pad is None and ends.stop_ids and rows > 1:
        raise UserError("has no value, and rows that end before others are padded with it.", key="pad_token_id")
    return 0 if pad is None else int(pad)


def _new(sequence: Sequence) -> int:
    """How many tokens follow the prompt."""
    return len(sequence.tokens) - sequence.prompt_length


def _holds_something(cache: Any) -> bool:
    """Whether a cache is the user's, or was read into already."""
    return getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0
