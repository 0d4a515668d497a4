"""Decodes all cells of a bench, interleaved: plain, speculative and peers take turns over the same few prompts.

A machine that gets slower meanwhile is as slow for all of them, so that their ratios stand. Within a stretch of prompts
the order is shuffled. Each cell drafts with a memory of its own: what one cell put out must not help another, nor a
later repeat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from omegaconf import DictConfig

from specpipe.bench.grid import Cell, Grid, Setting
from specpipe.bench.record import Decoded, Record, Round
from specpipe.config import build
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.proposers import Proposer
from specpipe.turns import Requests

WARM_UP_STEPS = 8  # of each request


class Runner(Protocol):
    """Decodes prompts for one cell."""

    def run(self, start: int, stop: int) -> list[Decoded]:
        """The requests for the prompts from number `start` up to `stop`, all turns."""
        ...


class Bench:
    """The rounds of a bench.

    Args:
        config: of the run.
        grid: what to measure.
        base: a pipeline with the target.
        prompts: to decode.
        peers: other programs for a setting, by cell.
        record: where everything goes.
    """

    def __init__(
        self,
        config: DictConfig,
        grid: Grid,
        base: Pipeline,
        prompts: Prompts,
        peers: Callable[[Setting], dict[Cell, Callable[[int], Runner]]],
        record: Record,
    ) -> None:
        self._config, self._grid, self._base, self._prompts = config, grid, base, prompts
        self._peers, self._record = peers, record
        self._lasting: dict[str, Pipeline] = {}  # of proposers that keep nothing between requests
        self._warm: set[Cell] = set()
        self.rounds = [Round(repeat, setting) for repeat in range(config.repeats) for setting in grid.settings]

    def cells(self, setting: Setting) -> list[Cell]:
        """All that is compared with each other in a setting."""
        return [*self._grid.cells(setting), *self._peers(setting)]

    def stretches(self, round_: Round) -> int:
        """How often `run` yields."""
        return len(self._bounds(round_.setting)) * len(self.cells(round_.setting))

    def run(self, round_: Round) -> Iterator[Cell]:
        """Decode a round; yields each time a cell is through with a stretch."""
        setting = round_.setting
        runners = self._runners(round_)
        for cell in runners:
            self._warm_up(cell)
        for number, (start, stop) in enumerate(self._bounds(setting)):
            order = random.Random(f"{self._base.seed}/{round_.repeat}/{number}")
            for cell in order.sample(list(runners), len(runners)):
                self._record.add(round_, number, cell, runners[cell].run(start, stop))
                yield cell
        self._record.end(round_)

    def pipeline(self, cell: Cell) -> Pipeline:
        """The pipeline of a cell; with a proposer that nobody else uses, if it remembers what it has drafted for.

        Raises:
            UserError: for a proposer that does not go with the target.
        """
        return self._with(cell.proposer).variant(
            sampler=self._grid.sampler(cell.sampler),
            settings=self._grid.generation(cell.setting),
            num_speculative_tokens=cell.gamma or 0,
            draft_length=build(self._config.draft_length, "draft_length"),
        )

    def proposer(self, name: str) -> Proposer:
        """One of the grid's, as ready to draft as in a cell."""
        return self._with(name).proposer

    def _with(self, name: str) -> Pipeline:
        if name not in self._grid.proposers:
            return self._base
        if name not in self._lasting:
            proposer: Proposer = build(self._grid.proposers[name], f"proposers[{name}]")
            pipeline = self._base.drafting_with(proposer)
            if not getattr(proposer, "keeps_nothing", False):
                return pipeline
            self._lasting[name] = pipeline
        return self._lasting[name]

    def _runners(self, round_: Round) -> dict[Cell, Runner]:
        made: dict[Cell, Runner] = {
            cell: Decoding(self.pipeline(cell), self._prompts, round_) for cell in self._grid.cells(round_.setting)
        }
        return made | {cell: make(round_.repeat) for cell, make in self._peers(round_.setting).items()}

    def _warm_up(self, cell: Cell) -> None:
        """A few tokens that do not count: first calls allocate, choose kernels and read files."""
        if cell in self._warm:
            return
        self._warm.add(cell)
        if cell.peer:
            self._peers(cell.setting)[cell](0).run(0, 1)
            return
        pipeline = self.pipeline(cell)
        size = cell.setting.batch_size
        steps = pipeline.decode_together(pipeline.sequences(self._prompts.texts[:1] * size), size)
        for _ in islice(steps, WARM_UP_STEPS * size):
            pass

    def _bounds(self, setting: Setting) -> list[tuple[int, int]]:
        count, size = len(self._prompts.texts), setting.stretch
        return [(start, min(start + size, count)) for start in range(0, count, size)]


class Decoding:
    """A pipeline that decodes the prompts in order, `batch_size` at a time."""

    def __init__(self, pipeline: Pipeline, prompts: Prompts, round_: Round) -> None:
        self._pipeline, self._round = pipeline, round_
        self._requests = Requests(pipeline, prompts)

    def run(self, start: int, stop: int) -> list[Decoded]:
        """See `Runner.run`."""
        requests = self._requests
        size = self._round.setting.batch_size
        for _ in self._pipeline.decode_together(requests.firsts[start:stop], size, requests.follow):
            pass
        return [
            Decoded(self._round.repeat, each.conversation, each.number, each.category, each.sequence.steps)
            for each in requests.made()
            if start <= each.conversation < stop
        ]


def named_prompts(prompts: Prompts) -> dict[str, Any]:
    """What result.json says of the prompts."""
    categories = prompts.categories
    return {
        "count": len(prompts.texts),
        "categories": sorted({name or "none" for name in categories}) if categories else None,
    }
