"""Charts that plotly draws: figures from plain values, and what a page needs to show them.

A figure stands in the page as JSON, the library once as it is, so that the page needs no network. Colours of text,
lines and grids are the page's own and follow its light and dark; charts.js sees to that. Knows nothing about what is
drawn.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from specpipe.report.page import beside, embedded, fragment, number

# Okabe and Ito's, which the colour-blind can tell apart, without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#8A8F98"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon", "hexagram", "bowtie", "hexagon")
HATCHES = ("", "/", "x", ".", "-", "|", "+")

BAR, GAP = 11, 14  # px: one bar, and the space between two groups of bars
AXES = 90  # px of a chart for its axis and its key
TALL = 320  # px of a chart of curves
SMALL = 230  # px of one of several that stand side by side
LABEL = 22  # characters of a group's name in a line
ROOM = 1.03  # of an axis of bars: its length over the longest thing on it
FURTHEST = 1.25  # times the longest bar an interval is drawn to
DODGE = 0.03  # of a step of the axis between two curves' points, so that their intervals stand side by side

STYLE = Markup("""
figure { min-width: 0; }
figure.wide { max-width: none; margin: .5rem 0 1rem; }
.plot { width: 100%; overflow: hidden; }
.charts figcaption { margin-bottom: .2rem; }
""")

CHART = """\
<script type="application/json">{{ figure }}</script>
<div class="plot" role="img" aria-label="{{ label }}" style="height: {{ height }}px"></div>
"""

DRAWING = """\
<noscript><p>The charts are drawn by this page's own script, which the browser does not run; the tables have their
numbers.</p></noscript>
<script>{{ library }}</script>
<script>{{ script }}</script>
"""


class Look(NamedTuple):
    """How something is drawn wherever it occurs: by colour, and for who cannot tell colours by symbol and hatch."""

    colour: str
    symbol: str = "circle"
    hatch: str = ""


class Point(NamedTuple):
    """One value: the group or place where it stands, its interval if it has one, what is said when it is pointed at."""

    at: Any
    value: float
    low: float | None = None
    high: float | None = None
    words: str = ""


class Series(NamedTuple):
    """Values that belong together: bars of one look, or one curve (`dash`: solid, dash or dot; solid has symbols)."""

    name: str
    look: Look
    points: Sequence[Point]
    dash: str = "solid"


def looks(names: Sequence[str], greys: Sequence[str] = ()) -> dict[str, Look]:
    """A look for each name; `greys` are drawn in grey, as what the others are measured against."""
    coloured = {
        name: Look(COLOURS[i % len(COLOURS)], SYMBOLS[i % len(SYMBOLS)], HATCHES[i // len(COLOURS) % len(HATCHES)])
        for i, name in enumerate(names)
    }
    grey = {name: Look(GREY, SYMBOLS[-1 - i % len(SYMBOLS)], HATCHES[i % len(HATCHES)]) for i, name in enumerate(greys)}
    return coloured | grey


def bars(series: Sequence[Series], groups: Sequence[str], axis: str, *, level: float | None = None) -> go.Figure:
    """Groups of lying bars from 0, each with its interval, from the top in the given orders.

    Args:
        series: their points stand at names of groups.
        groups: from the top.
        axis: what is measured.
        level: an upright line at this value.
    """
    figure = _lying(series, groups, axis, level, rows=max(1, len(series)), barmode="group")
    figure.update_xaxes(range=[0, _reach(series, level)])
    return figure


def _reach(series: Sequence[Series], level: float | None) -> float:
    """Where the axis ends: behind all values and intervals, but for intervals that would leave no room for the bars."""
    points = [point for each in series for point in each.points]
    longest = max([*(point.value for point in points), level or 0.0, 1e-9])
    ends = [min(point.high, FURTHEST * longest) for point in points if point.high is not None]
    return ROOM * max([longest, *ends])


def stacked(series: Sequence[Series], groups: Sequence[str], axis: str, *, level: float | None = None) -> go.Figure:
    """One lying bar for each group, made of the values of all series, one behind the other."""
    return _lying(series, groups, axis, level, rows=2, barmode="stack")


def lines(
    series: Sequence[Series], across: str, up: str, *, level: float | None = None, within: tuple[float, float]
) -> go.Figure:
    """A small chart of curves over a numeric axis, one of several whose heights compare: all span `within`."""
    drawn = [_curve(each, [point.at for point in each.points]) for each in series]
    places = sorted({point.at for each in series for point in each.points})
    figure = go.Figure(drawn, _layout(SMALL))
    figure.update_layout(showlegend=False)
    figure.update_xaxes(title_text=across, tickvals=places)
    figure.update_yaxes(title_text=up, range=within)
    return _levelled(figure, level)


def by_step(
    series: Sequence[Series], steps: Sequence[Any], across: str, up: str, *, level: float | None = None
) -> go.Figure:
    """Curves over the same few settings, which stand at equal distances: from 0, or about a level.

    A cross marks where a curve meets the level.
    """
    place = {step: i for i, step in enumerate(steps)}
    shifts = [(i - (len(series) - 1) / 2) * DODGE for i in range(len(series))]
    drawn = [
        _curve(each, [place[point.at] + shift for point in each.points])
        for each, shift in zip(series, shifts, strict=True)
    ]
    if level is not None:
        drawn += [cross for each in series if (cross := _crosses(each, place, level)).x]
    figure = go.Figure(drawn, _layout(TALL))
    figure.update_xaxes(
        title_text=across,
        tickvals=list(place.values()),
        ticktext=[str(number(step)) for step in steps],
        range=[-0.4, len(steps) - 0.6],
    )
    figure.update_yaxes(title_text=up, rangemode="tozero" if level is None else "normal")
    return _levelled(figure, level)


def crossings(points: Sequence[Point], level: float) -> Iterator[tuple[Point, Point, float]]:
    """Neighbours between which the straight line meets the level, and which share of the way lies before it."""
    for before, after in pairwise(points):
        if (before.value - level) * (after.value - level) < 0:
            yield before, after, (level - before.value) / (after.value - before.value)


def chart(figure: go.Figure, label: str) -> Markup:
    """The figure in the page, drawn by `drawing`; `label` is for who cannot see it."""
    return fragment(CHART, figure=embedded(figure.to_plotly_json()), label=label, height=figure.layout.height)


def drawing() -> Markup:
    """The library and what draws the charts of the page; stands once, behind them."""
    return fragment(DRAWING, library=library(), script=beside("charts.js"))


def library() -> Markup:
    """plotly.js, whole, as its package brings it."""
    return Markup(get_plotlyjs())


def _lying(
    series: Sequence[Series], groups: Sequence[str], axis: str, level: float | None, *, rows: int, barmode: str
) -> go.Figure:
    height = len(groups) * (rows * BAR + GAP) + AXES
    gap = GAP / (rows * BAR + GAP)
    figure = go.Figure([_bars(each) for each in series], _layout(height, barmode=barmode, bargap=gap))
    figure.update_xaxes(title_text=axis, rangemode="tozero")
    names = [_label(group) for group in groups]
    figure.update_yaxes(type="category", categoryarray=names, range=[len(names) - 0.5, -0.5], showgrid=False)
    return _levelled(figure, level, upright=True)


def _bars(series: Series) -> go.Bar:
    points, look = series.points, series.look
    return go.Bar(
        name=_escaped(series.name),
        orientation="h",
        x=[point.value for point in points],
        y=[_label(point.at) for point in points],
        error_x=_intervals(points),
        marker={"color": look.colour, "pattern": {"shape": look.hatch, "fillmode": "replace", "size": 6}},
        hovertext=[_escaped(point.words) for point in points],
        hoverinfo="text",
    )


def _curve(series: Series, places: Sequence[float]) -> go.Scatter:
    points, look = series.points, series.look
    return go.Scatter(
        name=_escaped(series.name),
        mode="lines+markers" if series.dash == "solid" else "lines",
        x=places,
        y=[point.value for point in points],
        error_y=_intervals(points, look.colour),
        line={"color": look.colour, "dash": series.dash, "width": 2},
        marker={"color": look.colour, "symbol": look.symbol, "size": 9},
        hovertext=[_escaped(point.words) for point in points],
        hoverinfo="text",
    )


def _crosses(series: Series, place: dict[Any, int], level: float) -> go.Scatter:
    found = list(crossings(series.points, level))
    between = [_escaped(f"{series.name}: between {before.at} and {after.at}") for before, after, _ in found]
    return go.Scatter(
        mode="markers",
        x=[place[before.at] + share * (place[after.at] - place[before.at]) for before, after, share in found],
        y=[level] * len(found),
        marker={"color": series.look.colour, "symbol": "x", "size": 12, "line": {"width": 1}},
        hovertext=between,
        hoverinfo="text",
        showlegend=False,
    )


def _intervals(points: Sequence[Point], colour: str | None = None) -> dict[str, Any] | None:
    """Lines through the points from low to high; without a colour the page's ink, on what has one of its own."""
    if all(point.low is None or point.high is None for point in points):
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [None if point.high is None else point.high - point.value for point in points],
        "arrayminus": [None if point.low is None else point.value - point.low for point in points],
        "thickness": 1.5,
        "width": 3,
        "color": colour,
    }


def _layout(height: int, **more: Any) -> go.Layout:
    clear = "rgba(0, 0, 0, 0)"
    axis = {"automargin": True, "fixedrange": True, "zeroline": False, "title": {"font": {"size": 13}}}
    return go.Layout(
        template="none",
        height=height,
        autosize=True,
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        font={"family": "system-ui, sans-serif", "size": 13},
        hovermode="closest",
        dragmode=False,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        xaxis={**axis, "ticks": "outside"},
        yaxis={**axis, "ticks": ""},
        **more,
    )


def _levelled(figure: go.Figure, level: float | None, *, upright: bool = False) -> go.Figure:
    if level is not None:
        across = {"xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level}
        up = {"yref": "paper", "y0": 0, "y1": 1, "x0": level, "x1": level}
        figure.add_shape(type="line", line={"width": 1.5, "dash": "dash"}, **(up if upright else across))
    return figure


def _label(name: str) -> str:
    return "<br>".join(_escaped(line) for line in textwrap.wrap(str(name), LABEL) or [""])


def _escaped(text: str) -> str:
    """plotly knows some HTML; what is said has none, but for the ends of its lines."""
    return html.escape(str(text), quote=False).replace("\n", "<br>")
