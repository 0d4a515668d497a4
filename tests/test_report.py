"""Pages for people: they say what result.json says, need nothing but themselves, and stand whatever is missing."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from specpipe.audit.exact import FULL, PROPOSALS, SETTINGS, V, sweep
from specpipe.audit.finding import BIASED, FAILED, LOSSLESS, NOT_APPLICABLE, PASSED, TOO_LITTLE
from specpipe.audit.greedy import GreedyIdentity
from specpipe.audit.reading import Answer
from specpipe.audit.sampled import SampledLaw
from specpipe.audit.tables import TableVerifier
from specpipe.report.audit import MOST_ROWS, audit_page
from specpipe.report.page import facts, histogram, number, page, table
from specpipe.settings import GenerationSettings

VOID = {"meta", "br", "rect", "line"}


class Reader(HTMLParser):
    """Tags with their attributes, and the words as a person reads them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def bars(self) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if "bar" in (attributes.get("class") or "").split()]


def finding(test: str, result: str = PASSED, reason: str = "seen.", **numbers: Any) -> dict[str, Any]:
    return {"test": test, "result": result, "reason": reason, **numbers}


def audit(*tests: dict[str, Any], verdict: str | None = LOSSLESS, **changed: Any) -> dict[str, Any]:
    """result.json of an audit that found this."""
    return {
        "command": "audit",
        "version": "9.8.7",
        "seed": 41,
        "target": {"model": "SomeLM-1B", "dtype": "bfloat16", "device": "cuda"},
        "proposer": "ngram",
        "sampler": "block",
        "num_speculative_tokens": 6,
        "config": {"file": None, "proposer": {"_target_": "x.Y", "max_ngram": 3}, "generation": {"temperature": 0.7}},
        "verdict": verdict,
        "reasons": ["sampled law: seen."],
        "tests": list(tests),
        "requests": [],
        **changed,
    }


def sampled(tokens: int = 64) -> dict[str, Any]:
    """The record of a real test, over tokens of a table model."""
    law = SampledLaw(TableVerifier(FULL, V), GenerationSettings(temperature=1.0), frozenset(), lambda answer, t: 1)
    ids = torch.randint(V, (tokens,), generator=torch.Generator().manual_seed(3)).tolist()
    law.add(Answer([1, 0], ids))
    return law.finding().record()


def exact(**errors: float) -> dict[str, Any]:
    """All cases right, but for those of a gamma (`g1`, `g2`, `g3`) with soft q at temperature 1."""
    cases = [{"gamma": g, "proposals": kind, "settings": name, "error": 2e-17} for g, kind, name, _ in sweep()]
    for case in cases:
        if (case["proposals"], case["settings"]) == ("soft q", "temperature 1"):
            case["error"] = errors.get(f"g{case['gamma']}", 2e-17)
    return finding("exact law", bound=1e-12, vocabulary=3, tokens=4, cases=cases)


def differences(near: int, far: int) -> dict[str, Any]:
    rows = [
        {"request": 5, "position": i, "emitted": 1000 + i, "best": 7, "gap": 0.5, "near_tie": i < near}
        for i in range(near + far)
    ]
    return finding("greedy identity", requests=9, tokens=900, differences=rows, unexplained=far)


@pytest.mark.parametrize(("verdict", "tone"), [(LOSSLESS, "good"), (BIASED, "bad"), (TOO_LITTLE, "warn")])
def test_page_holds_verdict_and_reasons(verdict: str, tone: str) -> None:
    html = audit_page(audit(finding("greedy identity", reason="all agree."), verdict=verdict))
    assert f'<h1 class="{tone}">{verdict}</h1>' in html
    assert "<li>sampled law: seen.</li>" in html
    assert "all agree." in html


def test_page_says_who_was_audited() -> None:
    text = Reader(audit_page(audit())).text
    for words in ("SomeLM-1B, bfloat16, cuda", "ngram (max_ngram 3)", "block", "temperature 0.7", "9.8.7", "41", "6"):
        assert words in text


def test_only_settings_that_differ_from_the_defaults_are_told() -> None:
    generation = {"_target_": "x.Y", "temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "stop": None}
    text = Reader(audit_page(audit(config={"generation": generation}))).text
    assert "temperature 1.0, top_p 0.9 " in text


def test_output_of_another_engine_is_named_by_its_file() -> None:
    result = audit(proposer=None, sampler=None, num_speculative_tokens=None, config={"file": "runs/theirs.jsonl"})
    text = Reader(audit_page(result)).text
    assert "another engine's output: runs/theirs.jsonl" in text
    assert "speculative tokens" not in text


def test_text_from_result_is_escaped() -> None:
    evil = '"><script>alert(1)</script>'
    named = {"histograms": {"id": [1, 2]}, "differences": [{"emitted": evil}], "impossible": [{"token": evil}]}
    case = {"gamma": 1, "proposals": evil, "settings": evil, "error": 1.0, "raised": evil}
    tests = [
        finding(test, evil, evil, **named, cases=[case]) for test in ("exact law", "greedy identity", "sampled law")
    ]
    result = audit(
        *tests, verdict=evil, reasons=[evil], target={"model": evil}, sampler=evil, config={"file": evil}, seed=evil
    )
    html = audit_page(result)
    assert not [tag for tag, _ in Reader(html).tags if tag == "script"]
    assert Reader(html).text.count(evil) > 10


def test_page_needs_nothing_from_outside() -> None:
    html = audit_page(audit(exact(g1=0.5), differences(2, 2), sampled(), verdict=BIASED))
    tags = Reader(html).tags
    links = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["#how"]
    assert ("section", {"id": "how"}) in tags
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in tags}
    assert not re.search(r"https?:|url\(|@import", html)


def test_every_tag_is_closed() -> None:
    assert Reader(audit_page(audit(exact(), differences(1, 1), sampled()))).open == []


@pytest.mark.parametrize("result", [{}, {"verdict": None, "tests": []}, audit(sampled(), verdict=None)])
def test_interrupted_run_gives_a_page_without_verdict(result: dict[str, Any]) -> None:
    text = Reader(audit_page(result)).text
    assert "interrupted" in text
    assert "there is no verdict" in text


@pytest.mark.parametrize(
    "test", ["exact law", "greedy identity", "sampled law", "proposal contract", "one of tomorrow"]
)
def test_finding_without_numbers_shows_its_reason(test: str) -> None:
    text = Reader(audit_page(audit(finding(test, FAILED, "it went wrong.")))).text
    assert f"{test} failed it went wrong." in text


def test_test_that_does_not_apply_shows_its_reason_only() -> None:
    shown = Reader(audit_page(audit(finding("sampled law", NOT_APPLICABLE, "at temperature 0 nothing is drawn."))))
    assert "at temperature 0 nothing is drawn." in shown.text
    assert not shown.bars()


def test_what_the_tests_record_is_what_the_page_shows() -> None:
    identity = GreedyIdentity(TableVerifier(FULL, V), GenerationSettings(), frozenset())
    identity.add([Answer([1, 0], [0, 1, 2, 0, 1, 2])])
    record = identity.finding().record()
    reader = Reader(audit_page(audit(record, sampled())))
    assert len(record["differences"]) == reader.text.count("0 / ")
    assert len(reader.bars()) == 3 * 32
    assert reader.text.count(", by p/q ") == 4


def test_bars_equal_the_counts() -> None:
    counts = [0, 10, 20, 40]
    html = histogram(counts, "counts", expected=17.5, spread=30)
    heights = [float(bar["height"] or "nan") for bar in Reader(html).bars()]
    assert heights == pytest.approx([height * heights[3] / 40 for height in counts], abs=0.02)
    assert [int(words) for words in re.findall(r": (\d+)</title>", html)] == counts


def test_bars_outside_the_band_stand_out() -> None:
    n, bins = 3200, 32
    spread = 3 * math.sqrt(n / bins * (1 - 1 / bins))  # 29.5
    counts = [100] * 28 + [70, 71, 129, 130]
    record = finding("sampled law", histograms={"id": counts})
    outside = ["out" in (bar["class"] or "") for bar in Reader(audit_page(audit(record))).bars()]
    assert sum(counts) == n
    assert outside == [abs(count - 100) > spread for count in counts] == [False] * 28 + [True, False, False, True]


def test_cell_of_the_exact_law_is_its_worst_draft_length() -> None:
    html = audit_page(audit(exact(g1=0.1, g2=0.3, g3=2e-17)))
    assert html.count('<td class="bad">') == 1
    assert '<td class="bad">0.3</td>' in html
    assert html.count('<td class="good">') == len(PROPOSALS) * len(SETTINGS) - 1


def test_cell_of_the_exact_law_says_that_the_sampler_raised() -> None:
    case = {"gamma": 1, "proposals": "soft q", "settings": "greedy", "error": 1.0, "raised": "ValueError: no mass"}
    html = audit_page(audit(finding("exact law", FAILED, cases=[case], bound=1e-12)))
    assert '<td class="bad">raised</td>' in html
    assert "ValueError: no mass" in html


def test_unexplained_differences_come_before_near_ties_and_the_rest_is_counted() -> None:
    html = audit_page(audit(differences(near=MOST_ROWS, far=3)))
    assert html.index("5 / 52") < html.index("5 / 0<")
    assert html.count("5 / ") == MOST_ROWS
    assert "and 3 more" in html


def test_p_values_below_the_level_stand_out() -> None:
    values = [
        {"ordering": "id", "statistic": "lag 1", "value": 90.0, "p": p, "p_corrected": 10 * p} for p in (9e-5, 2e-4)
    ]
    html = audit_page(audit(finding("sampled law", FAILED, level=1e-3, p_values=values)))
    assert re.findall(r'class="(\w+)">([\d.e-]+)</td>', html) == [("bad", "0.0009"), ("good", "0.002")]


def test_impossible_tokens_are_listed() -> None:
    record = finding("sampled law", FAILED, impossible=[{"request": 3, "position": 8, "token": 49151}])
    assert re.search(r"3 / 8.*49151", Reader(audit_page(audit(record))).text)


def test_drafts_are_ordered_by_q_on_the_page() -> None:
    record = finding("proposal contract", draws=640, histograms={"p": [20] * 32, "id": [20] * 32})
    reader = Reader(audit_page(audit(record)))
    assert "ordered by q " in reader.text
    assert len(reader.bars()) == 64


def test_page_of_a_name_that_is_no_unicode_can_be_written() -> None:
    assert r"bad\udcff.jsonl" in audit_page(audit(config={"file": "bad\udcff.jsonl"})).encode().decode()


def test_file_of_sampled_ids_is_promised_only_where_there_is_one() -> None:
    assert "outputs.jsonl" in audit_page(audit(requests=[{"text": "a"}]))
    assert "outputs.jsonl" not in audit_page(audit(requests=[]))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3263, "3,263"),
        (0.00538, "0.00538"),
        (123456.7, "123,457"),
        (2.3e-19, "2.3e-19"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (math.nan, "–"),
        (None, "–"),
        ("1e3", "1e3"),
    ],
)
def test_numbers_are_written_as_people_read_them(value: Any, words: str) -> None:
    assert number(value) == words


def test_facts_without_a_value_are_left_out() -> None:
    assert Reader(facts([("known", 0), ("unknown", None)])).text.split() == ["known", "0"]


def test_whole_page_is_a_document_with_its_title() -> None:
    html = page("a < b", table(["name"], [["x"]]))
    assert html.startswith("<!doctype html>")
    assert "<title>a &lt; b</title>" in html
    assert 'name="viewport"' in html
    assert "color-scheme: light dark" in html
