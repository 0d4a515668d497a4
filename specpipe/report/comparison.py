"""The page of `specpipe report`: several runs side by side, from the result.json that the command wrote.

Knows rows, not what kind of run they came from; every row names its run, and every run its folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from specpipe.report import charts, sortable
from specpipe.report.bench_charts import PLAIN, named
from specpipe.report.charts import Look, Point, Series, chart, looks, stacked
from specpipe.report.page import STYLE, WARN, badge, facts, fragment, interval, number, page, table
from specpipe.report.sortable import Entry

Row = Mapping[str, Any]  # of `rows` in result.json

BODY = """\
<header>
<p class="small">specpipe report</p>
<h1>{{ word }}</h1>
<p class="lead">{{ lead }}</p>
{% for warning in warnings %}
<p>{{ badge }} {{ warning }}</p>
{% endfor %}
</header>
<section>
<h2>The runs</h2>
{{ runs }}
{{ where }}
</section>
{% for heading, caption, plot in charts %}
<section>
<h2>{{ heading }}</h2>
<p class="small">{{ caption }}</p>
<figure class="wide">{{ plot }}</figure>
</section>
{% endfor %}
<section>
<h2>All rows</h2>
{% if rows %}
<p class="small">95 % intervals in brackets. Press a head to sort by it.</p>
{{ rows }}
{% else %}
<p>None of the runs has measured anything yet.</p>
{% endif %}
</section>
<section>
<h2>What differs</h2>
{% if differences %}
<p class="small">The keys of the configs that are not the same in all runs of a command.</p>
{{ differences }}
{% else %}
<p>Nothing: runs of the same command have the same config.</p>
{% endif %}
</section>
<section>
<h2>How to read this</h2>
<ul>
<li><b>Speedup</b> is over plain decoding that took turns with the rest in the same run; only a bench has it. Tokens/s
are of a run by itself: another run had another machine, or the same one at another hour.</li>
<li><b>Tokens per pass</b>: new tokens over passes of the target; plain decoding has 1. Of a training it is tau, counted
on the text that was held out.</li>
<li><b>Alpha</b>: how much of the target's law the draft's covers; the chance that a drafted token is accepted under the
rejection rule.</li>
<li><b>Gamma</b>: how many tokens are drafted in a step at most. <b>c</b>: the time of drafting one token over that of
a plain step.</li>
<li><b>Interval</b> [low, high]: the prompts are a sample of those there could be; of intervals made so, 19 of 20 hold
the figure of all of them.</li>
</ul>
</section>
<footer>
<p>Beside this page, <code>result.json</code> holds every row; each number comes from the <code>result.json</code> in
the folder of its run.</p>
</footer>
{{ scripts }}
"""

WORDS = {
    "run": "run",
    "proposer": "proposer",
    "sampler": "sampler",
    "temperature": "temperature",
    "batch_size": "batch size",
    "num_speculative_tokens": "gamma",
    "speedup": "speedup",
    "tokens_per_s": "tokens/s",
    "tokens_per_target_pass": "tokens per pass",
    "alpha": "alpha",
    "cost_ratio": "c",
}
SHORT = {"num_speculative_tokens": "gamma", "temperature": "T", "batch_size": "batch"}  # in the names of bars
LEVELS = {"speedup": 1.0, "tokens_per_s": None, "tokens_per_target_pass": 1.0, "alpha": None}
CAPTIONS = {
    "speedup": "Times as fast as plain decoding in the same run. A bar that ends left of the dashed line was slower.",
    "tokens_per_s": "New tokens per second, behind the prompt's own pass.",
    "tokens_per_target_pass": "The dashed line is plain decoding; what is right of it was drafted and accepted.",
    "alpha": "How much of the target's law the drafts cover: the chance that a drafted token is accepted.",
}
MANY = " Of each proposer at each temperature and batch size of a run the fastest setting; the table has all."
NO_ROWS = "There is nothing to compare yet."


def comparison_page(result: Mapping[str, Any]) -> str:
    """The HTML file for the content of result.json."""
    runs, rows = result["runs"], result["rows"]
    body = fragment(
        BODY,
        word=f"{len(runs)} run{'s' if len(runs) > 1 else ''}",
        lead=_lead(rows, result["mixed"]),
        badge=badge("mind", WARN),
        warnings=result["warnings"],
        runs=_runs(runs),
        where=facts([("in", _above(runs))]),
        charts=_charts(rows),
        rows=_rows(rows) if rows else None,
        differences=_differences(result["differences"], runs),
        scripts=charts.drawing() + sortable.sorting(),
    )
    return page("specpipe report", body, STYLE + charts.STYLE + sortable.STYLE)


def shown(rows: Sequence[Row]) -> list[Row]:
    """Those that stand for the rest: each proposer's fastest at each temperature and batch size of a run, in order."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["run"], named(row), row["temperature"], row["batch_size"])
        best[key] = max(best.get(key, row), row, key=_speed)
    return list(best.values())


def mean(figure: Any) -> Any:
    """Of a figure with an interval; anything else as it is."""
    return figure.get("mean") if isinstance(figure, Mapping) else figure


def _speed(row: Row) -> tuple[float, float]:
    return mean(row["speedup"]) or 0.0, row["tokens_per_s"] or 0.0


def _lead(rows: Sequence[Row], mixed: Sequence[str]) -> str:
    """The highest of what says most, and whose it is, if the runs can be compared in it."""
    if rows and {"targets", "prompts"} & set(mixed):
        return f"There is no best of these: the runs have different {' and '.join(mixed)}."
    for name in LEVELS:
        if name == "tokens_per_s" and {"machines", "engines"} & set(mixed):
            continue
        known = [row for row in rows if mean(row[name]) is not None and row["proposer"] != PLAIN]
        if known:
            best = max(known, key=lambda row: mean(row[name]) or 0.0)
            gamma = best["num_speculative_tokens"]
            drafted = "" if gamma is None else f" with {gamma} drafted tokens"
            return f"The highest {WORDS[name]} is {_said(best[name])}: {named(best)}{drafted}, in run {best['run']}."
    return NO_ROWS


def _said(figure: Any) -> str:
    return str(interval(figure) if isinstance(figure, Mapping) else number(figure))


def _runs(runs: Sequence[Mapping[str, Any]]) -> Markup:
    above = _above(runs)
    head = ["run", "command", "folder", "time", "target", "engine", "proposer", "prompts", "git revision", "specpipe"]
    return table(
        head,
        [
            [
                str(each["run"]),
                each["command"],
                os.path.relpath(each["folder"], above),
                each["time"],
                _target(each["target"] or {}),
                each["engine"],
                each["proposer"],
                each["prompts"],
                each["git"] and _revision(each["git"]),
                each["version"],
            ]
            for each in runs
        ],
    )


def _above(runs: Sequence[Mapping[str, Any]]) -> str:
    """The folder in which all of them lie."""
    return os.path.commonpath([str(PurePath(each["folder"]).parent) for each in runs])


def _target(target: Mapping[str, Any]) -> str | None:
    return ", ".join(str(target[name]) for name in ("model", "dtype", "device") if target.get(name)) or None


def _revision(git: str) -> str:
    """Its first ten characters, with the + of a changed checkout."""
    return git[:10] + ("+" if git.endswith("+") else "")


def _charts(rows: Sequence[Row]) -> list[tuple[str, str, Markup]]:
    """Of the figures that some row has."""
    few = shown(rows)
    differing = [name for name in SHORT if len({row[name] for row in few} - {None}) > 1]
    labels = [_label(row, differing) for row in few]
    greys = [row for row in few if row["proposer"] == PLAIN or row["peer"]]
    names = dict.fromkeys(named(row) for row in few if row not in greys)
    look = looks(list(names), list(dict.fromkeys(named(row) for row in greys)))
    more = MANY if len(few) < len(rows) else ""
    drawn = []
    for name, level in LEVELS.items():
        series = _series(name, list(zip(labels, few, strict=True)), look)
        if series:
            groups = [label for label in labels if any(point.at == label for each in series for point in each.points)]
            words = ", ".join(f"{point.at}: {point.value:.3g}" for each in series for point in each.points)
            plot = chart(stacked(series, groups, WORDS[name], level=level), f"{WORDS[name]}: {words}")
            drawn.append((WORDS[name].capitalize(), CAPTIONS[name] + more, plot))
    return drawn


def _label(row: Row, differing: Sequence[str]) -> str:
    settings = [f"{SHORT[name]}\N{NO-BREAK SPACE}{number(row[name])}" for name in differing if row[name] is not None]
    return f"{row['run']}: {', '.join([named(row), *settings])}"


def _series(name: str, rows: Sequence[tuple[str, Row]], look: Mapping[str, Look]) -> list[Series]:
    """One for each proposer, so that it has one colour in all runs."""
    points = [(named(row), _point(label, row[name], name)) for label, row in rows]
    series = [Series(each, look[each], [point for of, point in points if point and of == each]) for each in look]
    return [each for each in series if each.points]


def _point(label: str, figure: Any, name: str) -> Point | None:
    value = mean(figure)
    if value is None:
        return None
    bounds = (figure.get("low"), figure.get("high")) if isinstance(figure, Mapping) else (None, None)
    return Point(label, value, *bounds, words=f"run {label}\n{WORDS[name]} {_said(figure)}")


def _rows(rows: Sequence[Row]) -> Markup:
    known = [name for name in WORDS if any(mean(row[name]) is not None for row in rows)]
    filled = [sortable.Row([_entry(row, name) for name in known], row["peer"]) for row in rows]
    return sortable.sortable([WORDS[name] for name in known], filled)


def _entry(row: Row, name: str) -> Entry:
    value = named(row) if name == "proposer" else row[name]
    return Entry(interval(value) if isinstance(value, Mapping) else value, mean(value))


def _differences(differences: Mapping[str, Sequence[Any]], runs: Sequence[Mapping[str, Any]]) -> Markup | None:
    if not differences:
        return None
    head = ["key", *(f"run {each['run']}" for each in runs)]
    return table(head, [[key, *map(_setting, values)] for key, values in differences.items()])


def _setting(value: Any) -> Any:
    """As it is written in a config."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
