"""Tables that sort when a head is pressed, by mouse or by key; what has no value comes last either way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from specpipe.report.page import beside, fragment

STYLE = Markup("""
.sortable thead button { padding: 0; border: 0; background: none; color: inherit; font: inherit; text-align: inherit;
  cursor: pointer; }
.sortable thead button:focus-visible { outline: 2px solid var(--bar); outline-offset: 2px; }
.sortable thead button::after { content: "\\a0↕"; opacity: .45; }
.sortable thead [aria-sort] { color: var(--ink); }
.sortable thead [aria-sort] button::after { opacity: 1; }
.sortable thead [aria-sort="ascending"] button::after { content: "\\a0↑"; }
.sortable thead [aria-sort="descending"] button::after { content: "\\a0↓"; }
.sortable .words { text-align: left; }
.sortable .marked > * { color: var(--dim); }
""")

SORTABLE = """\
<div class="scroll">
<table class="sortable">
<thead><tr>
{% for word, words in head %}
<th scope="col"{% if words %} class="words"{% endif %}><button type="button">{{ word }}</button></th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in rows %}
<tr{% if row.marked %} class="marked"{% endif %}>
{%- for entry, words in row.entries %}
{% set tag = "th" if loop.first else "td" %}
{% set class = " ".join((["words"] if words else []) + ([entry.tone] if entry.tone else [])) %}
<{{ tag }}{% if loop.first %} scope="row"{% endif %}{% if class %} class="{{ class }}"{% endif %} \
data-by="{{ "" if entry.by is none else entry.by }}">{{ entry.value | number }}</{{ tag }}>
{%- endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
"""


class Entry(NamedTuple):
    """What stands in a table, by what it is sorted (a number or a word, None where there is none), and its tone."""

    value: Any
    by: float | str | None
    tone: str = ""


class Row(NamedTuple):
    """The row's name, then an Entry or a plain value per column; `marked`: of another kind than the rest."""

    entries: Sequence[Any]
    marked: bool = False


def sortable(head: Sequence[str], rows: Sequence[Row]) -> Markup:
    """A table whose columns sort; a column of numbers begins with the largest, one of words with A."""
    entries = [[_entry(value) for value in row.entries] for row in rows]
    words = [any(isinstance(row[i].by, str) for row in entries) for i in range(len(head))]
    return fragment(
        SORTABLE,
        head=list(zip(head, words, strict=True)),
        rows=[
            {"entries": list(zip(filled, words, strict=True)), "marked": row.marked}
            for filled, row in zip(entries, rows, strict=True)
        ],
    )


def sorting() -> Markup:
    """What sorts the tables of the page; stands once, behind them."""
    return fragment("<script>{{ script }}</script>\n", script=beside("sortable.js"))


def _entry(value: Any) -> Entry:
    return value if isinstance(value, Entry) else Entry(value, value)
