"""The page of `python -m train`: what was trained, what it gives, its curves, how to use it, from result.json alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from specpipe.report.page import BAD, GOOD, badge, curves, facts, fragment, key, number, page

Result = Mapping[str, Any]

BODY = """\
<header>
<p class="small">specpipe train</p>
<h1>{{ student }}</h1>
<p class="lead">{{ lead }}</p>
</header>
<section>
<h2>What it gives</h2>
<p class="small">On held-out prompts, with {{ gamma | number }} drafted tokens a step.</p>
{{ figures }}
{{ check }}
</section>
<section>
<h2>How it got there</h2>
{% if charts %}
<div class="charts">
{% for svg, title, names, sentence in charts %}
<figure>{{ svg }}<figcaption><b>{{ title }}</b> {{ names }}<br>{{ sentence }}</figcaption></figure>
{% endfor %}
</div>
{% else %}
<p>No curves: the run ended before its first point.</p>
{% endif %}
</section>
<section>
<h2>What was trained</h2>
{{ parts }}
<h3>On text that the target wrote</h3>
{{ text }}
</section>
{% if command %}
<section>
<h2>Decode with it</h2>
<pre><code>{{ command }}</code></pre>
</section>
{% endif %}
<footer>
<p>Beside this page, <code>result.json</code> holds every number and the whole config, <code>metrics.jsonl</code> the
points of the curves, <code>provenance.json</code> the command line that runs it again.</p>
</footer>
"""

CHECK = """\
<h3>A real decode {{ badge }}</h3>
<p>{{ check.decoded | number }} tokens per pass over {{ check.tokens | number }} tokens of held-out prompts, decoded
greedily with the saved draft; the validation counts {{ check.walked | number }} on the same text.
{%- if not check.holds %} Something between training and decoding differs, so the figures above do not hold.{% endif %}
</p>
"""

LOSS = "How far the draft's law is from the target's, averaged over tokens."
TAU = "New tokens per pass of the target; plain decoding has 1."
ALPHA = "How much of the target's law the first guess covers: the chance that a drawn token is accepted."


def training_page(result: Result) -> str:
    """The HTML file for the content of result.json, which may be of an interrupted run."""
    student = result.get("student") or "a draft"
    body = fragment(
        BODY,
        student=student,
        lead=_lead(result),
        gamma=result.get("num_speculative_tokens"),
        figures=facts(_figures(result.get("summary") or {})),
        check=_check(result.get("check")),
        charts=_charts(result.get("curves") or []),
        parts=facts(_parts(result)),
        text=facts(_text(result.get("data") or {})),
        command=_command(result),
    )
    return page(f"specpipe train: {student}", body)


def _lead(result: Result) -> str:
    tau = (result.get("summary") or {}).get("tau")
    target = (result.get("target") or {}).get("model") or "the target"
    if tau is None:
        return f"A draft for {target}, not measured: there was no greedy text to validate on, or the run ended before."
    return f"A draft with which {target} gives {number(tau)} tokens per pass in greedy decoding, instead of 1."


def _figures(summary: Result) -> list[tuple[str, Any]]:
    return [
        ("tokens per pass, greedy (tau)", summary.get("tau")),
        ("tokens per pass, sampling", summary.get("tau_T1")),
        ("alpha", _alpha(summary)),
        ("tokens that it can say (coverage)", summary.get("coverage")),
        ("the target's probability of those", summary.get("p_mass")),
        ("optimizer steps", summary.get("steps")),
        ("tokens trained on, repeats counted", summary.get("tokens")),
        ("minutes", summary.get("minutes")),
    ]


def _alpha(summary: Result) -> Any:
    low, high = summary.get("alpha_low"), summary.get("alpha_high")
    alpha = summary.get("alpha")
    return alpha if low is None or high is None else f"{number(alpha)} ({number(low)} to {number(high)})"


def _check(check: Result | None) -> Markup:
    if not check:
        return Markup()
    said = badge("agrees", GOOD) if check["holds"] else badge("disagrees", BAD)
    return fragment(CHECK, check=check, badge=said)


def _charts(points: Sequence[Result]) -> list[tuple[Markup, str, Markup, str]]:
    """Of the figures that have a point: the loss, tokens per pass by number of drafted tokens, alpha."""
    taus = sorted({name for point in points for name in point if name.startswith("val/tau_")})
    charts = [
        _chart(points, "loss", {"train/loss": "training", "val/loss": "validation"}, LOSS),
        *(
            _chart(points, "tokens per pass", {name: "greedy", f"{name}_T1": "sampling"}, TAU)
            for name in dict.fromkeys(tau.removesuffix("_T1") for tau in taus)
        ),
        _chart(points, "alpha", {"val/alpha": "validation"}, ALPHA),
    ]
    return [chart for chart in charts if chart is not None]


def _chart(
    points: Sequence[Result], title: str, words: Mapping[str, str], sentence: str
) -> tuple[Markup, str, Markup, str] | None:
    """A chart of the figures in `words` that have a point; None if none has."""
    lines = {
        said: [(point["step"], point[name]) for point in points if point.get(name) is not None]
        for name, said in words.items()
    }
    lines = {said: line for said, line in lines.items() if line}
    if not lines:
        return None
    ends = ", ".join(f"{said} {number(line[0][1])} to {number(line[-1][1])}" for said, line in lines.items())
    return curves(lines, f"{title} by step: {ends}"), title, key(list(lines)), sentence


def _parts(result: Result) -> list[tuple[str, Any]]:
    target = result.get("target") or {}
    names = (target.get("model"), target.get("dtype"), target.get("device"))
    parts = [(part, _part(result, part)) for part in ("student", "loss", "optimizer", "trainer")]
    seed = result.get("seed")
    return [
        ("target", ", ".join(str(name) for name in names if name) or None),
        *parts,
        ("seed", None if seed is None else str(seed)),
        ("specpipe", result.get("version")),
    ]


def _part(result: Result, part: str) -> str | None:
    """A part's name and its options that are numbers or words."""
    name, options = result.get(part), (result.get("config") or {}).get(part) or {}
    told = [
        f"{key} {value}" for key, value in options.items() if key != "_target_" and isinstance(value, (str, int, float))
    ]
    return None if name is None else f"{name} ({', '.join(told)})" if told else str(name)


def _text(data: Result) -> list[tuple[str, Any]]:
    return [
        ("answers to train on", data.get("train_documents")),
        ("their tokens", data.get("train_generated")),
        ("held-out answers", data.get("val_documents")),
        ("their tokens", data.get("val_generated")),
        ("temperatures", ", ".join(str(each) for each in data.get("temperatures") or ()) or None),
    ]


def _command(result: Result) -> str | None:
    proposer, artifact = result.get("proposer"), result.get("artifact")
    if proposer is None or artifact is None:
        return None
    return f"python -m specpipe decode proposer={proposer} {shlex.quote(f'proposer.path={artifact}')}"
