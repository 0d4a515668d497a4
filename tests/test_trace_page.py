"""The page of a traced decode: it says what result.json says, whole and in colour, and its script shows the rest."""

from __future__ import annotations

import html
import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from specpipe import cli
from specpipe.audit.tables import FixedProposer, TableProposer
from specpipe.chance import Chance
from specpipe.report import trace
from specpipe.report.trace import CUT, KINDS, LONG, SILENT, UNFINISHED, TracedRequest, trace_page
from specpipe.sequence import Sequence, TokenLogprobs
from specpipe.settings import GenerationSettings
from specpipe.stats import completion
from specpipe.terminal import VISIBLE
from specpipe.text import StopWatch, TextCodec
from tests.stand_ins import chain, constant, pipeline_of
from tests.test_decode_command import IN_THE_MIDDLE, QUICK, InTheMiddle
from tests.test_report import Reader

END = 256  # an id without text
EVIL = "</script><script>alert(1)</script><!-- <b>\"'&amp;"
PARTS = {"prefill": 0.0, "draft": 0.001, "verify": 0.02, "accept": 0.0, "other": 0.0}


class ByteTokenizer:
    """Ids are bytes, and one special token."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool = True, **_: Any) -> str:
        end = b"" if skip_special_tokens else b"<|end|>"
        return b"".join(end if i == END else bytes([i]) for i in ids).decode("utf-8", "replace")


CODEC = TextCodec(ByteTokenizer())


class Page(Reader):
    """A trace page: its tokens as (classes, text), the drafts that were not accepted, what its scripts hold."""

    def __init__(self, page: str) -> None:
        self.tokens: list[list[tuple[list[str], str]]] = []  # of each request
        self.rejected: list[str] = []
        self.scripts: list[str] = []
        super().__init__(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        classes = (dict(attrs).get("class") or "").split()
        if "request" in classes:
            self.tokens.append([])
        elif tag == "span" and "t" in classes and self.tokens:
            self.tokens[-1].append((classes, ""))
        elif tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-2:] == ["del", "span"]:
            self.rejected.append(data)
        elif self.open[-1:] == ["span"] and self.tokens and "div" in self.open:
            classes, text = self.tokens[-1].pop()
            self.tokens[-1].append((classes, text + data))
        else:
            super().handle_data(data)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(kind for request in self.tokens for classes, _ in request for kind in classes if kind in KINDS)

    def shown(self, request: int = 0) -> str:
        return "".join(text for _, text in self.tokens[request])

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


Block = tuple[bytes | list[int], bytes, list[float]]  # what is emitted, the draft, the overlaps


def traced(*blocks: Block, prompt: str = "hi", law: bool = False, end: int = END, **settings: Any) -> TracedRequest:
    """A request whose steps emit these ids, as they are committed."""
    chosen = GenerationSettings(**({"max_new_tokens": 400} | settings))
    watch = StopWatch(CODEC, chosen.stop) if chosen.stop else None
    request = Sequence(CODEC.encode(prompt), chosen, stop_ids=[end], stop_text=watch, chance=Chance(0, [1]))
    for emitted, draft, overlaps in blocks:
        if request.finish_reason:
            break
        step = request.commit(list(emitted), len(draft), overlaps)
        step.draft_token_ids, step.asked, step.has_q = list(draft), 4, law
        step.log_p, step.log_q = [-0.5] * len(draft), [-0.25 if law else 0.0] * len(draft)
        step.seconds = PARTS
        if chosen.logprobs:
            step.logprobs = [TokenLogprobs(t, -0.125, [(t, -0.125), (END, -3.0)]) for t in step.tokens]
    return TracedRequest.of(completion(prompt, request, CODEC.answer(request), 4).record(), request, CODEC)


def page_of(*requests: TracedRequest) -> Page:
    return Page(trace_page({"proposer": "ngram"}, requests))


def word(text: str) -> list[Block]:
    """A plain step for each byte."""
    return [([byte], b"", []) for byte in text.encode()]


@pytest.fixture(params=[1, 2])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """The folder of a traced decode of three prompts, alone and in a batch."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}abab{EVIL}"}) + "\n" for n in range(3)))
    words = [*QUICK, f"hydra.run.dir={tmp_path / 'run'}", "prompts=jsonl", f"prompts.path={file}", "trace=true"]
    words += ["proposer=layer_skip", "proposer.layers=1", "generation=sample", "generation.max_new_tokens=24"]
    assert decode(monkeypatch, *words, f"batch_size={request.param}") == 0
    assert f"trace:  {tmp_path / 'run' / 'trace.html'}\n" in capsys.readouterr().err
    return tmp_path / "run"


def decode(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "argv", ["specpipe", "decode", *words])
    try:
        return cli.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_traced_decode_writes_a_page_that_says_what_result_json_says(run: Path) -> None:
    page = Page((run / "trace.html").read_text("utf-8"))
    result = json.loads((run / "result.json").read_text("utf-8"))
    lines = [json.loads(line) for line in (run / "trace.jsonl").read_text("utf-8").splitlines()]
    counts = result["summary"]["spec_decode"]
    assert page.kinds == Counter(kind for line in lines for kind in line["kinds"])
    assert page.kinds["accepted"] == counts["num_accepted_draft_tokens"] > 0
    assert len(page.rejected) == counts["num_draft_tokens"] - counts["num_accepted_draft_tokens"] > 0
    for number, request in enumerate(result["requests"]):
        assert page.shown(number) == request["text"].translate(VISIBLE)
        steps = page.data["requests"][number]["steps"]
        assert [token for step in steps for token in step["tokens"]] == request["token_ids"]
        assert len(page.tokens[number]) == len(request["token_ids"])
    for line in lines:
        drafted, accepted = line["draft_token_ids"], line["accepted"]
        assert len(drafted) == line["drafted"] == len(line["log_p"])
        assert drafted[:accepted] == line["token_ids"][:accepted]
    assert page.open == []
    assert page.text.count(EVIL) == 3


def test_an_interrupted_run_has_a_page_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(InTheMiddle, "happening", staticmethod(lambda: signal.raise_signal(signal.SIGINT)))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab"}\n' * 4)
    words = [*QUICK, *IN_THE_MIDDLE, "prompts=jsonl", f"prompts.path={file}", "generation.max_new_tokens=6"]
    assert decode(monkeypatch, *words, "trace=true", f"hydra.run.dir={tmp_path / 'run'}") == 130
    page = Page((tmp_path / "run" / "trace.html").read_text("utf-8"))
    assert [len(tokens) for tokens in page.tokens] == [6, 6, 2]
    assert page.text.count("interrupted") == 1
    assert "trace.html" not in capsys.readouterr().err


def test_without_trace_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode(monkeypatch, *QUICK, "prompt=ab", "generation.max_new_tokens=4", f"hydra.run.dir={tmp_path}") == 0
    assert not (tmp_path / "trace.html").exists()


def test_a_trace_keeps_every_draft_and_changes_no_token() -> None:
    """Also the drafts behind a rejection; without a trace none is kept."""
    law = [0.5, 0.25, 0.25]
    tokens = []
    for scored in (False, True):
        rule = constant(law)
        pipeline = pipeline_of(rule, 3, TableProposer(rule, 3), gamma=3, temperature=1.0, max_new_tokens=40)
        pipeline.score_drafts = scored
        [sequence] = pipeline.sequences([[0]])
        kept = [step.draft_token_ids for step in pipeline.decode(sequence)]
        assert all((ids is not None) == scored for ids in kept)
        tokens.append(sequence.new_tokens)
    assert tokens[0] == tokens[1]
    pipeline = pipeline_of(chain(9), 9, FixedProposer(lambda ids, k: [7, 8, 7][:k]), gamma=3, max_new_tokens=5)
    pipeline.score_drafts = True
    [sequence] = pipeline.sequences([[0]])
    assert [step.draft_token_ids for step in pipeline.decode(sequence)][:2] == [[7, 8, 7], [7, 8, 7]]


def test_a_character_of_several_tokens_stands_on_the_one_that_completes_it() -> None:
    assert CODEC.by_token(list("aß🙂".encode())) == ["a", "", "ß", "", "", "", "🙂"]
    assert CODEC.by_token([*"🙂".encode()][:2]) == ["", "\ufffd"]
    page = page_of(traced(*word("a🙂")))
    assert [(("part" in classes), text) for classes, text in page.tokens[0]] == [
        (False, "a"),
        (True, ""),
        (True, ""),
        (True, ""),
        (False, "🙂"),
    ]
    assert page.data["requests"][0]["blank"] == {"1": UNFINISHED, "2": UNFINISHED, "3": UNFINISHED}


def test_the_text_ends_where_the_answer_does() -> None:
    """A stop string is not in it, nor is a special token; both are told of."""
    page = page_of(traced(*word("one STOP two"), stop="STOP"), traced(*word("x"), ([END], b"", [])))
    assert page.shown(0) == "one "
    assert len(page.tokens[0]) == 8
    assert page.data["requests"][0]["blank"] == {str(i): CUT for i in range(4, 8)}
    assert page.shown(1) == "x"
    assert page.data["requests"][1]["blank"] == {"1": SILENT}
    assert page.data["names"][str(END)] == "<|end|>"
    kept = page_of(traced(*word("one STOP two"), stop="STOP", include_stop_str_in_output=True))
    assert kept.shown() == "one STOP"


def test_drafts_that_were_not_accepted_stand_where_they_were_meant() -> None:
    """In front of the correction; behind the text where a stop fell inside the draft."""
    text = trace_page(
        {}, [traced((b"abX", b"abcd", [1.0, 1.0, 0.25])), traced(([97, END, 99], b"a\n", [1.0, 1.0]), end=97)]
    )
    page = Page(text)
    assert page.rejected == ["c", "d", "↵"]
    spans = re.sub(r"<(/?)span[^>]*>", "", text.split('class="answer"')[1].split("</div>")[0].split(">", 1)[1])
    assert spans == 'ab<del data-step="0">cd</del>X'
    assert [classes for classes, _ in page.tokens[0]] == [
        ["t", "accepted", "first"],
        ["t", "accepted"],
        ["t", "correction"],
    ]
    assert page.kinds == {"accepted": 3, "correction": 1}


def test_each_step_begins_with_a_line() -> None:
    """In front of its rejected draft where that is shown, in front of its token where it is not."""
    text = trace_page({}, [traced((b"x", b"ab", [0.5]), (b"cy", b"c", [1.0]))])
    assert [classes for classes, _ in Page(text).tokens[0] if "first" in classes] == [
        ["t", "correction", "first"],
        ["t", "accepted", "first"],
    ]
    assert text.count('<del data-step="0" class="first">') == 1
    assert "body:has(#rejected:checked) .answer del.first + .t::before { border: 0; }" in text


def test_an_empty_answer_has_no_slider() -> None:
    page = page_of(traced(max_new_tokens=0))
    assert "No tokens." in page.text
    assert "range" not in [attributes.get("type") for _, attributes in page.tags]
    assert page_of().open == []


def test_a_step_that_was_interrupted_before_it_was_measured_is_shown() -> None:
    request = traced((b"ab", b"a", [1.0]))
    for name in ("draft_token_ids", "log_p", "log_q"):
        setattr(request.steps[0], name, None)
    request.steps[0].seconds = {}
    page = page_of(request)
    assert page.shown() == "ab"
    assert not {"drafts", "p", "q", "ms"} & set(page.data["requests"][0]["steps"][0])


def test_a_long_prompt_is_folded() -> None:
    tags = [tag for tag, _ in page_of(traced(prompt="a" * LONG), traced(prompt="a" * (LONG + 1))).tags]
    assert tags.count("details") == 1


def safe(page: Page) -> bool:
    """Two scripts, the data and the program; what was decoded is text and nothing else."""
    return len(page.scripts) == 2 and page.open == [] and page.data["names"]["1"] == EVIL


def test_no_text_becomes_part_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    request = traced((EVIL.encode(), b"", []), prompt=EVIL)
    request = TracedRequest(request.record, request.steps, request.texts, {**request.names, 1: EVIL}, request.silent)
    page = page_of(request)
    assert safe(page)
    assert page.shown() == EVIL
    monkeypatch.setattr(trace, "embedded", lambda data: Markup(json.dumps(data)))  # what safe() is there to refuse
    with pytest.raises((AssertionError, ValueError)):
        assert safe(page_of(request))


def test_numbers_that_json_has_not_are_left_out() -> None:
    request = traced((b"ab", b"a", [float("nan")]))
    request.steps[0].log_p = [float("-inf")]
    step = page_of(request).data["requests"][0]["steps"][0]
    assert step["p"] == [0.0]
    assert step["alpha"] == [None]


def test_page_needs_nothing_from_outside_and_stays_small() -> None:
    """12 requests of 128 tokens, a draft of 5 and 3 alternatives in every step."""
    steps = [(b"ab", b"abcde", [1.0, 0.5])] * 64
    text = trace_page({}, [traced(*steps, max_new_tokens=128, logprobs=3, law=True)] * 12)
    assert len(text.encode()) < 1_000_000
    assert not [name for _, attributes in Page(text).tags for name in attributes if name in ("src", "href")]
    assert not re.search(r"https?:|url\(|@import|fetch\(|innerHTML", text)


PROBE = """
<pre id="seen"></pre>
<script>
{
const seen = {};
const here = [...document.querySelectorAll("section.request")];
const shown = (section) => [...section.querySelectorAll(".answer .t")]
  .filter((node) => getComputedStyle(node).visibility === "visible").map((node) => node.textContent).join("");
const slide = (section, count) => {
  const slider = section.querySelector("input");
  slider.value = count;
  slider.dispatchEvent(new Event("input"));
};
const node = (request, j) => here[request].querySelectorAll(".answer .t")[j];
const look = (request, j) => {
  node(request, j).dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
  return document.getElementById("card").innerText;
};
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
seen.hash = [shown(here[0]), here[0].querySelector("output").textContent];
seen.whole = here.filter((section) => section.querySelector("input")).map((section) => {
  slide(section, section.querySelector("input").max);
  return shown(section);
});
slide(here[0], 1);
seen.first = [shown(here[0]), here[0].querySelector(".step").innerText];
slide(here[0], 0);
seen.none = shown(here[0]);
seen.later = look(0, 0);
slide(here[0], 9);
seen.accepted = look(0, 0);
seen.correction = look(0, 2);
seen.plain = look(0, 3);
seen.evil = look(1, 0);
seen.part = look(2, 1);
const drafts = here[0].querySelector("del");
seen.hidden = getComputedStyle(drafts).display;
document.getElementById("rejected").click();
seen.ticked = getComputedStyle(drafts).display;
node(0, 0).focus();
press("ArrowRight");
seen.right = [...here[0].querySelectorAll(".answer .t")].indexOf(document.activeElement);
press("ArrowDown");
seen.down = [...here[0].querySelectorAll(".answer .t")].indexOf(document.activeElement);
seen.open = !document.getElementById("card").hidden;
press("Escape");
seen.closed = document.getElementById("card").hidden;
seen.stops = here.map((section) => section.querySelectorAll(".answer [tabindex='0']").length);
seen.wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
document.getElementById("seen").textContent = JSON.stringify(seen);
}
</script>
"""

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a browser shows of a page that is used, and what it complains of."""
    if BROWSER is None:
        pytest.skip("no chromium here")
    requests = [
        traced((b"abX", b"abcd", [1.0, 0.75, 0.25]), *word("yz"), law=True),
        traced((EVIL.encode(), b"", []), logprobs=1),
        traced(*word("🙂")),
        traced(max_new_tokens=0),
        traced(*word("one STOP two"), stop="STOP"),
    ]
    result = {"proposer": "ngram", "config": {"generation": {"logprobs_mode": "raw"}}}
    file = tmp_path_factory.mktemp("page") / "trace.html"
    file.write_text(trace_page(result, requests).replace("</body>", f"{PROBE}</body>"), "utf-8")
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    words += [f"--user-data-dir={file.parent / 'profile'}", f"{file.as_uri()}#request=1&step=2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(html.unescape(found[1]) or "{}"), "complaints": complaints}


def test_a_browser_has_nothing_to_complain_of(seen: dict[str, Any]) -> None:
    assert seen["complaints"] == []
    assert seen["wide"]


def test_the_slider_shows_the_text_up_to_its_step(seen: dict[str, Any]) -> None:
    """Its last place shows the whole answer; the address can set it."""
    assert seen["whole"] == ["abXyz", EVIL, "🙂", "one "]
    assert seen["hash"] == ["abXy", "2 of 3"]
    assert seen["none"] == ""
    text, panel = seen["first"]
    assert text == "abX"
    assert "Step 1: drafted 4, 2 accepted. 21 ms" in panel
    assert re.findall(r"not accepted|accepted|correction", panel)[1:] == [
        *["accepted"] * 2,
        *["not accepted"] * 2,
        "correction",
    ]


def test_a_token_tells_how_it_came_about(seen: dict[str, Any]) -> None:
    def facts(name: str) -> str:
        return re.sub(r"\s+", " ", seen[name])

    assert facts("accepted").startswith("a id 97")
    for words in (
        f"accepted: {KINDS['accepted']}",
        "p 0.607 (target)",
        "q 0.779 (proposer)",
        "alpha 1 ",
        "step 1 of 3",
    ):
        assert words in facts("accepted")
    assert "generation.logprobs=3 shows alternatives" in facts("accepted")
    for words in ("drafted c (id 99), not accepted", "p of the draft 0.607", "alpha 0.25", "4, 2 accepted"):
        assert words in facts("correction")
    assert "p of the draft" not in facts("plain")
    assert "alpha" not in facts("plain")
    assert "nothing drafted (asked for 4)" in facts("plain")
    assert "this token 0.882 (target, raw law)" in facts("evil")
    assert "most likely < 0.882 <|end|> 0.05" in facts("evil")
    assert UNFINISHED in facts("part")
    assert seen["later"] == ""  # one that the slider hides tells nothing


def test_drafts_that_were_not_accepted_are_shown_when_asked_for(seen: dict[str, Any]) -> None:
    assert (seen["hidden"], seen["ticked"]) == ("none", "inline")


def test_the_keyboard_reaches_every_token_with_one_stop_of_the_tab_key(seen: dict[str, Any]) -> None:
    assert (seen["right"], seen["down"]) == (1, 3)
    assert seen["open"]
    assert seen["closed"]
    assert seen["stops"] == [1, 1, 1, 0, 1]
