"""Other programs on the same weights and prompts, as rows beside ours: `transformers` generate.

Their model is one of its own, loaded as `transformers` loads it, so that nothing done to ours makes theirs faster or
slower. Prompts go in one by one, and the seconds to the first token are kept apart, as in a pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from specpipe.bench.grid import Cell, Grid, Setting
from specpipe.bench.record import Decoded
from specpipe.bench.rounds import Runner
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.sequence import Step
from specpipe.settings import GenerationSettings
from specpipe.verifier.quiet import quiet_transformers
from specpipe.verifier.targets import Target

PLAIN, LOOKUP, ASSISTED = "hf", "hf prompt lookup", "hf assisted"
NOT_THEIRS = ("logit_bias", "frequency_penalty", "presence_penalty", "banned_token_ids", "min_new_tokens", "stop")


def assistant_of(proposers: Iterable[Any], target: Target) -> Any:
    """The causal LM of the first proposer that drafts with one in the target's own tokens, loaded anew; or None."""
    for each in proposers:
        if hasattr(each, "plain_model") and (model := each.plain_model(target)) is not None:
            return model
    return None


class HuggingFace:
    """`generate`, plain, with prompt lookup, and assisted where the bench has a draft model with the same tokenizer.

    Args:
        target: a second copy, its modules as they were loaded.
        base: the pipeline whose prompts and seed it shares.
        prompts: to decode; first turns only.
        gamma: drafted tokens of a step.
        assistant: a causal LM of `transformers` for assisted decoding, see `assistant_of`; None: there is none.

    Raises:
        UserError: naming `peers`, for settings and prompts that generate has no equal of.
    """

    def __init__(self, target: Target, base: Pipeline, prompts: Prompts, gamma: int, assistant: Any = None) -> None:
        if prompts.later and any(prompts.later):
            raise UserError("hf answers first turns only; use prompts.turns=first.", key="peers")
        self._model, self._base, self._gamma, self._assistant = target.model, base, gamma, assistant
        self._eos_ids, self._device = target.eos_ids, next(target.model.parameters()).device
        self._prompts = prompts
        self._ids = [base.text.encode(text) for text in prompts.texts]

    def cells(self, setting: Setting, grid: Grid) -> dict[Cell, Callable[[int], Runner]]:
        """Who runs what in a setting; nothing where several prompts are decoded together."""
        if setting.batch_size > 1:
            return {}
        settings = grid.generation(setting)
        _refuse(settings)
        ways: dict[str, dict[str, Any]] = {PLAIN: {}, LOOKUP: {"prompt_lookup_num_tokens": self._gamma}}
        if self._assistant is not None:
            ways[ASSISTED] = {"num_assistant_tokens": self._gamma, "num_assistant_tokens_schedule": "constant"}
        return {
            Cell(setting, name, None, None, peer=True): self._maker(settings, name, way) for name, way in ways.items()
        }

    def _maker(self, settings: GenerationSettings, name: str, way: dict[str, Any]) -> Callable[[int], Runner]:
        config = GenerationConfig(**_as_theirs(settings, self._eos_ids), **way)
        more = {"assistant_model": self._assistant} if name == ASSISTED else {}
        return lambda repeat: _Generating(self, config, more, repeat)

    def generate(self, number: int, config: GenerationConfig, more: dict[str, Any]) -> list[Step]:
        """Two steps: up to the first token or tokens, and all the rest."""
        ids = torch.tensor([self._ids[number]], device=self._device)
        watch = _Watch()
        self._model.generation_config = config
        torch.manual_seed(self._base.seed + number)
        with torch.inference_mode(), quiet_transformers():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **more)
        return watch.steps()

    def requests(self, start: int, stop: int, repeat: int, steps: Callable[[int], list[Step]]) -> list[Decoded]:
        categories = self._prompts.categories
        return [
            Decoded(repeat, number, number, categories[number] if categories else None, steps(number))
            for number in range(start, stop)
        ]


class _Generating:
    """One way of `generate`, as a `Runner`."""

    def __init__(self, engine: HuggingFace, config: GenerationConfig, more: dict[str, Any], repeat: int) -> None:
        self._engine, self._config, self._more, self._repeat = engine, config, more, repeat

    def run(self, start: int, stop: int) -> list[Decoded]:
        """See `Runner.run`."""
        return self._engine.requests(
            start, stop, self._repeat, lambda number: self._engine.generate(number, self._config, self._more)
        )


class _Watch(BaseStreamer):
    """Notes when tokens come; the first that it is given is the prompt."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._came: list[tuple[float, list[int]]] = []

    def put(self, value: Any) -> None:
        self._came.append((time.perf_counter(), value.flatten().tolist()))

    def end(self) -> None:
        self._ended = time.perf_counter()

    def steps(self) -> list[Step]:
        _, first, *rest = self._came
        behind = [token for _, tokens in rest for token in tokens]
        started = Step(0, 0, first[1], [], prefill=True, seconds={"prefill": first[0] - self._begun})
        return [started, *([Step(0, 0, behind, [], seconds={"verify": self._ended - first[0]})] if behind else [])]


def _as_theirs(settings: GenerationSettings, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    ends = sorted(settings.stop_ids(eos_ids))
    drawn = settings.temperature > 0
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "typical_p")}
    return {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": drawn,
        "eos_token_id": ends or None,
        "pad_token_id": eos_ids[0] if eos_ids else 0,
        "repetition_penalty": settings.repetition_penalty,
        **(sampling | {"min_p": settings.min_p or None} if drawn else {}),
    }


def _refuse(settings: GenerationSettings) -> None:
    if settings.max_new_tokens is None:
        raise UserError("hf needs a generation.max_new_tokens.", key="peers")
    if given := [name for name in NOT_THEIRS if getattr(settings, name)]:
        raise UserError(f"hf has no equal of generation.{given[0]}.", key="peers")
