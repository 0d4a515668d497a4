"""What the page of a bench draws: which of its cells, and what is said of them.

A bench may have measured hundreds of combinations. Each chart shows every proposer once: with the sampler and the draft
length with which it was fastest at the first temperature and batch size, or with what one axis varies of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from specpipe.report.charts import Look, Point, Series, bars, by_step, chart, crossings, lines, looks, stacked
from specpipe.report.page import ABSENT, fragment, interval, number

Cell = Mapping[str, Any]  # of `cells` in result.json

PLAIN = "none"
ALL = "all prompts"
SETTINGS = ("proposer", "sampler", "num_speculative_tokens", "temperature", "batch_size")
TIMES = "times as fast as plain decoding"
PARTS = {  # of the time behind the prompt pass, with looks that are no proposer's
    "verify": Look("#9AA5B1"),
    "draft": Look("#6A3D9A"),
    "accept": Look("#B15928", hatch="/"),
    "other": Look("#5F6670", hatch="."),
}
ROOM = 0.05  # of a chart's height, above and below what is drawn

FIGURE = """\
<figure class="{{ kind }}">{% if words %}<figcaption>{{ words }}</figcaption>{% endif %}{{ plot }}</figure>
"""

GRID = """\
<p class="small"><span class="key solid"></span>measured, with its 95 % interval
<span class="named"><span class="key dashed"></span>predicted from measured costs</span>
<span class="named"><span class="key dotted"></span>predicted by the paper's formula</span></p>
<div class="charts">{% for each in plots %}{{ each }}{% endfor %}</div>
"""

STYLE = Markup("""
.key { border-color: currentColor; } .key.dashed { border-top-style: dashed; } .key.dotted { border-top-style: dotted; }
""")


class Drawn(NamedTuple):
    """A chart or several under a heading, what a stranger must know to read it, and of what it is."""

    heading: str
    caption: str
    where: str
    plots: Markup


@dataclass(frozen=True)
class View:
    """What of a bench is drawn.

    cells: all. temperature, batch_size: where most charts look. chosen: by name, each proposer's (and peer's) fastest
    cell there. looks: by name, the same in all charts.
    """

    cells: Sequence[Cell]
    temperature: float | None
    batch_size: int | None
    chosen: Mapping[str, Cell]
    looks: Mapping[str, Look]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> View:
        """Of a result.json with at least one cell."""
        cells = result["cells"]
        first = next(iter((result.get("summary") or {}).get("best") or ()), cells[0])
        temperature, batch_size = first.get("temperature"), first.get("batch_size")
        here = [
            each for each in cells if (each.get("temperature"), each.get("batch_size")) == (temperature, batch_size)
        ]
        grey = [each for each in cells if each["proposer"] == PLAIN or each.get("peer")]
        names = dict.fromkeys(named(each) for each in cells if each not in grey)
        greys = dict.fromkeys(named(each) for each in grey)
        return cls(cells, temperature, batch_size, fastest(here), looks(list(names), list(greys)))

    @property
    def drafting(self) -> dict[str, Cell]:
        """Of `chosen` those that draft in this program."""
        return {name: cell for name, cell in self.chosen.items() if drafts(cell)}

    @property
    def chosen_settings(self) -> str:
        """With what each proposer was fastest: its draft length, and the sampler where there were several."""
        several = len({cell.get("sampler") for cell in self.cells if drafts(cell)}) > 1
        return ", ".join(
            f"{name} {cell.get('num_speculative_tokens')}" + (f" with {cell.get('sampler')}" if several else "")
            for name, cell in self.drafting.items()
        )

    @property
    def where(self) -> str:
        """The temperature, the batch size, and the settings that were chosen."""
        settings = self.chosen_settings
        chosen = (
            f", each proposer with the longest draft allowed that was fastest there ({settings})" if settings else ""
        )
        return f"At temperature {number(self.temperature)} and batch size {number(self.batch_size)}{chosen}."

    def along(self, cell: Cell, key: str) -> list[Cell]:
        """The cells that differ from one in this key at most, in its order."""
        fixed = [each for each in SETTINGS if each != key]
        found = [each for each in self.cells if all(each.get(name) == cell.get(name) for name in fixed)]
        return sorted(found, key=lambda each: each[key])

    def values(self, key: str) -> list[Any]:
        """What the cells of proposers that are drawn have there, in order."""
        return sorted({each[key] for cell in self.drafting.values() for each in self.along(cell, key)})


def named(cell: Cell) -> str:
    """The proposer as the page calls it; a rule that changes the target's law is marked wherever it occurs."""
    return f"{cell['proposer']} (not lossless)" if cell.get("lossless") is False else cell["proposer"]


def drafts(cell: Cell) -> bool:
    """Whether it is this program's decoding with a draft."""
    return cell["proposer"] != PLAIN and not cell.get("peer")


def fastest(cells: Iterable[Cell]) -> dict[str, Cell]:
    """By name, in order, the cell with the highest speedup."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if speedup(cell) > speedup(found.setdefault(named(cell), cell)):
            found[named(cell)] = cell
    return found


def speedup(cell: Cell) -> float:
    """Its mean; 0 where none was measured."""
    return (summary(cell).get("speedup") or {}).get("mean") or 0.0


def summary(cell: Cell) -> Mapping[str, Any]:
    """What was measured over all prompts."""
    return cell.get("summary") or {}


def drawn(result: Mapping[str, Any]) -> list[Drawn]:
    """The charts for which there is something to draw."""
    if not result.get("cells"):
        return []
    view = View.of(result)
    charts = (_by_category, _by_gamma, _by_temperature, _by_batch_size, _by_position, _time)
    return [each for each in (make(view) for make in charts) if each]


def _by_category(view: View) -> Drawn | None:
    shown = {name: cell for name, cell in view.chosen.items() if name != PLAIN}
    categories = dict.fromkeys(category for cell in shown.values() for category in cell.get("categories") or ())
    blocks = {name: {ALL: summary(cell), **(cell.get("categories") or {})} for name, cell in shown.items()}
    series = [
        Series(name, view.looks[name], _points(blocks[name].items(), "speedup", f"{name},", TIMES)) for name in shown
    ]
    if not any(each.points for each in series):
        return None
    axis = "speedup (1: as fast as plain decoding)"
    plot = chart(bars(series, [ALL, *categories], axis, level=1), f"speedup by proposer: {_told(shown, 'speedup')}")
    kinds = " for each kind of prompt" if categories else ""
    few = " A kind with few prompts has a long one, which may go on beyond the chart." if categories else ""
    caption = (
        f"How many times as fast as plain decoding each proposer was{kinds}. A bar that ends left of the dashed line "
        "made decoding slower. The thin line on a bar is the 95 % interval: where it crosses the dashed line, the "
        f"difference may be chance.{few}"
    )
    return Drawn("Speedup by kind of prompt" if categories else "Speedup", caption, view.where, _wide(plot))


def _by_gamma(view: View) -> Drawn | None:
    rows = {name: view.along(cell, "num_speculative_tokens") for name, cell in view.drafting.items()}
    series = {name: _measured_and_predicted(name, view.looks[name], row) for name, row in rows.items() if len(row) > 1}
    series = {name: each for name, each in series.items() if each[0].points}
    if not series:
        return None
    within = _span(point for each in series.values() for line in each for point in line.points)
    plots = [
        fragment(
            FIGURE,
            plot=chart(lines(each, "drafted tokens (gamma)", "speedup", level=1, within=within), words),
            words=Markup("<b>{}</b> {}").format(name, words),
        )
        for name, each in series.items()
        for words in [_best_lengths(each)]
    ]
    caption = (
        "A longer draft can be accepted further, and costs more: there is a best length. One prediction comes from the "
        "time that drafting and verifying took, the other from the paper's formula, for which checking a draft costs "
        "as much as a plain step however long it is. Above the level dashed line is faster than plain decoding."
    )
    where = f"At temperature {number(view.temperature)} and batch size {number(view.batch_size)}."
    return Drawn("Speedup by draft length", caption, where, fragment(GRID, plots=plots))


def _measured_and_predicted(name: str, look: Look, cells: Sequence[Cell]) -> list[Series]:
    gammas = [(cell["num_speculative_tokens"], summary(cell)) for cell in cells]
    measured = _points(gammas, "speedup", f"{name}, gamma", TIMES)
    predictions = [
        Series(
            words,
            look,
            [
                Point(at, value, words=f"{name}, gamma {at}\n{words}: {value:.2f} {TIMES}")
                for at, block in gammas
                if (value := (block.get("predicted_speedup") or {}).get(kind)) is not None
            ],
            dash,
        )
        for kind, words, dash in (
            ("costs", "predicted from costs", "dash"),
            ("formula", "predicted by the paper's formula", "dot"),
        )
    ]
    return [Series("measured", look, measured), *(each for each in predictions if each.points)]


def _best_lengths(series: Sequence[Series]) -> str:
    """Which length was fastest, and which each prediction holds for it."""
    best = [(each.name, max(each.points, key=lambda point: point.value).at) for each in series]
    told = "".join(f", {name}: {at}" for name, at in best[1:])
    return f"fastest with {best[0][1]} drafted tokens{told}."


def _by_temperature(view: View) -> Drawn | None:
    steps = view.values("temperature")
    if len(steps) < 2:
        return None
    series = _series_along(view, "temperature", "alpha", "of the target's law is covered by the draft's")
    if not any(each.points for each in series):
        return None
    told = "; ".join(f"{each.name}: {_ends(each)}" for each in series if each.points)
    plot = chart(by_step(series, steps, "temperature", "alpha"), f"alpha by temperature. {told}")
    caption = (
        "Alpha is how much of the target's law a draft covers, which is the chance that a drafted token is accepted. "
        "Temperature 0 always takes the most likely token; 1 draws from the model's own law. Upright lines are 95 % "
        "intervals."
    )
    where = f"At batch size {number(view.batch_size)}, drafting as in the first chart ({view.chosen_settings})."
    return Drawn("Acceptance by temperature", caption, where, _wide(plot))


def _by_batch_size(view: View) -> Drawn | None:
    steps = view.values("batch_size")
    if len(steps) < 2:
        return None
    series = _series_along(view, "batch_size", "speedup", TIMES)
    if not any(each.points for each in series):
        return None
    told = "; ".join(f"{each.name}: {_ends(each)}" for each in series if each.points)
    plot = chart(by_step(series, steps, "batch size", "speedup", level=1), f"speedup by batch size. {told}")
    caption = (
        "Requests that are decoded together share each reading of the weights: plain decoding gets better, and "
        "checking a draft is no longer almost free. Above the dashed line drafting pays; a cross marks where a curve "
        f"meets it, its break-even. {_break_even(series)}"
    )
    where = f"At temperature {number(view.temperature)}, drafting as in the first chart ({view.chosen_settings})."
    return Drawn("Speedup by batch size", caption, where, _wide(plot))


def _series_along(view: View, key: str, name: str, unit: str) -> list[Series]:
    word = key.replace("_", " ")
    return [
        Series(
            proposer,
            view.looks[proposer],
            _points(
                [(each[key], summary(each)) for each in view.along(cell, key)],
                name,
                f"{proposer}, {word}",
                unit,
            ),
        )
        for proposer, cell in view.drafting.items()
    ]


def _break_even(series: Sequence[Series]) -> str:
    """What happens to each curve on its way through the sizes, in words."""
    return " ".join(
        f"{each.name} {'stops' if before.value > 1 else 'starts'} paying between {before.at} and {after.at}."
        for each in series
        for before, after, _ in crossings(each.points, 1)
    )


def _by_position(view: View) -> Drawn | None:
    series = [Series(name, view.looks[name], _positions(name, cell)) for name, cell in view.drafting.items()]
    series = [each for each in series if each.points]
    if not series:
        return None
    steps = list(range(1, max(len(each.points) for each in series) + 1))
    told = "; ".join(f"{each.name}: {_ends(each)}" for each in series)
    plot = chart(by_step(series, steps, "place in the draft", "share of drafts"), f"acceptance by place. {told}")
    caption = (
        "How often a draft was right up to its first, second, third ... token, of the drafts that were so long. A "
        "token counts only if all before it were accepted, so the curves fall, but for the few drafts that were long "
        "because they were likely; where one has come down, a longer draft is wasted."
    )
    return Drawn("Acceptance by place in the draft", caption, view.where, _wide(plot))


def _positions(name: str, cell: Cell) -> list[Point]:
    counts = summary(cell).get("spec_decode") or {}
    reached = counts.get("per_position_acceptance") or []
    conditional = counts.get("per_position_conditional") or [None] * len(reached)
    points = []
    for place, (share, after) in enumerate(zip(reached, conditional, strict=False), 1):
        if share is None:
            break
        alone = "" if after is None else f"\n{after:.0%} of those whose earlier tokens were accepted"
        points.append(
            Point(place, share, words=f"{name}, token {place}\n{share:.0%} of drafts accepted up to here{alone}")
        )
    return points


def _time(view: View) -> Drawn | None:
    shares = {name: _time_shares(cell) for name, cell in view.chosen.items()}
    shares = {name: each for name, each in shares.items() if each}
    if not set(shares) - {PLAIN}:
        return None
    series = [
        Series(
            part,
            look,
            [
                Point(name, each[part], words=f"{name}, {part}\n{each[part]:.0%} of the time of a plain token")
                for name, each in shares.items()
            ],
        )
        for part, look in PARTS.items()
    ]
    axis = "time per new token (1: that of plain decoding)"
    told = ", ".join(f"{name} {sum(each.values()):.2f}" for name, each in shares.items())
    plot = chart(stacked(series, list(shares), axis, level=1), f"time per token over that of plain decoding: {told}")
    caption = (
        "How long one new token took, and on what: verify is the passes of the target, draft the guessing, accept the "
        "decision which drafted tokens stay, other all else. A bar that ends left of the dashed line is faster than "
        "plain decoding. The prompt's own pass is left out."
    )
    return Drawn("Where the time goes", caption, view.where, _wide(plot))


def _time_shares(cell: Cell) -> dict[str, float]:
    """Time per token by part, over that of plain decoding; empty where it was not measured."""
    timing = {part: (summary(cell).get("timing") or {}).get(part) or 0.0 for part in PARTS}
    total, faster = sum(timing.values()), speedup(cell)
    return {part: seconds / total / faster for part, seconds in timing.items()} if total and faster else {}


def _points(blocks: Iterable[tuple[Any, Mapping[str, Any]]], name: str, opening: str, unit: str) -> list[Point]:
    """The figure {mean, low, high} of each block that has it; `opening` begins what it says of itself."""
    points = []
    for at, block in blocks:
        figure = block.get(name) or {}
        if figure.get("mean") is not None:
            words = f"{opening} {number(at)}\n{interval(figure)} {unit}{_beside(block)}"
            points.append(Point(at, figure["mean"], figure.get("low"), figure.get("high"), words))
    return points


def _beside(block: Mapping[str, Any]) -> str:
    told = [(block.get("tokens_per_target_pass"), "tokens per target pass"), (block.get("tokens_per_s"), "tokens/s")]
    words = ", ".join(f"{number(value)} {what}" for value, what in told if value is not None)
    return words and f"\n{words}"


def _span(points: Iterable[Point]) -> tuple[float, float]:
    """From below the lowest to above the highest of the points, their intervals, and 1."""
    values = [1.0, *(v for point in points for v in (point.value, point.low, point.high) if v is not None)]
    low, high = min(values), max(values)
    room = ROOM * ((high - low) or 1)
    return low - room, high + room


def _ends(series: Series) -> str:
    first, last = series.points[0], series.points[-1]
    return f"{first.value:.2f} at {first.at} to {last.value:.2f} at {last.at}"


def _told(cells: Mapping[str, Cell], name: str) -> str:
    return ", ".join(f"{each} {interval(summary(cell).get(name)) or ABSENT}" for each, cell in cells.items())


def _wide(plot: Markup) -> Markup:
    return fragment(FIGURE, plot=plot, kind="wide")
