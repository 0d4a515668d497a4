"""What `plan` takes from an earlier run: alpha, c, acceptance by position, and of a bench the costs by batch size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specpipe import theory
from specpipe.errors import UserError
from specpipe.results import folder_of_run, read_result

PARTS = ("target", "proposer", "sampler", "verifier", "draft_length", "generation", "lossless")  # of a run's result
PLACE = ("proposer", "sampler", "temperature")  # of a cell, beside its batch size and gamma
SPENT = ("draft", "verify", "other")

Result = Mapping[str, Any]


@dataclass
class Measured:
    """What an earlier run measured; None for what it could not.

    per_position_acceptance: P(N >= i) for i = 1 .. as far as every position was tried.
    about: what this run's result.json says of it.
    """

    alpha: float | None
    cost_ratio: float | None
    per_position_acceptance: list[float]
    about: dict[str, Any]


def measured(folder: str) -> Measured:
    """Of a decode, or of a bench the proposer that its answer names, by its longest drafts.

    Raises:
        UserError: if it is no run, or one of a command that does not measure this.
    """
    result = read_result(folder, "from")
    if result.get("command") == "decode":
        return _taken(folder, result, result.get("summary") or {}, {})
    if result.get("command") == "bench":
        return _of_bench(folder, result)
    what = f"{folder!r} is a run of {result.get('command')}; a run of decode or bench measures alpha and cost_ratio"
    raise UserError(f"{what}.", key="from")


def _of_bench(folder: str, result: Result) -> Measured:
    best = next(iter((result.get("summary") or {}).get("best") or []), None)
    if best is None:
        raise UserError(f"the bench in {folder!r} has compared nothing yet.", key="from")
    alike = [cell for cell in result["cells"] if all(cell[key] == best[key] for key in (*PLACE, "batch_size"))]
    longest = max(alike, key=lambda cell: int(cell["num_speculative_tokens"]))
    source = _taken(folder, {**result, **{key: best[key] for key in ("proposer", "sampler")}}, longest["summary"], best)
    source.about["by_batch"] = _by_batch(result, best, source.per_position_acceptance)
    return source


def _taken(folder: str, result: Result, summary: Result, cell: Result) -> Measured:
    counts = summary.get("spec_decode") or {}
    alpha = (summary.get("alpha") or {}).get("mean")
    tried = itertools.takewhile(lambda rate: rate is not None, counts.get("per_position_conditional") or [])
    survival = np.cumprod(list(tried)).tolist()
    told = {name: counts.get(name) for name in ("num_spec_steps", "num_plain_steps")}
    told |= {name: cell[name] for name in ("temperature", "batch_size") if name in cell}
    return Measured(
        alpha=None if alpha is None else min(1.0, alpha),  # a sum of float32 probabilities may exceed 1
        cost_ratio=summary.get("cost_ratio"),
        per_position_acceptance=survival,
        about={part: result.get(part) for part in PARTS}
        | {"from": {"folder": str(folder_of_run(folder)), **told, "per_position_acceptance": survival}},
    )


def _by_batch(result: Result, best: Result, survival: Sequence[float]) -> list[dict[str, Any]]:
    """For each batch size the speedups for gamma = 0, 1, .. from its own costs; acceptance does not change with it."""
    costs = {(each["proposer"], each["batch_size"]): each["by_drafted"] for each in _costs(result, best)}
    sizes = sorted({size for name, size in costs if name == best["proposer"] and ("none", size) in costs})
    if not sizes or not survival:
        return []
    gammas = range(len(survival) + 1)
    seconds = {
        part: np.array([_seconds(costs["none", size] + costs[best["proposer"], size], part, gammas) for size in sizes])
        for part in SPENT
    }
    tokens = theory.expected_tokens_by_position(survival)
    rows = theory.speedup_by_batch(tokens, seconds["draft"], seconds["verify"], seconds["other"])
    return [
        {
            "batch_size": size,
            "best_gamma": int(theory.best_of(row)),
            "best_speedup": float(row.max()),
            "speedup": row.tolist(),
        }
        for size, row in zip(sizes, rows, strict=True)
    ]


def _costs(result: Result, best: Result) -> list[Result]:
    """Of plain decoding and of the cell's proposer and sampler, at its temperature."""
    at_it = [each for each in result.get("costs") or [] if each["temperature"] == best["temperature"]]
    return [each for each in at_it if each["sampler"] is None or all(each[key] == best[key] for key in PLACE)]


def _seconds(rows: Sequence[Result], part: str, gammas: Sequence[int]) -> list[float]:
    """A part's seconds by drafted tokens; those not timed lie on a line. Steps without drafts are plain decoding's."""
    known: dict[int, float] = {}
    for row in rows:
        known.setdefault(row["drafted"], row[part])
    drafted = sorted(known)
    return np.interp(gammas, drafted, [known[k] for k in drafted]).tolist()
