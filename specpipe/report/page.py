"""The parts of every page: a skeleton with its styles inside, tables, lists of facts, and two charts.

A page is one file that needs no network, on a phone as on a desk, in the light as in the dark. Whatever is put into it
is escaped, unless it is `Markup` made here. Knows nothing about what the pages say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup

HERE = Path(__file__).parent
GOOD, BAD, WARN = "good", "bad", "warn"  # tones; the styles know them as classes
ABSENT = "–"

WIDTH, HEIGHT = 320, 130  # of a chart, in units of about a CSS pixel
LEFT, BOTTOM, TOP = 34, 16, 6  # room for the axes' words
DOT = 3  # radius
MOST_DOTS = 60  # a line of more points is drawn without a dot for each

STYLE = Markup("""
:root {
  color-scheme: light dark;
  --paper: #fdfdfc; --ink: #1c1e21; --dim: #5f6670; --line: #d9dce0;
  --bar: #7d9cc0; --out: #cf8a1c; --band: #7d9cc038; --good: #1a7f37; --bad: #c0262d; --warn: #9a6700;
  --good-tint: #1a7f371a; --bad-tint: #c0262d26; --warn-tint: #9a67001f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181b; --ink: #e4e6e8; --dim: #9aa2ac; --line: #373c43;
    --bar: #5f82ab; --out: #e3b341; --band: #7d9cc033;
    --good: #56d364; --bad: #ff7b72; --warn: #e3b341;
    --good-tint: #56d36421; --bad-tint: #ff7b7233; --warn-tint: #e3b34126;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
section { margin-top: 2rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h1 { margin: 0; font-size: clamp(2.2rem, 11vw, 4.2rem); line-height: 1.1; letter-spacing: -.02em; }
h2 { display: flex; flex-wrap: wrap; align-items: center; gap: .3rem .8rem; margin: 0 0 .5rem; font-size: 1.3rem; }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
ul { padding-left: 1.2rem; }
.lead { font-size: 1.15rem; }
.small, figcaption, footer { color: var(--dim); font-size: .875rem; }
.badge { padding: .05rem .6rem; border-radius: 1rem; border: 1px solid currentColor; font-size: .875rem;
  font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.badge.good, td.good { background: var(--good-tint); }
.badge.bad, td.bad { background: var(--bad-tint); }
.badge.warn, td.warn { background: var(--warn-tint); }
td { white-space: nowrap; }
td.bad { font-weight: 700; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(max(9.5rem, 20%), 1fr)); gap: .8rem 1.5rem;
  margin: 1rem 0; }
dt { color: var(--dim); font-size: .875rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: bottom; }
th { font-weight: 600; }
thead th { color: var(--dim); }
tr > :first-child { position: sticky; left: 0; background: var(--paper); text-align: left; }
tbody th { font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); gap: 1.2rem 1.5rem;
  margin: 1rem 0; }
figure { margin: 0; max-width: 26rem; }
figcaption b { color: var(--ink); }
figure > svg { display: block; width: 100%; height: auto; }
figure > svg text { fill: currentColor; font-size: 10px; opacity: .75; }
figure > svg .bar { fill: var(--bar); } figure > svg .bar.out { fill: var(--out); }
figure > svg .band { fill: var(--band); }
figure > svg line { stroke: currentColor; } figure > svg .level { stroke-dasharray: 4 3; }
figure > svg polyline { fill: none; stroke: var(--bar); stroke-width: 2; stroke-linejoin: round; }
figure > svg polyline.second { stroke: var(--out); stroke-dasharray: 5 3; }
figure > svg circle { fill: var(--bar); } figure > svg circle.second { fill: var(--out); }
.named { margin-left: .6em; white-space: nowrap; }
.key { display: inline-block; width: 1.6em; margin: 0 .3em .25em 0; border-top: 2px solid var(--bar); }
.key.second { border-top: 2px dashed var(--out); }
pre { padding: .6rem .8rem; border: 1px solid var(--line); white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 2rem; }
code { font-size: .9em; }
""")

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
{{ body }}
</main>
</body>
</html>
"""

FACTS = """\
<dl>
{% for name, value in pairs %}
<div><dt>{{ name }}</dt><dd>{{ value | number }}</dd></div>
{% endfor %}
</dl>
"""

TABLE = """\
<div class="scroll">
<table>
<thead><tr>{% for word in head %}<th scope="col">{{ word }}</th>{% endfor %}</tr></thead>
<tbody>
{% for name, cells in rows %}
<tr><th scope="row">{{ name | number }}</th>
{%- for cell in cells %}<td{% if cell.tone %} class="{{ cell.tone }}"{% endif %}>{{ cell.value | number }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
"""

HISTOGRAM = """\
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ label }}">
{% for bar in bars %}
<rect class="bar{{ ' out' if bar.outside }}" x="{{ bar.x }}" y="{{ bar.y }}" width="{{ bar.width }}" \
height="{{ bar.height }}"><title>{{ bar.words }}</title></rect>
{% endfor %}
<rect class="band" x="{{ left }}" y="{{ band[0] }}" width="{{ width - left }}" height="{{ band[1] }}"/>
<line class="level" x1="{{ left }}" x2="{{ width }}" y1="{{ level }}" y2="{{ level }}"/>
<line x1="{{ left }}" x2="{{ width }}" y1="{{ floor }}" y2="{{ floor }}"/>
<text x="{{ left - 4 }}" y="{{ level + 3.5 }}" text-anchor="end">{{ expected | number }}</text>
<text x="{{ left - 4 }}" y="{{ floor }}" text-anchor="end">0</text>
{% for words, x, anchor in ticks %}
<text x="{{ x }}" y="{{ height - 4 }}" text-anchor="{{ anchor }}">{{ words }}</text>
{% endfor %}
</svg>
"""

CURVES = """\
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ label }}">
<line x1="{{ left }}" x2="{{ width }}" y1="{{ floor }}" y2="{{ floor }}"/>
{% for curve in curves %}
<polyline class="{{ curve.pen }}" points="{{ curve.path }}"/>
{% for x, y, words in curve.dots %}
<circle class="{{ curve.pen }}" cx="{{ x }}" cy="{{ y }}" r="{{ dot }}"><title>{{ words }}</title></circle>
{% endfor %}
{% endfor %}
{% for words, x, y, anchor in ticks %}
<text x="{{ x }}" y="{{ y }}" text-anchor="{{ anchor }}">{{ words | number }}</text>
{% endfor %}
</svg>
"""

KEY = """\
{% for name, pen in names %}
<span class="named"><span class="key {{ pen }}"></span>{{ name }}</span>
{% endfor %}
"""

PENS = ("", "second")  # classes of a chart's curves: they differ in colour, and the second is dashed


class Cell(NamedTuple):
    """What stands in a table, and its tone: GOOD, BAD, WARN or none."""

    value: Any
    tone: str = ""


class Bar(NamedTuple):
    """One bar of a chart, in its units; `outside` of the band in which it should end."""

    x: float
    y: float
    width: float
    height: float
    outside: bool
    words: str


class Curve(NamedTuple):
    """One curve of a chart, in its units: a line, and dots with words."""

    pen: str
    path: str
    dots: list[tuple[float, float, str]]


def page(title: str, body: Markup, style: Markup = STYLE) -> str:
    """A whole HTML file; `style` is STYLE and what a page adds to it."""
    text = str(fragment(PAGE, title=title, body=body, style=style))
    return text.encode(errors="backslashreplace").decode()  # a file's name may hold bytes that are no UTF-8


def fragment(source: str, **values: Any) -> Markup:
    """A piece of HTML from a jinja2 template, with all values escaped that are not Markup."""
    return Markup(_template(source).render(**values))


def beside(name: str) -> Markup:
    """A file beside this one, style or script, part of the page as it is."""
    return Markup((HERE / name).read_text("utf-8"))


def embedded(data: Mapping[str, Any]) -> Markup:
    """JSON that stands in a script element: no text in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def badge(word: str, tone: str = "") -> Markup:
    """A word in a coloured frame."""
    return fragment('<span class="badge {{ tone }}">{{ word }}</span>', word=word, tone=tone)


def facts(pairs: Iterable[tuple[str, Any]]) -> Markup:
    """Names with values, those left out that are None."""
    return fragment(FACTS, pairs=[(name, value) for name, value in pairs if value is not None])


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        head: of the columns.
        rows: a row's name first, then a Cell or a plain value per column.
    """
    return fragment(TABLE, head=head, rows=[(name, [_cell(value) for value in rest]) for name, *rest in rows])


def histogram(counts: Sequence[int], label: str, *, expected: float, spread: float) -> Markup:
    """Counts of numbers between 0 and 1 in equal bins, as an SVG chart that starts at 0.

    Args:
        counts: one per bin.
        label: for who cannot see the chart.
        expected: a line at this count.
        spread: a band so far above and below the line; bars that end outside of it have another colour.
    """
    highest = max(*counts, expected + spread, 1)
    floor = HEIGHT - BOTTOM
    unit = (floor - TOP) / highest
    low, high = max(0.0, expected - spread), expected + spread
    return fragment(
        HISTOGRAM,
        label=label,
        bars=_bars(counts, unit, floor, (low, high)),
        expected=round(expected, 1),
        level=round(floor - unit * expected, 2),
        band=(round(floor - unit * high, 2), round(unit * (high - low), 2)),
        ticks=[("0", LEFT, "start"), ("U", (LEFT + WIDTH) / 2, "middle"), ("1", WIDTH, "end")],
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        floor=floor,
    )


def curves(points: Mapping[str, Sequence[tuple[int, float]]], label: str, axis: str = "step") -> Markup:
    """One or two curves over the same steps, as an SVG chart from the lowest value to the highest.

    Args:
        points: by name, at least one (step, value) each, in order; the axis of steps begins at 0.
        label: for who cannot see the chart.
        axis: what a step is called.
    """
    steps, values = zip(*(point for line in points.values() for point in line), strict=True)
    last, low, high = max(*steps, 1), min(values), max(values)
    floor = HEIGHT - BOTTOM
    across, up = (WIDTH - LEFT - DOT) / last, (floor - 2 * TOP) / ((high - low) or 1)
    placed = {
        name: [(round(LEFT + step * across, 2), round(floor - TOP - (value - low) * up, 2)) for step, value in line]
        for name, line in points.items()
    }
    return fragment(
        CURVES,
        label=label,
        curves=[
            Curve(pen, " ".join(f"{x},{y}" for x, y in placed[name]), _dots(f"{name}, {axis}", line, placed[name]))
            for pen, (name, line) in zip(PENS, points.items(), strict=False)
        ],
        ticks=[
            *([(high, LEFT - 4, TOP + 3.5, "end")] if high > low else []),
            (low, LEFT - 4, floor - TOP + 3.5, "end"),
            (0, LEFT, HEIGHT - 4, "start"),
            (axis, (LEFT + WIDTH) / 2, HEIGHT - 4, "middle"),
            (last, WIDTH, HEIGHT - 4, "end"),
        ],
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        floor=floor,
        dot=DOT,
    )


def key(names: Sequence[str]) -> Markup:
    """What the curves of a chart are, by how they are drawn."""
    return fragment(KEY, names=list(zip(names, PENS, strict=False)))


def number(value: Any) -> Any:
    """Numbers as people read them, three digits and grouped thousands; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ABSENT if value is None else value
    if not math.isfinite(value):
        return ABSENT if math.isnan(value) else "∞" if value > 0 else "-∞"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def interval(block: Mapping[str, Any] | None) -> str | None:
    """`1.52 [1.41, 1.64]` for {mean, low, high}; the mean alone where it has no interval, None where there is none."""
    mean, low, high = ((block or {}).get(name) for name in ("mean", "low", "high"))
    if mean is None:
        return None
    return f"{mean:.2f}" if low is None or high is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def _bars(counts: Sequence[int], unit: float, floor: float, band: tuple[float, float]) -> list[Bar]:
    step = (WIDTH - LEFT) / len(counts)
    return [
        Bar(
            x=round(LEFT + i * step + 0.5, 2),
            y=round(floor - unit * count, 2),
            width=round(step - 1, 2),
            height=round(unit * count, 2),
            outside=not band[0] <= count <= band[1],
            words=f"{i / len(counts):.3f} to {(i + 1) / len(counts):.3f}: {count}",
        )
        for i, count in enumerate(counts)
    ]


def _dots(
    opening: str, line: Sequence[tuple[int, float]], places: Sequence[tuple[float, float]]
) -> list[tuple[float, float, str]]:
    if len(line) > MOST_DOTS:
        return []
    words = [f"{opening} {step}: {number(value)}" for step, value in line]
    return [(x, y, said) for (x, y), said in zip(places, words, strict=True)]


def _cell(value: Any) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


@cache
def _template(source: str) -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    return environment.from_string(source)
