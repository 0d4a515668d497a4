"""What a wandb run holds of result.json: the numbers of a request or a round, tables, charts and the summary.

Knows the shape of result.json, and wandb's tables and charts. Knows nothing of runs, and computes no number: what it
shows was measured elsewhere. wandb is imported where a table is made, never before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

TEXT_LIMIT = 2000  # characters of a prompt or a text in the table
PLAIN = "none"  # the proposer that every speedup is over: its own is 1, without an interval
COMBINATION = ("proposer", "sampler", "temperature", "batch_size", "num_speculative_tokens")  # what tells cells apart

Values = Mapping[str, Any]


def plain(value: Any) -> Any:
    """`value` as nested dicts, lists, numbers, texts and None: all that wandb shows as it is."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, Set)) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return str(value)


def request_metrics(index: int, request: Values, num_spec_tokens: int) -> dict[str, Any]:
    """`request/...` of one finished request; what was not measured is left out."""
    counts = request.get("spec_decode") or {}
    values = {
        "index": index,
        "num_spec_tokens": num_spec_tokens,
        "new_tokens": len(request.get("token_ids") or ()),
        "alpha": request.get("alpha"),
        "draft_acceptance_rate": counts.get("draft_acceptance_rate"),
        "mean_acceptance_length": counts.get("mean_acceptance_length"),
        "tokens_per_s": request.get("tokens_per_s"),
        "tokens_per_target_pass": request.get("tokens_per_target_pass"),
        **{f"{phase}_s": seconds for phase, seconds in (request.get("timing") or {}).items()},
    }
    return _under("request", values)


def round_metrics(index: int, cells: Iterable[Values]) -> dict[str, Any]:
    """`round/index`, and `round/speedup/<cell>` and `round/alpha/<cell>` of every cell but plain decoding."""
    values: dict[str, Any] = {"index": index}
    for cell in cells:
        if cell["proposer"] != PLAIN:
            for figure in ("speedup", "alpha"):
                values[f"{figure}/{label(cell)}"] = _interval(figure, cell["summary"])[figure]
    return _under("round", values)


def label(cell: Values) -> str:
    """A cell in letters that wandb takes in a metric's name: `ngram_k5_rejection_T0_7_b1`."""
    drafted, sampler = cell["num_speculative_tokens"], cell["sampler"]
    words = [
        cell["proposer"],
        *([] if drafted is None else [f"k{drafted}"]),
        *([] if sampler is None else [sampler]),
        f"T{cell['temperature']:g}",
        f"b{cell['batch_size']}",
    ]
    return re.sub(r"[\W_]+", "_", "_".join(words), flags=re.ASCII)


def tables_and_charts(result: Values) -> dict[str, Any]:
    """By name, as wandb shows them; those for which result.json has nothing are left out."""
    cells = result.get("cells") or ()
    counts = (result.get("summary") or {}).get("spec_decode") or {}
    shown = {
        "tests": _table([{key: test[key] for key in ("test", "result", "reason")} for test in result.get("tests", ())]),
        "requests": _table([_request_row(*numbered) for numbered in enumerate(result.get("requests") or ())]),
        "per_position_acceptance": _numbered_bars("position", "acceptance", counts.get("per_position_acceptance"), 1),
        "acceptance_histogram": _numbered_bars("accepted", "steps", counts.get("acceptance_histogram"), 0),
        "cells": _table([_cell_row(cell, cell["summary"]) for cell in cells]),
        "categories": _table(_category_rows(cells)),
        "speedup_by_category": _speedup_by_category(result),
        "acceptance_by_position": _acceptance_by_position(cells),
    }
    return {name: value for name, value in shown.items() if value is not None}


def summary(result: Values) -> dict[str, Any]:
    """Nested numbers under keys such as `spec_decode/draft_acceptance_rate`; what is None is left out."""
    return _flat({**(result.get("summary") or {}), "verdict": result.get("verdict")})


def _under(prefix: str, values: Values) -> dict[str, Any]:
    return {f"{prefix}/{key}": value for key, value in values.items() if value is not None}


def _flat(values: Values, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}/"))
        elif value is not None:
            flat[f"{prefix}{key}"] = plain(value)
    return flat


def _request_row(index: int, request: Values) -> dict[str, Any]:
    counts = request.get("spec_decode") or {}
    return {
        "index": index,
        "prompt": str(request.get("prompt", ""))[:TEXT_LIMIT],
        "text": str(request.get("text", ""))[:TEXT_LIMIT],
        "finish_reason": str(request.get("finish_reason")),
        "new_tokens": len(request.get("token_ids") or ()),
        "alpha": request.get("alpha"),
        "draft_acceptance_rate": counts.get("draft_acceptance_rate"),
        "mean_acceptance_length": counts.get("mean_acceptance_length"),
        "tokens_per_s": request.get("tokens_per_s"),
    }


def _cell_row(cell: Values, measured: Values) -> dict[str, Any]:
    """One row of figures: the cell's own, or those of one of its categories."""
    counts = measured.get("spec_decode") or {}
    predicted = measured.get("predicted_speedup") or {}
    return {
        **{key: cell[key] for key in COMBINATION},
        "lossless": cell.get("lossless"),
        "repeats": cell.get("repeats"),
        "new_tokens": measured.get("new_tokens"),
        "tokens_per_s": measured.get("tokens_per_s"),
        **_interval("speedup", measured),
        **_interval("alpha", measured),
        "draft_acceptance_rate": counts.get("draft_acceptance_rate"),
        "mean_acceptance_length": counts.get("mean_acceptance_length"),
        "tokens_per_target_pass": measured.get("tokens_per_target_pass"),
        "time_to_first_token_s": measured.get("time_to_first_token_s"),
        "cost_ratio": measured.get("cost_ratio"),
        "predicted_speedup_formula": predicted.get("formula"),
        "predicted_speedup_costs": predicted.get("costs"),
        "break_even_alpha": measured.get("break_even_alpha"),
        "operations": measured.get("operations"),
        "identical_texts": measured.get("identical_texts"),
        "texts": measured.get("texts"),
    }


def _category_rows(cells: Iterable[Values]) -> list[dict[str, Any]]:
    return [
        {"category": category, **_cell_row(cell, measured)}
        for cell in cells
        for category, measured in (cell.get("categories") or {}).items()
    ]


def _interval(figure: str, measured: Values) -> dict[str, Any]:
    """The mean under the figure's own name, the ends beside it."""
    values = measured.get(figure) or {}
    return {figure: values.get("mean"), f"{figure}_low": values.get("low"), f"{figure}_high": values.get("high")}


def _speedup_by_category(result: Values) -> Any:
    """Bars for the best cell of the first temperature and batch size, the one the summary's speedup is of."""
    for best in ((result.get("summary") or {}).get("best") or ())[:1]:
        for cell in result.get("cells") or ():
            if all(cell[key] == best[key] for key in COMBINATION):
                speedups = {row["category"]: row["speedup"] for row in _category_rows([cell])}
                return _bars("category", "speedup", speedups, title=f"speedup by category, {label(cell)}")
    return None


def _acceptance_by_position(cells: Iterable[Values]) -> Any:
    """A line for the fastest cell of each proposer, over the drafts' positions from 1."""
    fastest: dict[str, tuple[float, Values]] = {}
    for cell in cells:
        speedup = _interval("speedup", cell["summary"])["speedup"] or 0.0
        if _by_position(cell) and speedup > fastest.get(cell["proposer"], (-1.0,))[0]:
            fastest[cell["proposer"]] = speedup, cell
    if not fastest:
        return None
    import wandb

    lines = {label(cell): _by_position(cell) for _, cell in fastest.values()}
    xs, ys = ([[point[axis] for point in line] for line in lines.values()] for axis in (0, 1))
    return wandb.plot.line_series(xs, ys, list(lines), title="acceptance by position", xname="position")


def _by_position(cell: Values) -> list[tuple[int, float]]:
    """(position, share accepted) for the positions that were drafted."""
    rates = (cell["summary"].get("spec_decode") or {}).get("per_position_acceptance") or ()
    return [(position, rate) for position, rate in enumerate(rates, 1) if rate is not None]


def _table(rows: Sequence[Values]) -> Any:
    if not rows:
        return None
    import wandb

    return wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])


def _numbered_bars(name: str, value: str, heights: Sequence[float | None] | None, first: int) -> Any:
    """A bar chart of `heights`, numbered from `first`."""
    numbered = {str(number): height for number, height in enumerate(heights or (), first)}
    return _bars(name, value, numbered, title=f"{value} by {name}")


def _bars(name: str, value: str, heights: Mapping[str, float | None], *, title: str) -> Any:
    """A bar chart without the bars that have no height; None when there is nothing to show."""
    table = _table([{name: bar, value: height} for bar, height in heights.items() if height is not None])
    if table is None:
        return None
    import wandb

    return wandb.plot.bar(table, name, value, title=title)
