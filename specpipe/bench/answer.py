"""What a bench says in the end: for each temperature and batch size the best combination, and a sentence or two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from specpipe.bench.grid import PLAIN

CellResult = Mapping[str, Any]  # an entry of `cells`


def best_cells(cells: Iterable[CellResult]) -> list[dict[str, Any]]:
    """For each setting the fastest of our cells that draft, and the one that was predicted to be."""
    found = []
    for (temperature, batch_size), group in groupby(cells, lambda cell: (cell["temperature"], cell["batch_size"])):
        ours = [cell for cell in group if _speedup(cell) is not None and cell["proposer"] != PLAIN and not cell["peer"]]
        if not ours:
            continue
        fastest = max(ours, key=lambda cell: _speedup(cell) or 0.0)
        names = ("proposer", "sampler", "num_speculative_tokens")
        found.append(
            {
                "temperature": temperature,
                "batch_size": batch_size,
                **{name: fastest[name] for name in names},
                **{name: fastest["summary"][name] for name in ("speedup", "alpha", "break_even_alpha", "tokens_per_s")},
                "pays": pays(fastest["summary"]["speedup"]),
                "predicted_best": _predicted_best(ours, names),
            }
        )
    return found


def pays(speedup: Mapping[str, float | None]) -> bool | None:
    """Whether a speedup is one; None where its interval holds 1, or there is none."""
    mean, low, high = speedup["mean"], speedup["low"], speedup["high"]
    if mean is not None and mean <= 1:
        return False
    return None if low is None or high is None or low <= 1 <= high else low > 1


def answer(best: Sequence[Mapping[str, Any]], cells: Sequence[CellResult]) -> str:
    """The conclusion, for people, from `best_cells` of all cells that were measured."""
    nothing = (
        "Nothing with a draft was measured: there is nothing to compare." if cells else "Nothing was measured yet."
    )
    return " ".join(_sentences(best)) or nothing


def _sentences(best: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    several = len(best) > 1
    for each in best:
        where = f"At temperature {each['temperature']:g}, batch size {each['batch_size']}: " if several else ""
        what = f"{each['proposer']} with {each['num_speculative_tokens']} drafted tokens"
        speedup = each["speedup"]
        if each["pays"] is False:
            opening = "no proposer is faster than plain decoding"
            chance = ", which may be chance" if speedup["high"] is None or speedup["high"] >= 1 else ""
            yield _capital(f"{where}{opening}; the best, {what}, reaches {said(speedup)}{chance}.")
        elif each["pays"] is None:
            yield _capital(f"{where}{what} measured {said(speedup)} of plain decoding's speed, which may be chance.")
        else:
            needed = each["break_even_alpha"]
            limit = "" if needed is None else f"; below alpha {needed:.2f} it stops paying"
            yield _capital(f"{where}{what} is {said(speedup)} as fast as plain decoding{limit}.")


def said(speedup: Mapping[str, float | None]) -> str:
    """A speedup with its interval."""
    mean, low, high = speedup["mean"], speedup["low"], speedup["high"]
    if mean is None:
        return "n/a"
    return f"{mean:.2f}x" + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")


def _capital(sentence: str) -> str:
    """With a capital, unless it begins with the name of an option."""
    return sentence[0].upper() + sentence[1:] if sentence.startswith(("no ", "at ")) else sentence


def _speedup(cell: CellResult) -> float | None:
    return (cell["summary"].get("speedup") or {}).get("mean")


def _predicted_best(ours: Sequence[CellResult], names: Iterable[str]) -> dict[str, Any] | None:
    predicted = {i: (cell["summary"].get("predicted_speedup") or {}).get("costs") for i, cell in enumerate(ours)}
    known = {i: value for i, value in predicted.items() if value is not None}
    if not known:
        return None
    best = ours[max(known, key=known.__getitem__)]
    return {name: best[name] for name in names}
