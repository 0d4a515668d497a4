"""The page of a traced `decode`: each answer with its tokens coloured by how they came about, and every step of it.

The coloured text stands in the page itself; `trace.js` adds what belongs to a token or a step when it is looked at.
Knows records, steps and texts; knows nothing of models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from markupsafe import Markup

from specpipe.clock import PARTS
from specpipe.report.page import STYLE, WARN, badge, beside, embedded, facts, fragment, number, page
from specpipe.sequence import Sequence as Request
from specpipe.sequence import Step
from specpipe.terminal import VISIBLE
from specpipe.text import TextCodec

IN_LINE = {ord("\n"): "↵", ord("\t"): "⇥"}  # for drafts that are not accepted, which must not break the text's lines
LONG = 400  # characters of a prompt; a longer one is folded
DIGITS = 4  # of a probability or a time, those that matter
KINDS = {
    "accepted": "the proposer guessed it, the target agreed",
    "correction": "drawn from what the target has and the draft has not, after a rejection",
    "bonus": "the extra token behind a draft that was accepted whole",
    "plain": "a step without a draft",
}
CUT = "not in the answer: the stop string ends it"
SILENT = "a special token, which has no text"
UNFINISHED = "some bytes of a character that a later token completes"

BODY = """\
<header>
<p class="small">specpipe decode</p>
<h1>Token trace</h1>
<p class="lead">{{ lead }}</p>
</header>
<section id="legend">
<h2>How to read it</h2>
<ul class="legend">
{% for kind, words, count in kinds %}
<li><span class="swatch"><span class="t {{ kind }}">{{ kind }}</span></span>
<b>{{ count | number }}</b> {{ words }}</li>
{% endfor %}
<li><label class="swatch"><input type="checkbox" id="rejected"/> <del>draft</del></label>
<b>{{ rejected | number }}</b> drafted and not accepted; tick to see them in the text</li>
</ul>
<p class="small">A thin line stands in front of each step: one pass of the target, which scores a draft and gives one
token more. A dot is a token without text of its own. Point at a token, tap it, or walk with the arrow keys, to see its
probabilities; move the slider to see the text grow step by step.</p>
{{ facts }}
</section>
{% for each in requests %}
{{ each }}
{% endfor %}
<aside id="card" role="status" hidden></aside>
<footer>
<p>Beside this page, <code>trace.jsonl</code> holds every step, <code>result.json</code> every number and the whole
config. <code>#request=1&amp;step=5</code> behind this page's address opens it at a step, <code>token=9</code> at a
token.</p>
</footer>
<noscript><p>Tokens and steps tell more where the browser may run this page's script.</p></noscript>
<script type="application/json" id="trace">{{ data }}</script>
<script>{{ script }}</script>
"""

REQUEST = """\
<section class="request">
<h2>{{ heading }} {{ ended }}</h2>
{% if long %}
<details><summary>Prompt, {{ tokens | number }} tokens: {{ beginning }} …</summary><pre>{{ prompt }}</pre></details>
{% else %}
<h3>Prompt</h3>
<pre>{{ prompt }}</pre>
{% endif %}
<h3>Answer</h3>
<p class="small">{{ counts }}</p>
{% if answer %}
<div class="answer" role="group" aria-label="the answer, token by token">{{ answer }}</div>
<label class="steps">step <input type="range" min="0" max="{{ steps }}" value="{{ steps }}"/> \
<output>{{ steps }} of {{ steps }}</output></label>
<div class="step" aria-live="polite"></div>
{% else %}
<p>No tokens.</p>
{% endif %}
</section>
"""

# Without white space between the tokens: in an answer it would be text.
ANSWER = """\
{% for step in steps %}{% set place = loop.index0 %}{% for token in step %}\
{% if token.rejected %}<del data-step="{{ place }}"{% if loop.first %} class="first"{% endif %}>\
{% for name in token.rejected %}<span>{{ name }}</span>{% endfor %}</del>{% endif %}\
{% if token.kind %}<span class="t {{ token.kind }}{{ token.marks }}">{{ token.text }}</span>{% endif %}\
{% endfor %}{% endfor %}"""


@dataclass(frozen=True)
class TracedRequest:
    """What the page shows of a request.

    record: as in result.json. steps: in order. texts: what each emitted token completed, also behind the answer's end.
    names: the texts of all ids that occur, each by itself. silent: the ids emitted that have no text in an answer, such
    as the end of text.
    """

    record: Mapping[str, Any]
    steps: Sequence[Step]
    texts: Sequence[str]
    names: Mapping[int, str]
    silent: frozenset[int]

    @classmethod
    def of(cls, record: Mapping[str, Any], request: Request, codec: TextCodec) -> TracedRequest:
        """A finished or interrupted request, read with the tokenizer that it was decoded with."""
        names = {token: codec.name(token) for token in set(_ids(request.steps))}
        silent = frozenset(token for token in set(request.new_tokens) if not codec.decode([token]))
        return cls(record, request.steps, codec.by_token(request.new_tokens), names, silent)


@dataclass(frozen=True)
class _Token:
    """A token of the text, and in front of it the drafts of its step that were not accepted.

    A step that ended inside its draft has none to put them in front of: then kind is empty.
    """

    text: str
    kind: str
    marks: str
    rejected: Sequence[str] = ()


def trace_page(result: Mapping[str, Any], requests: Sequence[TracedRequest]) -> str:
    """The HTML file for the content of result.json, which may be of an interrupted run, and its traced requests."""
    steps = [step for each in requests for step in each.steps]
    counts = Counter(kind for step in steps for kind in step.kinds)
    body = fragment(
        BODY,
        lead=_lead(result, steps),
        kinds=[(kind, words, counts[kind]) for kind, words in KINDS.items()],
        rejected=sum(step.drafted - step.accepted for step in steps),
        facts=facts(_facts(result)),
        requests=[_request(each, place, len(requests)) for place, each in enumerate(requests, 1)],
        data=embedded(_data(result, requests)),
        script=beside("trace.js"),
    )
    return page(f"specpipe decode: {len(requests)} traced", body, STYLE + beside("trace.css"))


def _lead(result: Mapping[str, Any], steps: Sequence[Step]) -> str:
    target = (result.get("target") or {}).get("model") or "the target"
    tokens, accepted = sum(len(step.tokens) for step in steps), sum(step.accepted for step in steps)
    if not tokens:
        return f"Nothing was decoded with {target}."
    return (
        f"{target} gave {number(tokens)} tokens in {number(len(steps))} passes, {number(tokens / len(steps))} per pass "
        f"instead of 1: {number(accepted)} of them were drafted by {result.get('proposer')} and accepted."
    )


def _facts(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    target, summary = result.get("target") or {}, result.get("summary") or {}
    generation = _generation(result)
    names = (target.get("model"), target.get("dtype"), target.get("device"))
    return [
        ("target", ", ".join(str(name) for name in names if name) or None),
        ("proposer", result.get("proposer")),
        ("sampler", result.get("sampler")),
        ("speculative tokens", result.get("num_speculative_tokens")),
        ("temperature", generation.get("temperature")),
        ("alpha, overlap of p and q", (summary.get("alpha") or {}).get("mean")),
        ("tokens/s", summary.get("tokens_per_s")),
    ]


def _generation(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return (result.get("config") or {}).get("generation") or {}


def _request(request: TracedRequest, place: int, of: int) -> Markup:
    record = request.record
    ended = record["finish_reason"]
    prompt = _visible(record["prompt"])
    return fragment(
        REQUEST,
        heading=_heading(record, f"Request {place} of {of}"),
        ended=badge(ended, WARN if ended == "interrupted" else ""),
        prompt=prompt,
        beginning=" ".join(prompt[:80].split()),
        long=len(prompt) > LONG,
        tokens=record["prompt_tokens"],
        counts=_counts(record),
        answer=fragment(ANSWER, steps=_tokens(request)),
        steps=len(request.steps),
    )


def _heading(record: Mapping[str, Any], place: str) -> str:
    turn = record.get("turn")
    words = [place, record.get("category"), None if turn is None else f"turn {turn + 1}"]
    return ", ".join(word for word in words if word)


def _counts(record: Mapping[str, Any]) -> str:
    counts, alpha = record["spec_decode"], record["alpha"]
    passes = counts["num_spec_steps"] + counts["num_plain_steps"]
    said = f"{number(len(record['token_ids']))} tokens in {number(passes)} passes of the target"
    if counts["num_draft_tokens"]:
        accepted, drafted = counts["num_accepted_draft_tokens"], counts["num_draft_tokens"]
        said += f"; {number(accepted)} of {number(drafted)} drafted tokens accepted"
    return said if alpha is None else f"{said}; alpha {number(alpha)}"


def _tokens(request: TracedRequest) -> list[list[_Token]]:
    """The tokens of each step, as they stand in the text."""
    shown = _shown(request)
    made = []
    for step in request.steps:
        rejected = (step.draft_token_ids or ())[step.accepted :]
        drafts = [_visible(request.names[token]).translate(IN_LINE) for token in rejected]
        tokens = []
        for i, kind in enumerate(step.kinds):
            text = next(shown)
            marks = (" first" if i == 0 else "") + _blank(text)
            tokens.append(_Token(text, kind, marks, drafts if i == step.accepted else ()))
        made.append(tokens if step.extra else [*tokens, _Token("", "", "", drafts)])
    return made


def _shown(request: TracedRequest) -> Iterator[str]:
    """What each token shows: its text as far as it belongs to the answer."""
    left = len(request.record["text"])
    for text in request.texts:
        yield _visible(text[:left])
        left = max(0, left - len(text))


def _visible(text: str) -> str:
    return text.translate(VISIBLE)


def _blank(text: str) -> str:
    """The mark of a token of which nothing would be seen: without text, or of line ends alone."""
    return " line" if "\n" in text and not text.strip() else "" if text else " part"


def _data(result: Mapping[str, Any], requests: Sequence[TracedRequest]) -> dict[str, Any]:
    """What trace.js tells of tokens and steps; ids by number, their texts once."""
    names = {token: _visible(name) for each in requests for token, name in each.names.items()}
    return {
        "kinds": KINDS,
        "parts": PARTS,
        "law": _generation(result).get("logprobs_mode"),
        "names": names,
        "requests": [{"steps": [_step(step) for step in each.steps], "blank": _reasons(each)} for each in requests],
    }


def _step(step: Step) -> dict[str, Any]:
    told = {
        "tokens": step.tokens,
        "kinds": step.kinds,
        "asked": step.asked,
        "drafted": step.drafted,
        "accepted": step.accepted,
        "drafts": step.draft_token_ids,
        "p": _probabilities(step.log_p),
        "q": _probabilities(step.log_q) if step.has_q else None,
        "alpha": [_rounded(overlap) for overlap in step.overlaps],
        "source": step.source,
        "ms": [_rounded(1000 * step.seconds[part]) for part in PARTS] if step.seconds else None,
        "rows": step.rows if step.rows > 1 else None,
        "own": _probabilities([each.logprob for each in step.logprobs or ()]),
        "top": [[[token, _probability(log)] for token, log in each.top] for each in step.logprobs or ()],
    }
    return {key: value for key, value in told.items() if value not in (None, [])}


def _reasons(request: TracedRequest) -> dict[int, str]:
    """Why a token, by its place, shows no text."""
    emitted = (token for step in request.steps for token in step.tokens)
    told = enumerate(zip(emitted, request.texts, _shown(request), strict=True))
    return {
        place: CUT if text else SILENT if token in request.silent else UNFINISHED
        for place, (token, text, shown) in told
        if not shown
    }


def _ids(steps: Sequence[Step]) -> Iterator[int]:
    """Every id that the page names: emitted, drafted, or among the best."""
    for step in steps:
        yield from chain(step.tokens, step.draft_token_ids or ())
        yield from (token for each in step.logprobs or () for token, _ in each.top)


def _probabilities(logs: Sequence[float] | None) -> list[float | None] | None:
    return None if logs is None else [_probability(log) for log in logs]


def _probability(log: float) -> float | None:
    return _rounded(math.exp(log))


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
