"""The page of `specpipe plan`: the answer, the curve of speedup over gamma, and what was assumed, from result.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from specpipe.report.page import GOOD, Cell, curves, facts, fragment, key, number, page, table

Result = Mapping[str, Any]

BODY = """\
<header>
<p class="small">specpipe plan</p>
<h1>{{ word }}</h1>
<p class="lead">{{ lead }}</p>
</header>
{% if measured %}
<section>
<h2>What was measured</h2>
<p>{{ sentence }}</p>
{{ measured }}
</section>
{% endif %}
<section>
<h2>Speedup by draft length</h2>
<div class="charts">
{% for svg, title, names in charts %}
<figure>{{ svg }}<figcaption><b>{{ title }}</b> {{ names }}</figcaption></figure>
{% endfor %}
</div>
{{ rows }}
</section>
{% if by_batch %}
<section>
<h2>Speedup by batch size</h2>
<p>From the seconds that drafting and checking took at each batch size, against plain decoding of the same size. The
best gamma of each is marked; it falls as the arithmetic of wider passes takes longer than reading the weights.</p>
{{ by_batch }}
</section>
{% endif %}
<section>
<h2>How to read this</h2>
<ul>
<li><b>gamma</b> is the number of tokens drafted in each step; 0 is plain decoding.</li>
<li><b>alpha</b> is the chance that a drafted token is accepted, taken to be the same at every position:
tokens per step = (1 - alpha<sup>gamma+1</sup>) / (1 - alpha), with the extra token that each step has.</li>
<li><b>Cost ratio</b> c is the time of drafting one token over that of a plain step:
speedup = tokens per step / (gamma c + 1). Checking gamma + 1 tokens is taken to cost as much as making one, which holds
as long as reading the weights takes longer than the arithmetic, so not for large batches.</li>
<li><b>Operations</b> are the arithmetic per token over that of plain decoding.</li>
<li><b>Break-even alpha</b>: below it, drafting so many tokens is slower than plain decoding.</li>
{% if by_position %}
<li><b>By position</b> takes the measured chance of reaching each position in place of one alpha, in steps that draft.
</li>
{% endif %}
</ul>
<p class="small">The formulas are those of arXiv 2211.17192 (equation 1, theorems 3.8 and 3.11).</p>
</section>
<footer>
<p>Beside this page, <code>result.json</code> holds every number, <code>provenance.json</code> the command line.</p>
</footer>
"""

ROW = {
    "gamma": "gamma",
    "tokens per step": "expected_tokens_per_step",
    "speedup": "speedup",
    "operations": "operations",
    "break-even alpha": "break_even_alpha",
}
BY_POSITION = {
    "tokens per step, by position": "expected_tokens_by_position",
    "speedup, by position": "speedup_by_position",
}
BEST = {"best gamma": "best_gamma", "best speedup": "best_speedup"}
LINES = {"by alpha": "speedup", "by position": "speedup_by_position"}


def plan_page(result: Result) -> str:
    """The HTML file for the content of result.json."""
    cells = result.get("cells") or [result]
    single = len(cells) == 1
    body = fragment(
        BODY,
        word=_word(cells[0]) if single else f"{len(cells)} combinations",
        lead=_lead(cells[0]) if single else _lead_of_many(cells),
        measured=_measured(result) if result.get("from") else None,
        sentence=drafted_share(result.get("from") or {}),
        charts=[_chart(cell) for cell in cells],
        rows=_by_gamma(cells[0]) if single else _by_combination(cells),
        by_position="by_position" in cells[0]["summary"],
        by_batch=_by_batch(result["by_batch"]) if result.get("by_batch") else None,
    )
    return page("specpipe plan", body)


def curve_columns(cell: Result) -> dict[str, str]:
    """Heads of the table over gamma, with the names of their numbers."""
    return ROW | (BY_POSITION if "by_position" in cell["summary"] else {})


def combination_columns(cells: Sequence[Result]) -> dict[str, str]:
    """Heads of the table over combinations, with the names of their numbers; the best gamma where another was asked."""
    best = all(cell["summary"]["gamma"] == cell["summary"]["best_gamma"] for cell in cells)
    columns = {"best gamma" if best and words == "gamma" else words: name for words, name in ROW.items()}
    return {"alpha": "alpha", "cost ratio": "cost_ratio"} | columns | ({} if best else BEST)


def drafted_share(source: Result) -> str:
    """What of the measured run the prediction is about."""
    drafted, plain = source.get("num_spec_steps") or 0, source.get("num_plain_steps") or 0
    return (
        f"{drafted:,} of the {drafted + plain:,} steps of the measured run drafted something. The prediction is for "
        "steps that do; plain ones between them bring the speedup of a whole run nearer to 1."
    )


def _word(cell: Result) -> str:
    summary = cell["summary"]
    return f"{summary['best_speedup']:.2f}x" if summary["best_gamma"] else "no draft"


def _lead(cell: Result) -> str:
    summary, given = cell["summary"], f"At {_named(cell)}"
    if not summary["best_gamma"]:
        return f"{given}, no draft is faster than plain decoding: alpha must be above {number(cell['cost_ratio'])}."
    best = next(row for row in cell["curve"] if row["gamma"] == summary["best_gamma"])
    tokens, pays = number(best["expected_tokens_per_step"]), number(best["break_even_alpha"])
    drafts = "1 token" if best["gamma"] == 1 else f"{best['gamma']} tokens"
    looked = "" if best is not cell["curve"][-1] else " It is also the longest draft looked at."
    return (
        f"{given}, drafting {drafts} a step is best: {tokens} tokens per pass of the target, "
        f"{number(best['speedup'])} times as fast as plain decoding. Below alpha {pays} it stops paying.{looked}"
    )


def _lead_of_many(cells: Sequence[Result]) -> str:
    paying = sum(cell["summary"]["best_gamma"] > 0 for cell in cells)
    return f"Drafting pays in {paying} of them."


def _named(cell: Result) -> str:
    return f"alpha {number(cell['alpha'])} and cost ratio {number(cell['cost_ratio'])}"


def _measured(result: Result) -> Markup:
    target = result.get("target") or {}
    return facts(
        [
            ("run", result["from"]["folder"]),
            ("target", target.get("model")),
            ("proposer", result.get("proposer")),
            ("sampler", result.get("sampler")),
            ("generation", result.get("generation")),
        ]
    )


def _chart(cell: Result) -> tuple[Markup, str, Markup]:
    lines = {
        words: [(row["gamma"], row[name]) for row in cell["curve"] if row.get(name) is not None]
        for words, name in LINES.items()
    }
    lines = {words: line for words, line in lines.items() if line}
    summary = cell["summary"]
    best = f"best gamma {summary['best_gamma']}, speedup {number(summary['best_speedup'])}"
    names = key(list(lines)) if len(lines) > 1 else Markup()
    return curves(lines, f"speedup by gamma at {_named(cell)}: {best}", "gamma"), f"{_named(cell)}: {best}", names


def _by_gamma(cell: Result) -> Markup:
    columns, best = curve_columns(cell), cell["summary"]["best_gamma"]
    rows = [
        [name, *(Cell(value, GOOD if name == best else "") for value in values)]
        for name, *values in ([row[column] for column in columns.values()] for row in cell["curve"])
    ]
    return table(list(columns), rows)


def _by_batch(rows: Sequence[Result]) -> Markup:
    head = ["batch size", *(f"gamma {gamma}" for gamma in range(len(rows[0]["speedup"])))]
    cells = [
        [row["batch_size"], *(Cell(s, GOOD if k == row["best_gamma"] else "") for k, s in enumerate(row["speedup"]))]
        for row in rows
    ]
    return table(head, cells)


def _by_combination(cells: Sequence[Result]) -> Markup:
    columns = combination_columns(cells)
    merged = ({**cell, **cell["summary"]} for cell in cells)
    return table(list(columns), [[cell[name] for name in columns.values()] for cell in merged])
