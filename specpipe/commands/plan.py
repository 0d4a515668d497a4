"""`specpipe plan`: what a draft length would bring, from alpha and costs alone. Loads no model, and none's library."""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.table import Table
from rich.text import Text

from specpipe import theory
from specpipe.commands.measured import Measured, measured
from specpipe.commands.parts import ending
from specpipe.config import plain
from specpipe.console import Console, written
from specpipe.errors import UserError, integer, number
from specpipe.report.plan import combination_columns, curve_columns, drafted_share, plan_page
from specpipe.results import RunFolder
from specpipe.settings import LONGEST_DRAFT
from specpipe.tracking import NoRun

HEAD = 8  # columns of the terminal for a line of a table's head: nine of them fit into 80
HIGHEST = {"alpha": 1.0, "cost_ratio": math.inf}
FORMS = {"alpha": ".3g", "cost_ratio": ".3g", "break_even_alpha": ".3f", "gamma": "d", "best_gamma": "d"}
WHY_NOT = {"alpha": "nothing was drafted", "cost_ratio": "it has no step without a draft to compare with; a bench has"}

Cell = dict[str, Any]  # one combination: alpha, cost_ratio, summary, curve


def run(config: DictConfig) -> int:
    """Predict for each combination of the config's numbers; returns the exit code."""
    settled = plain(config)
    source = None if settled["from"] is None else measured(settled["from"])
    cells = predictions(settled, source)
    head = {"command": "plan", **(source.about if source else {}), "config": settled}
    single = len(cells) == 1
    head |= cells[0] if single else {"cells": cells}
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir), head, lambda: cells[0]["summary"] if single else {})
    with ending(folder, NoRun(), _note) as end:
        folder.write("report.html", plan_page(folder.result))
        _show(cells, settled["max_gamma"])
        if source:
            for row in source.about.get("by_batch", ()):
                _note(
                    f"batch size {row['batch_size']}: best gamma {row['best_gamma']}, speedup {row['best_speedup']:.2f}"
                )
            _note(f"note: {drafted_share(source.about['from'])}")
        end.code = 0
    return end.code


def predictions(settled: Mapping[str, Any], source: Measured | None) -> list[Cell]:
    """A cell for each combination of alpha and cost_ratio, of the config or measured.

    Acceptance by position goes with the alpha that was measured beside it, not with one of the config.

    Raises:
        UserError: naming the key of a number that is missing or impossible.
    """
    longest = integer("max_gamma", settled["max_gamma"], 1, LONGEST_DRAFT)
    gamma = None if settled["gamma"] is None else integer("gamma", settled["gamma"], 0, longest)
    operations = settled["operations_ratio"]
    operations = None if operations is None else number("operations_ratio", operations, 0)
    alphas, costs = (_numbers(key, settled, source) for key in ("alpha", "cost_ratio"))
    survival = source.per_position_acceptance if source and settled["alpha"] is None else []
    return [
        predict(alpha, cost, cost if operations is None else operations, longest, gamma, survival[:longest])
        for alpha, cost in itertools.product(alphas, costs)
    ]


def predict(
    alpha: float,
    cost_ratio: float,
    operations_ratio: float,
    max_gamma: int,
    gamma: int | None = None,
    per_position_acceptance: Sequence[float] = (),
) -> Cell:
    """The curve over gamma = 0 .. max_gamma and its summary, by the formulas of `specpipe.theory`.

    The summary describes `gamma`, or where that is None the best one. break_even_alpha is the alpha above which
    drafting so many tokens pays, at least 1. Where acceptance by position is known, `by_position` holds what it
    predicts in place of alpha, as far as positions were tried.
    """
    gammas = np.arange(max_gamma + 1)
    speedups = theory.speedup(alpha, gammas, cost_ratio)
    columns = {
        "gamma": gammas,
        "expected_tokens_per_step": theory.expected_tokens(alpha, gammas),
        "speedup": speedups,
        "operations": theory.operations_factor(alpha, gammas, operations_ratio),
        "break_even_alpha": theory.break_even_alpha(gammas, cost_ratio),
    }
    curve = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    best = int(theory.best_of(speedups))
    at = best if gamma is None else gamma
    summary = curve[at] | {
        "best_gamma": best,
        "best_speedup": curve[best]["speedup"],
        "break_even_alpha": curve[max(at, 1)]["break_even_alpha"],
    }
    if per_position_acceptance:
        summary["by_position"] = _by_position(curve, at, cost_ratio, per_position_acceptance)
    return {
        "alpha": alpha,
        "cost_ratio": cost_ratio,
        "operations_ratio": operations_ratio,
        "summary": summary,
        "curve": curve,
    }


def _by_position(curve: list[Cell], gamma: int, cost_ratio: float, survival: Sequence[float]) -> dict[str, Any]:
    """The summary by acceptance at each position; adds the same to the curve, None beyond the positions."""
    tokens = theory.expected_tokens_by_position(survival)
    speedups = tokens / theory.step_cost(np.arange(len(tokens)), cost_ratio)
    for k, row in enumerate(curve):
        known = k < len(tokens)
        row["expected_tokens_by_position"] = float(tokens[k]) if known else None
        row["speedup_by_position"] = float(speedups[k]) if known else None
    best = int(theory.best_of(speedups))
    return {
        "expected_tokens_per_step": curve[gamma]["expected_tokens_by_position"],
        "speedup": curve[gamma]["speedup_by_position"],
        "best_gamma": best,
        "best_speedup": curve[best]["speedup_by_position"],
        "max_gamma": len(survival),
    }


def _numbers(key: str, settled: Mapping[str, Any], source: Measured | None) -> list[float]:
    given = settled[key]
    if given is None:
        if source is None:
            raise UserError(
                f"has no value, and needs one: {key}=..., or from=<run folder of a decode or bench>.", key=key
            )
        given = getattr(source, key)
        if given is None:
            raise UserError(f"the run of `from` has none ({WHY_NOT[key]}); give it: {key}=...", key=key)
    if given == []:
        raise UserError("is an empty list; it needs a number.", key=key)
    return [number(key, each, 0, HIGHEST[key]) for each in (given if isinstance(given, list) else [given])]


def _show(cells: list[Cell], max_gamma: int) -> None:
    """The answer and its table, on standard output.

    Raises:
        OutputClosed: when its reader has gone.
        UserError: when it cannot be written.
    """
    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as capture:
        if len(cells) == 1:
            for label, value in _answer(cells[0]):
                console.print(Text(f"{label:<20}{value}"), soft_wrap=True)
            console.print()
        console.print(_curve(cells[0]) if len(cells) == 1 else _combinations(cells))
    with written(sys.stdout):
        sys.stdout.write(capture.get())
        sys.stdout.flush()
    if max_gamma < LONGEST_DRAFT and any(cell["summary"]["best_gamma"] == max_gamma for cell in cells):
        more = min(LONGEST_DRAFT, 2 * max_gamma)
        _note(f"note: the best gamma is the longest looked at; max_gamma={more} looks further")


def _answer(cell: Cell) -> Iterator[tuple[str, str]]:
    summary = cell["summary"]
    best, gamma = summary["best_gamma"], summary["gamma"]
    speed = f"{summary['best_speedup']:.2f} times as fast as plain decoding" if best else "no draft is faster"
    yield "alpha", _said(cell, "alpha")
    yield "cost ratio", _said(cell, "cost_ratio")
    yield "best gamma", f"{best}: {speed}"
    if gamma != best:
        yield "speedup", f"{_said(summary, 'speedup')} at gamma {gamma}"
    if gamma:
        yield "tokens per step", f"{_said(summary, 'expected_tokens_per_step')} at gamma {gamma}"
        yield "operations", f"{_said(summary, 'operations')} times those of plain decoding at gamma {gamma}"
    yield "break-even", f"alpha {_said(summary, 'break_even_alpha')} at gamma {max(1, gamma)}"
    if measured := summary.get("by_position"):
        speed = f"{measured['best_speedup']:.2f} times as fast"
        yield "by position", f"best gamma {measured['best_gamma']} of 0 to {measured['max_gamma']}: {speed}"


def _curve(cell: Cell) -> Table:
    columns = curve_columns(cell)
    table = _table(columns)
    for row in cell["curve"]:
        style = "bold" if row["gamma"] == cell["summary"]["best_gamma"] else ""
        table.add_row(*(_said(row, name) for name in columns.values()), style=style)
    return table


def _combinations(cells: list[Cell]) -> Table:
    columns = combination_columns(cells)
    table = _table(columns)
    for cell in cells:
        table.add_row(*(_said(cell | cell["summary"], name) for name in columns.values()))
    return table


def _table(heads: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(textwrap.fill(head, HEAD, break_long_words=False, break_on_hyphens=False), justify="right")
    return table


def _said(values: Mapping[str, Any], name: str) -> str:
    """A number as the terminal shows it; n/a for a break-even that no alpha reaches, or a position never tried."""
    value = values[name]
    return "n/a" if value is None or math.isnan(value) else format(value, FORMS.get(name, ".2f"))


def _note(line: str) -> None:
    """One line beside the results."""
    Console(file=sys.stderr, highlight=False).print(Text(line), soft_wrap=True)
