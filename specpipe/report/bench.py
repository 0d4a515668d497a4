"""The page of `specpipe bench`: the answer, what it rests on in charts and one table, and how to read both.

Says what result.json says, also of a bench that is still running or was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from specpipe.report import bench_charts, charts, sortable
from specpipe.report.bench_charts import PLAIN, Cell, drafts, drawn, named, summary
from specpipe.report.page import BAD, GOOD, STYLE, WARN, badge, facts, fragment, interval, number, page, table
from specpipe.report.page import Cell as Shown
from specpipe.report.sortable import Entry, Row
from specpipe.results import finite

Result = Mapping[str, Any]

BODY = """\
<header>
<p class="small">specpipe bench</p>
<h1 class="{{ tone }}">{{ word }}</h1>
<p>{{ verdict }}{% if bounds %} <span class="small">times as fast as plain decoding; {{ bounds }}</span>{% endif %}</p>
<p{% if not best %} class="lead"{% endif %}>{{ answer }}</p>
{% if unfinished %}<p>{{ unfinished }}</p>{% endif %}
{{ figures }}
{% if best %}
<h3>The best at each temperature and batch size</h3>
{{ best }}
{% endif %}
</header>
{% for each in charts %}
<section>
<h2>{{ each.heading }}</h2>
<p>{{ each.caption }}</p>
<p class="small">{{ each.where }}</p>
{{ each.plots }}
</section>
{% endfor %}
<section>
<h2>All that was measured</h2>
{% if cells %}
<p class="small">Over all prompts; 95 % intervals in brackets. Press a head to sort by it; the table can be moved
sideways.
{%- if peers %} Rows in grey are other programs' decoding of the same prompts with the same weights.{% endif %}</p>
{{ cells }}
{% else %}
<p>Nothing yet.</p>
{% endif %}
</section>
<section>
<h2>What was run</h2>
{{ run }}
</section>
<section>
<h2>How to read this</h2>
<ul>
<li><b>Speculative decoding</b>: a cheap <i>proposer</i> guesses the next tokens, the <i>target</i> model checks them
all in one pass. What is wrong is corrected, so that the text is the target's own; only the time changes.</li>
<li><b>Speedup</b>: tokens per second behind the prompt's pass, over those of plain decoding of the same prompts in the
same run. Plain decoding took turns with the rest, so that a machine that slows down slows all of them.</li>
<li><b>Interval</b> [low, high]: the prompts are a sample of those there could be; of intervals made so, 19 of 20 hold
the figure of all of them. It does not cover another machine, another target or another kind of prompt.</li>
<li><b>Gamma</b>, drafted tokens: how many are guessed in a step at most.</li>
<li><b>Tokens per pass</b>: new tokens over passes of the target; plain decoding has 1.</li>
<li><b>Alpha</b>: how much of the target's law the draft's covers, on average; the chance that a drafted token is
accepted under the rejection rule. <b>Stops paying below</b>: the alpha at which drafting so many tokens is as fast as
plain decoding, at the costs that were measured.</li>
<li><b>c</b>, cost ratio: time of drafting one token over that of a plain step.</li>
<li><b>Operations</b>: arithmetic per token over that of plain decoding, which is what is paid for the speed.</li>
<li><b>Same texts</b>: at temperature 0 the texts must be plain decoding's. In bfloat16 a few may differ, where two
tokens are as likely as makes no difference.</li>
<li>The best of many cells is chosen for being the best, so its figure is a little flattered: measured again it would on
average come out somewhat lower.</li>
</ul>
</section>
<footer>
<p>Beside this page, <code>result.json</code> holds every number and the whole config, <code>provenance.json</code> the
command line, versions and machine, <code>.hydra/</code> the config as it was composed, <code>wandb/</code> the
dashboard's data where that was kept.</p>
</footer>
{{ scripts }}
"""

PEER = '{{ name }} <span class="badge">peer</span>'
UNFINISHED = (
    "{{ badge }} {{ done }} of {{ wanted }} rounds are in: what follows may change, and intervals may be missing."
)

VERDICTS = {True: ("faster", GOOD), False: ("not faster", BAD), None: ("may be chance", WARN)}
NOTHING = "Nothing was measured with a draft yet."


def bench_page(result: Result) -> str:
    """The HTML file for the content of result.json."""
    result = finite(result)
    best = _best(result)
    first = best[0] if best else {}
    verdict, tone = VERDICTS[first.get("pays")] if best else ("no answer", "")
    cells = result.get("cells") or []
    body = fragment(
        BODY,
        word=_word(first),
        bounds=_bounds(first),
        tone=tone,
        verdict=badge(verdict, tone),
        answer=(result.get("summary") or {}).get("answer") or NOTHING,
        unfinished=_unfinished(result.get("rounds") or {}),
        figures=facts(_figures(first)),
        best=_by_setting(best) if len(best) > 1 else None,
        charts=drawn(result),
        cells=_table(cells) if cells else None,
        peers=any(cell.get("peer") for cell in cells),
        run=facts(_run(result)),
        scripts=charts.drawing() + sortable.sorting(),
    )
    return page("specpipe bench", body, STYLE + charts.STYLE + bench_charts.STYLE + sortable.STYLE)


def _best(result: Result) -> Sequence[Result]:
    return (result.get("summary") or {}).get("best") or []


def _word(best: Result) -> str:
    mean = (best.get("speedup") or {}).get("mean")
    return "no answer yet" if mean is None else f"{mean:.2f}x"


def _bounds(best: Result) -> str | None:
    speedup = best.get("speedup") or {}
    if speedup.get("mean") is None:
        return None
    low, high = speedup.get("low"), speedup.get("high")
    if low is None or high is None:
        return "from one prompt, so that nobody can say how sure that is"
    return f"95 % interval {low:.2f} to {high:.2f}"


def _unfinished(rounds: Result) -> Markup | None:
    done, wanted = rounds.get("done"), rounds.get("wanted")
    if done is None or wanted is None or done >= wanted:
        return None
    return fragment(UNFINISHED, badge=badge("unfinished", WARN), done=done, wanted=wanted)


def _figures(best: Result) -> list[tuple[str, Any]]:
    below = best.get("break_even_alpha")
    return [
        ("proposer", best.get("proposer")),
        ("drafted tokens (gamma)", best.get("num_speculative_tokens")),
        ("temperature", best.get("temperature")),
        ("batch size", best.get("batch_size")),
        ("alpha", interval(best.get("alpha"))),
        ("stops paying below", None if below is None else f"alpha {below:.2f}"),
    ]


def _by_setting(best: Sequence[Result]) -> Markup:
    settings = ["temperature", "batch size", "best", "speedup [95 % interval]", ""]
    return table([*settings, "alpha", "stops paying below", "predicted best"], [_setting(each) for each in best])


def _setting(best: Result) -> list[Any]:
    verdict, tone = VERDICTS[best.get("pays")]
    predicted = best.get("predicted_best")
    return [
        best.get("temperature"),
        best.get("batch_size"),
        f"{best.get('proposer')}, gamma {best.get('num_speculative_tokens')}",
        Shown(interval(best.get("speedup")), tone),
        Shown(verdict, tone),
        interval(best.get("alpha")),
        _in("{:.2f}", best.get("break_even_alpha")),
        predicted and f"{predicted['proposer']}, gamma {predicted['num_speculative_tokens']}",
    ]


def _table(cells: Sequence[Cell]) -> Markup:
    columns = [(head, [value(cell) for cell in cells]) for head, value in _columns(cells)]
    columns = [(head, values) for head, values in columns if any(_there(value) for value in values)]
    heads, values = zip(*columns, strict=True)
    rows = zip(cells, zip(*values, strict=True), strict=True)
    return sortable.sortable(heads, [Row(row, bool(cell.get("peer"))) for cell, row in rows])


def _there(value: Any) -> bool:
    return value is not None and not (isinstance(value, Entry) and value.by is None)


def _columns(cells: Sequence[Cell]) -> Iterator[tuple[str, Callable[[Cell], Any]]]:
    """Heads, with what stands below them; the settings that are the same in all rows are told elsewhere."""
    yield "proposer", _name
    if len({cell.get("sampler") for cell in cells if drafts(cell)}) > 1:
        yield "sampler", lambda cell: cell.get("sampler")
    yield "temperature", lambda cell: cell.get("temperature")
    yield "batch size", lambda cell: cell.get("batch_size")
    yield "gamma", lambda cell: cell.get("num_speculative_tokens")
    yield "speedup", _speedup
    yield "tokens/s", _of("tokens_per_s", "{:.1f}")
    yield "tokens per pass", _of("tokens_per_target_pass", "{:.2f}")
    yield "alpha", lambda cell: _spread(summary(cell).get("alpha"))
    yield "accepted drafts", _accepted
    yield "stops paying below alpha", _of("break_even_alpha", "{:.2f}")
    yield "c", _of("cost_ratio", "{:.3f}")
    yield "speedup predicted from costs", _predicted("costs")
    yield "speedup by the formula", _predicted("formula")
    yield "operations", _of("operations", "{:.2f}")
    yield "first token after s", _of("time_to_first_token_s", "{:.2f}")
    yield "same texts", _same_texts
    yield "repeats", lambda cell: cell.get("repeats")


def _name(cell: Cell) -> Entry:
    name = named(cell)
    return Entry(fragment(PEER, name=name) if cell.get("peer") else name, name)


def _speedup(cell: Cell) -> Entry:
    """Toned by what its interval says, if it has one."""
    block = summary(cell).get("speedup") or {}
    low, high = block.get("low"), block.get("high")
    tone = GOOD if low is not None and low > 1 else BAD if high is not None and high < 1 else ""
    return Entry(interval(block), block.get("mean"), tone)


def _accepted(cell: Cell) -> Entry:
    rate = (summary(cell).get("spec_decode") or {}).get("draft_acceptance_rate")
    return Entry(_in("{:.0%}", rate), rate)


def _same_texts(cell: Cell) -> Entry:
    same, texts = summary(cell).get("identical_texts"), summary(cell).get("texts")
    if same is None or not texts or cell["proposer"] == PLAIN:
        return Entry(None, None)
    return Entry(f"{same} of {texts}", same / texts)


def _spread(block: Result | None) -> Entry:
    return Entry(interval(block), (block or {}).get("mean"))


def _of(name: str, form: str) -> Callable[[Cell], Entry]:
    return lambda cell: Entry(_in(form, summary(cell).get(name)), summary(cell).get(name))


def _predicted(kind: str) -> Callable[[Cell], Entry]:
    def value(cell: Cell) -> Entry:
        speedup = (summary(cell).get("predicted_speedup") or {}).get(kind)
        return Entry(_in("{:.2f}", speedup), speedup)

    return value


def _in(form: str, value: float | None) -> str | None:
    return None if value is None else form.format(value)


def _run(result: Result) -> list[tuple[str, Any]]:
    target, prompts, rounds = (result.get(name) or {} for name in ("target", "prompts", "rounds"))
    names = (target.get("model"), target.get("dtype"), target.get("device"))
    wanted = rounds.get("wanted")
    seed = result.get("seed")
    return [
        ("target", ", ".join(str(name) for name in names if name) or None),
        ("prompts", prompts.get("count")),
        ("kinds of prompt", ", ".join(prompts.get("categories") or ()) or None),
        ("new tokens per prompt, at most", prompts.get("max_new_tokens")),
        ("rounds", None if wanted is None else f"{number(rounds.get('done'))} of {number(wanted)}"),
        *((words, _varied(result, key)) for words, key in SWEPT.items()),
        ("draft length", result.get("draft_length")),
        ("generation", result.get("generation")),
        ("verifier", result.get("verifier")),
        *_errors(result),
        ("seed", None if seed is None else str(seed)),
        ("specpipe", result.get("version")),
    ]


SWEPT = {
    "proposers": "proposer",
    "sampler": "sampler",
    "drafted tokens (gamma)": "num_speculative_tokens",
    "temperature": "temperature",
    "batch size": "batch_size",
}


def _varied(result: Result, key: str) -> str | None:
    """The values there are, of cells that draft."""
    values = dict.fromkeys(cell.get(key) for cell in result.get("cells") or () if drafts(cell))
    return ", ".join(str(number(value)) for value in values) or None


def _errors(result: Result) -> list[tuple[str, Any]]:
    """How far the predictions were off."""
    errors = (result.get("summary") or {}).get("prediction_error") or {}
    words = {"costs": "prediction from costs is off by", "formula": "the formula is off by"}
    told = {kind: errors.get(kind) for kind in words}
    return [(words[kind], f"{off:.1%} on average") for kind, off in told.items() if off is not None]
