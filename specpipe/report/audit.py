"""The page of `specpipe audit`: the verdict, who was audited, and what each test measured, from result.json alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from specpipe.audit.finding import BIASED, FAILED, LOSSLESS, NOT_APPLICABLE, PASSED, TOO_LITTLE
from specpipe.report.page import ABSENT, BAD, GOOD, WARN, Cell, badge, facts, fragment, histogram, number, page, table
from specpipe.settings import GenerationSettings

Numbers = Mapping[str, Any]  # an entry of result.json's `tests`; all but test, result and reason may be missing

MOST_ROWS = 50  # of a table of single tokens
SIGMAS = 3  # half the band of a histogram, in standard deviations of a bar
TONES = {PASSED: GOOD, LOSSLESS: GOOD, FAILED: BAD, BIASED: BAD, TOO_LITTLE: WARN}
INTERRUPTED = "interrupted"

MEANINGS = {
    LOSSLESS: "No test could tell this output from the target model's own, and none was short of data.",
    BIASED: "At least one test found output that the target model alone would not have given.",
    TOO_LITTLE: "Nothing wrong was found, but too little was judged to rule a bias out.",
    INTERRUPTED: "The run ended before the tests did: there is no verdict. Below is what was finished.",
}

BODY = """\
<header>
<p class="small">specpipe audit</p>
<h1 class="{{ tone }}">{{ word }}</h1>
<p class="lead">{{ meaning }}</p>
{% if reasons %}
<ul>
{% for reason in reasons %}
<li>{{ reason }}</li>
{% endfor %}
</ul>
{% endif %}
<p class="small"><a href="#how">How to read this</a></p>
</header>
<section>
<h2>Who was audited</h2>
{{ who }}
</section>
{% for section in sections %}
{{ section }}
{% endfor %}
{{ how }}
<footer>
{{ foot }}
</footer>
"""

SECTION = """\
<section>
<h2>{{ finding.test }} {{ badge }}</h2>
<p>{{ finding.reason }}</p>
{{ details }}
</section>
"""

EXACT = """\
<p class="small">The decoding step itself runs on a table model of {{ finding.vocabulary }} ids, once for each way its
random decisions can fall, which gives the probability of every text of {{ finding.tokens }} tokens. A cell is the
largest distance from the target's own probability over all draft lengths; up to {{ finding.bound }} is rounding. Rows
are generation settings, the last one as far as possible this run's own. Columns are kinds of drafts: drawn from a law
(soft), deterministic (one-hot), fewer than asked for (ragged), by a model with fewer ids than the target (reduced) or
with more (padded), or none. Drafts as long as this run's are explored one step at a time, a few places of each drawn.
</p>
{{ table }}
{% if raised %}
<p class="small">Cells that say <i>raised</i> stopped with an error:</p>
<ul class="small">
{% for words in raised %}
<li>{{ words }}</li>
{% endfor %}
</ul>
{% endif %}
"""

GREEDY = """\
<p class="small">Each greedily chosen token is compared with the best one of a plain pass over the very same prefix,
so a first difference does not count again in all that follows. A near-tie is a gap between the two logits that
rounding in this precision explains; any other difference fails the test.</p>
{{ facts }}
{{ differences }}
"""

SAMPLED = """\
{{ facts }}
{{ charts }}
{{ p_values }}
{% if impossible %}
<h3>Tokens that the target cannot have drawn</h3>
{{ impossible }}
{% endif %}
"""

CHARTS = """\
<div class="charts">
{% for name, sentence, svg in charts %}
<figure>{{ svg }}<figcaption><b>ordered by {{ name }}</b> {{ sentence }}</figcaption></figure>
{% endfor %}
</div>
<p class="small">Each token's U under an ordering of the vocabulary; flat is right. The dashed line is the count
expected, the shade three standard deviations to both sides. A single bar of another colour, outside, decides nothing;
the p-values do.</p>
"""

P_VALUES = """\
{{ table }}
<p class="small">A p-value is how often a right sampler would look at least as odd. Corrected ones allow for {{ tests }}
looks at the same tokens; below {{ level | number }} the test fails. Chi-square asks whether the bars are level,
Anderson-Darling whether they lean to one side, lag 1 whether a U depends on the one before, across
requests whether requests share random numbers.
{%- if overlap %} Overlap z asks whether tokens fall more often than p says among those that q favours.{% endif %}</p>
"""

HOW = """\
<section id="how">
<h2>How to read this</h2>
<p>A sampled text may be anything, so single tokens prove nothing; but the target model says with what probability p
each token should have come, and many tokens together must keep to that. Line the whole vocabulary up from 0 to 1 in
some order, each token as wide as its probability: <b>U</b> is a random point inside the stretch of the token that was
emitted. If tokens really come from p, U falls anywhere between 0 and 1 equally often, whatever the text is about. A
bias shows as tall bars on one side, if the order puts the favoured tokens there: hence three orders.</p>
<p><b>Lossless</b> means that every test which applies passed and that a bias worth naming would have shown;
<b>biased</b> that some test failed, which by chance happens to about one sound run in a thousand per statistical test;
<b>not enough data</b> that more tokens are needed before silence counts as evidence.</p>
<p>What the audit cannot see:</p>
<ul>
<li>A bias without a common direction in any of the orders, such as the noise of rounded logits, stays unseen in the
sampled law; the exact law covers the sampler's rule, not the numbers a real model feeds it.</li>
<li>Where the target is nearly certain of its token, or at temperature 0, U says nothing; greedy identity is for
that.</li>
<li>Only token ids are judged: text, stop strings, streaming and speed are outside.</li>
<li>p is the law of the target as it ran here; that its weights, precision, chat template and settings are what a user
was promised must be known from elsewhere.</li>
<li>Outputs picked by how they turned out, such as only the finished ones, make a sound engine look biased.</li>
</ul>
</section>
"""

FOOT = """\
<p>Beside this page, <code>result.json</code> holds every number and the whole config, <code>provenance.json</code> the
command line that runs it again
{%- if sampled %}, and <code>outputs.jsonl</code> the sampled token ids, which
<code>specpipe audit file=outputs.jsonl</code> judges again under the same target and generation settings
{%- endif %}.</p>
"""

# What each ordering sees; result.json's name of it -> (ordered by, what that sees).
OF_TOKENS = {
    "p / q": (
        "p/q",
        "Tokens that the proposer underrates come first, those it overrates last: tall bars on the right are text that "
        "leans towards the draft. Where there is no draft, p flattened stands in for q.",
    ),
    "p": (
        "p",
        "Likely tokens come first: tall bars on the left are text colder than the settings say, on the right hotter.",
    ),
    "id": (
        "id",
        "An order that knows neither p nor q: sees faults in the plumbing, such as random numbers used twice.",
    ),
}
OF_DRAFTS = {
    "p": ("q", "Likely drafts come first: sees drafts drawn hotter or colder than the q returned with them."),
    "id": ("id", "An order that does not know q: sees a q of another place or of other ids."),
}


def audit_page(result: Mapping[str, Any]) -> str:
    """The HTML file for the content of result.json, which may be of an interrupted run."""
    word = result.get("verdict") or INTERRUPTED
    body = fragment(
        BODY,
        word=word,
        tone=TONES.get(word, ""),
        meaning=MEANINGS.get(word, ""),
        reasons=result.get("reasons"),
        who=facts(_who(result)),
        sections=[_section(finding) for finding in result.get("tests", [])],
        how=Markup(HOW),
        foot=fragment(FOOT, sampled=bool(result.get("requests"))),
    )
    return page(f"specpipe audit: {word}", body)


def _who(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    target = result.get("target") or {}
    names = (target.get("model"), target.get("dtype"), target.get("device"))
    file = _config(result, "file")
    return [
        ("target", ", ".join(str(name) for name in names if name)),
        ("judged", None if file is None else f"another engine's output: {file}"),
        ("proposer", _part(result, "proposer")),
        ("sampler", _part(result, "sampler")),
        ("generation", _generation(result)),
        ("speculative tokens", result.get("num_speculative_tokens")),
        ("seed", str(result.get("seed", ABSENT))),
        ("specpipe", result.get("version")),
    ]


def _part(result: Mapping[str, Any], part: str) -> str | None:
    """A part's name and its options that are plain values."""
    name, options = result.get(part), _config(result, part) or {}
    if name is None:
        return None
    plain = [f"{key} {value}" for key, value in options.items() if key != "_target_" and _is_plain(value)]
    return f"{name} ({', '.join(plain)})" if plain else str(name)


def _generation(result: Mapping[str, Any]) -> str:
    """The temperature, and what else is not as the constructor has it."""
    defaults = {name: each.default for name, each in inspect.signature(GenerationSettings).parameters.items()}
    settings = _config(result, "generation") or {}
    told = {key: value for key, value in settings.items() if key in defaults and value != defaults[key]}
    temperature = settings.get("temperature", defaults["temperature"])
    return ", ".join(f"{key} {value}" for key, value in {"temperature": temperature, **told}.items())


def _config(result: Mapping[str, Any], key: str) -> Any:
    return (result.get("config") or {}).get(key)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _section(finding: Numbers) -> Markup:
    details = DETAILS.get(finding["test"])
    shown = details(finding) if details and finding["result"] != NOT_APPLICABLE else ""
    tone = TONES.get(finding["result"], "")
    return fragment(SECTION, finding=finding, badge=badge(finding["result"], tone), details=shown)


def _exact(finding: Numbers) -> Markup:
    cases = finding.get("cases")
    if not cases:
        return Markup()
    settings = list(dict.fromkeys(case["settings"] for case in cases))
    proposals = list(dict.fromkeys(case["proposals"] for case in cases))
    worst: dict[tuple[str, str], Numbers] = {}
    for case in cases:
        where = (case["settings"], case["proposals"])
        worst[where] = max(worst.get(where, case), case, key=lambda each: each["error"])
    rows = [[name, *(_error(worst.get((name, kind)), finding) for kind in proposals)] for name in settings]
    raised = dict.fromkeys(case["raised"] for case in cases if "raised" in case)
    return fragment(EXACT, finding=finding, table=table(["settings", *proposals], rows), raised=list(raised))


def _error(case: Numbers | None, finding: Numbers) -> Cell:
    if case is None:
        return Cell(None)
    return Cell(
        "raised" if "raised" in case else f"{case['error']:.1g}",
        GOOD if case["error"] <= finding.get("bound", 0) else BAD,
    )


def _greedy(finding: Numbers) -> Markup:
    differences = finding.get("differences")
    measured = facts(
        [
            ("tokens", finding.get("tokens")),
            ("requests", finding.get("requests")),
            ("requests without a difference", finding.get("identical_requests")),
            ("differences", None if differences is None else len(differences)),
            ("not explained by rounding", finding.get("unexplained")),
            ("largest gap", finding.get("largest_gap")),
            ("largest move of a logit by the width of a pass", finding.get("largest_move")),
            ("precision of the logits", finding.get("dtype")),
        ]
    )
    return fragment(GREEDY, facts=measured, differences=_differences(differences or []))


def _differences(differences: Sequence[Numbers]) -> Markup:
    """Those that rounding does not explain first."""
    ordered = sorted(differences, key=lambda each: bool(each.get("near_tie")))
    rows = [
        [
            f"{each.get('request')} / {each.get('position')}",
            str(each.get("emitted")),
            str(each.get("best")),
            each.get("gap"),
            Cell("yes", WARN) if each.get("near_tie") else Cell("no", BAD),
        ]
        for each in ordered
    ]
    return _at_most(["request / position", "emitted id", "best id", "gap", "near-tie"], rows)


def _sampled(finding: Numbers) -> Markup:
    measured = facts(
        [
            ("tokens", finding.get("tokens")),
            ("requests", finding.get("requests")),
            (
                "smallest bias towards q that would have shown (mean total variation)",
                finding.get("smallest_detectable_tv"),
            ),
            ("needed for lossless", _needed(finding)),
            ("tokens at which the proposer had a draft", finding.get("drafted_positions")),
            ("tokens of probability 0", _length(finding.get("impossible"))),
            ("just outside a cut-off, by rounding", finding.get("outside_by_rounding")),
        ]
    )
    impossible = [
        [f"{each.get('request')} / {each.get('position')}", str(each.get("token"))]
        for each in finding.get("impossible", [])
    ]
    return fragment(
        SAMPLED,
        facts=measured,
        charts=_charts(finding, OF_TOKENS),
        p_values=_p_values(finding, OF_TOKENS),
        impossible=_at_most(["request / position", "id"], impossible),
    )


def _contract(finding: Numbers) -> Markup:
    return facts([("drafts", finding.get("draws"))]) + _charts(finding, OF_DRAFTS) + _p_values(finding, OF_DRAFTS)


def _needed(finding: Numbers) -> str | None:
    if "enough" not in finding or "tokens_needed" not in finding:
        return None
    return f"{number(finding['enough'])} or less, which takes {number(finding['tokens_needed'])} tokens"


def _length(items: Sequence[Any] | None) -> int | None:
    return None if items is None else len(items)


def _charts(finding: Numbers, orderings: Mapping[str, tuple[str, str]]) -> Markup:
    histograms = finding.get("histograms") or {}
    charts = [(*orderings[name], _chart(counts, orderings[name][0])) for name, counts in histograms.items() if counts]
    return fragment(CHARTS, charts=charts) if charts else Markup()


def _chart(counts: Sequence[int], ordering: str) -> Markup:
    n, share = sum(counts), 1 / len(counts)
    spread = SIGMAS * math.sqrt(n * share * (1 - share))
    label = f"histogram of U, ordered by {ordering}: {min(counts)} to {max(counts)} a bin, {n * share:.1f} expected"
    return histogram(counts, label, expected=n * share, spread=spread)


def _p_values(finding: Numbers, orderings: Mapping[str, tuple[str, str]]) -> Markup:
    found, level = finding.get("p_values"), finding.get("level", 0)
    if not found:
        return Markup()
    rows = [
        [
            f"{each['statistic']}, by {orderings[each['ordering']][0]}",
            each["value"],
            each["p"],
            Cell(each["p_corrected"], BAD if each["p_corrected"] < level else GOOD),
        ]
        for each in found
    ]
    overlap = any(each["statistic"] == "overlap z" for each in found)
    shown = table(["test", "value", "p", "p, corrected"], rows)
    return fragment(P_VALUES, table=shown, tests=len(found), level=level, overlap=overlap)


def _at_most(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table of MOST_ROWS rows, with a word on how many there are more; nothing without rows."""
    if not rows:
        return Markup()
    more = len(rows) - MOST_ROWS
    words = fragment('<p class="small">and {{ more }} more, in result.json</p>', more=more) if more > 0 else Markup()
    return table(head, rows[:MOST_ROWS]) + words


DETAILS: dict[str, Callable[[Numbers], Markup]] = {
    "exact law": _exact,
    "greedy identity": _greedy,
    "sampled law": _sampled,
    "proposal contract": _contract,
}
