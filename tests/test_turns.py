"""Conversations: each turn is asked behind the model's own answers, alone and in a batch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe import cli
from specpipe.chance import Chance
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.proposers.ngram import NgramProposer
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.text import TextCodec
from specpipe.turns import Requests
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.smollm2 import DIRECTORY, cache_root
from specpipe.verifier.targets import Target, tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
TALKS = Prompts(["one one", "two", "three three"], later=[["and then", "so"], [], ["why"]])
PLACES = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


@pytest.fixture(scope="module")
def target() -> Target:
    made = tiny(device="cpu")
    made.tokenizer.chat_template = TEMPLATE
    return made


def pipeline_on(target: Target, *, chat: bool | None = None, seed: int = 0, **settings: Any) -> Pipeline:
    return Pipeline(
        verifier=EagerVerifier(target),
        proposer=NgramProposer(),
        sampler=Rejection(),
        settings=GenerationSettings(**{"max_new_tokens": 6, **settings}),
        num_speculative_tokens=3,
        seed=seed,
        chat=chat,
    )


def decoded(pipeline: Pipeline, prompts: Prompts = TALKS, batch_size: int = 1) -> Requests:
    requests = Requests(pipeline, prompts)
    if batch_size == 1:
        for request in requests:
            for _ in pipeline.decode(request.sequence):
                pass
    else:
        for _ in pipeline.decode_together(requests.firsts, batch_size, requests.follow):
            pass
    return requests


def prompt_ids(sequence: Sequence) -> list[int]:
    return sequence.tokens[: sequence.prompt_length]


def ids_of(requests: Requests) -> list[tuple[list[int], list[int]]]:
    return [(prompt_ids(each.sequence), each.sequence.new_tokens) for each in requests.made()]


def test_each_turn_stands_behind_the_ids_of_the_turns_before_it(target: Target) -> None:
    made = decoded(pipeline_on(target)).made()
    assert [(each.conversation, each.turn) for each in made] == PLACES
    assert [each.number for each in made] == list(range(6))
    assert [each.history for each in made] == [None, "ids", "ids", None, None, "ids"]
    for before, after in ((0, 1), (1, 2), (4, 5)):
        said, asked = made[before].sequence.tokens, prompt_ids(made[after].sequence)
        assert asked[: len(said)] == said
        behind = target.tokenizer.decode(asked[len(said) :])
        assert behind == f"<|end|>\n[u]{made[after].text}<|end|>\n[a]"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [2, 3, 8])
def test_a_batch_holds_the_conversations_that_turns_one_by_one_do(
    target: Target, temperature: float, batch_size: int
) -> None:
    pipeline = pipeline_on(target, temperature=temperature)
    assert ids_of(decoded(pipeline, batch_size=batch_size)) == ids_of(decoded(pipeline))


def test_a_next_turn_takes_the_place_of_the_one_before_it(target: Target) -> None:
    pipeline = pipeline_on(target)
    requests = Requests(pipeline, TALKS)
    begun: list[tuple[int, int]] = []
    for sequence, step in pipeline.decode_together(requests.firsts, 2, requests.follow):
        request = requests.of(sequence)
        begun += [(request.conversation, request.turn)] if step.prefill else []
    assert begun == [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (2, 1)]


def test_what_was_begun_when_a_batch_was_interrupted_is_known_by_its_numbers(target: Target) -> None:
    pipeline = pipeline_on(target)
    requests = Requests(pipeline, TALKS)
    given: list[int] = []
    begun: list[list[int]] = []
    for sequence, step in pipeline.decode_together(requests.firsts, 2, requests.follow):
        given += [request.number for request in requests.finished()]
        left = [request.number for request in requests.made() if request.sequence.steps and request.number not in given]
        begun += [left] if step.prefill else []
        if requests.of(sequence).turn == 2:
            break
    assert given == [0, 1]
    assert begun == [[0, 3], [0, 3], [1, 3, 4], [1, 3, 4], [2, 3, 4, 5]]


def test_equal_conversations_have_streams_of_their_own_that_neighbours_do_not_change(target: Target) -> None:
    """Also where their first answers are equal, so that a later turn's ids alone could not tell them apart."""
    twice = Prompts(["one", "other", "one"], later=[["two"], ["two"], ["two"]])
    sampled = pipeline_on(target, temperature=1.0)
    alone, together = decoded(sampled, twice), decoded(sampled, twice, batch_size=3)
    assert ids_of(alone) == ids_of(together)
    first, _, second = (alone.made()[n].sequence for n in (1, 3, 5))
    assert first.chance.key != second.chance.key
    greedy = decoded(pipeline_on(target), twice).made()
    assert greedy[1].sequence.tokens == greedy[5].sequence.tokens
    assert greedy[1].sequence.chance.key != greedy[5].sequence.chance.key
    wrong = Requests(pipeline := pipeline_on(target), twice)
    wrong.firsts[2].chance.repeat = 0
    for request in wrong:
        list(pipeline.decode(request.sequence))
    assert wrong.made()[1].sequence.chance.key == wrong.made()[5].sequence.chance.key


def test_the_seed_decides_a_conversation(target: Target) -> None:
    same, again, other = (ids_of(decoded(pipeline_on(target, temperature=1.0, seed=seed), TALKS)) for seed in (1, 1, 2))
    assert same == again != other


def finished(target: Target, codec: TextCodec, said: str, answer: list[int], **settings: Any) -> Sequence:
    """A request that was answered with these ids."""
    pipeline = pipeline_on(target, chat=codec.chat, **{"max_new_tokens": len(answer), **settings})
    (sequence,) = pipeline.sequences([said])
    sequence.commit(answer, 0, [1.0])
    assert sequence.finish_reason
    return sequence


def test_an_end_of_text_id_is_not_doubled(target: Target) -> None:
    codec, (end,) = TextCodec(target.tokenizer), target.eos_ids
    before = finished(target, codec, "hi", [*target.tokenizer("yes")["input_ids"], end])
    ids, as_it_is = codec.encode_next(["hi", "yes", "why"], before)
    assert as_it_is
    assert ids[: len(before.tokens)] == before.tokens
    assert target.tokenizer.decode(ids) == "[u]hi<|end|>\n[a]yes<|end|>\n[u]why<|end|>\n[a]"


def test_an_answer_that_a_stop_string_cut_goes_on_as_the_text_that_was_given(target: Target) -> None:
    codec = TextCodec(target.tokenizer)
    before = finished(target, codec, "hi", list(target.tokenizer("yes. No")["input_ids"]), stop=["."])
    answer = codec.answer(before)
    ids, as_it_is = codec.encode_next(["hi", answer, "why"], before)
    assert (answer, as_it_is) == ("yes", False)
    assert target.tokenizer.decode(ids) == "[u]hi<|end|>\n[a]yes<|end|>\n[u]why<|end|>\n[a]"


def test_a_template_that_changes_an_answer_gets_its_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", TEMPLATE.replace("m.content", "m.content | trim"))
    codec = TextCodec(target.tokenizer)
    before = finished(target, codec, "hi", list(target.tokenizer(" yes")["input_ids"]))
    ids, as_it_is = codec.encode_next(["hi", " yes", "why"], before)
    assert not as_it_is
    assert target.tokenizer.decode(ids) == "[u]hi<|end|>\n[a]yes<|end|>\n[u]why<|end|>\n[a]"


def test_ids_that_their_text_would_not_give_again_are_kept(target: Target) -> None:
    """Half a character: encoded anew from text, it would be three other bytes."""
    codec, half = TextCodec(target.tokenizer), target.tokenizer("é")["input_ids"][:1]
    before = finished(target, codec, "hi", half)
    answer = codec.answer(before)
    ids, as_it_is = codec.encode_next(["hi", answer, "why"], before)
    assert as_it_is
    assert ids[: len(before.tokens)] == before.tokens
    assert target.tokenizer(answer)["input_ids"] != half


def test_without_a_template_blank_lines_stand_between_turns(target: Target) -> None:
    made = decoded(pipeline_on(target, chat=False)).made()
    tokens = made[0].sequence.tokens
    assert prompt_ids(made[1].sequence) == [*tokens, *target.tokenizer("\n\nand then")["input_ids"]]


class Joining:
    """A tokenizer of letters in which a full stop and the blank line behind it are one id, the first."""

    chat_template = None
    UNITS = (".\n\n", *"abc.\n")

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.UNITS.index(unit) for unit in re.findall(r"\.\n\n|.|\n", text)]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.UNITS[i] for i in ids)


@pytest.mark.parametrize(("answer", "as_it_is"), [("b", True), ("b.", False)])
def test_where_the_tokenizer_joins_answer_and_turn_the_whole_is_encoded_anew(answer: str, as_it_is: bool) -> None:
    tokenizer = Joining()
    codec = TextCodec(tokenizer)
    prompt, said = tokenizer("a")["input_ids"], tokenizer(answer)["input_ids"]
    sequence = Sequence(prompt, GenerationSettings(max_new_tokens=len(said)), chance=Chance(0))
    sequence.commit(said, 0, [1.0])
    ids = tokenizer(f"a{answer}\n\nc")["input_ids"]
    assert codec.encode_next(["a", answer, "c"], sequence) == (ids, as_it_is)
    assert (ids[: len(sequence.tokens)] == sequence.tokens) == as_it_is


@pytest.mark.real
@pytest.mark.skipif(not (cache_root() / DIRECTORY).is_dir(), reason="the default target is not in the cache")
@pytest.mark.parametrize("answer", [" The Rhine.\n", "The Rhine", ""])
def test_the_default_targets_template_keeps_every_id(answer: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cache_root() / DIRECTORY)
    codec, end = TextCodec(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = [*tokenizer(answer)["input_ids"], end]
    prompt, settings = codec.encode("Name a river."), GenerationSettings()
    before = Sequence(prompt, settings, stop_ids=[end], chance=Chance(0))
    before.commit(said, 0, [1.0])
    ids, as_it_is = codec.encode_next(["Name a river.", answer, "Another."], before)
    assert as_it_is
    assert ids[: len(before.tokens)] == before.tokens
    assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids


QUICK = ["target=tiny", "target.device=cpu", "wandb=none", "prompts=spec_bench"]
ROWS = [
    {"question_id": 1, "category": "a", "turns": ["one", "two", "three"]},
    {"question_id": 2, "category": "b", "turns": ["four"]},
    {"question_id": 3, "category": "a", "turns": ["five", "six"]},
]

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command on rows of a file; its exit code and result.json."""

    def command(
        name: str, *overrides: str, rows: list[dict[str, Any]] = ROWS, turns: str = "all", new_tokens: int = 6
    ) -> tuple[int, dict[str, Any]]:
        file, folder = tmp_path / "question.jsonl", tmp_path / "run"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [f"prompts.path={file}", f"prompts.turns={turns}", f"hydra.run.dir={folder}"]
        words += [f"generation.max_new_tokens={new_tokens}"]
        monkeypatch.setattr(sys, "argv", ["specpipe", name, *QUICK, *words, *overrides])
        code, result = cli.main(), folder / "result.json"
        return code, json.loads(result.read_text("utf-8")) if result.exists() else {}

    return command


def test_decode_records_each_turn_with_its_place_in_a_batch_as_one_by_one(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run("decode", "batch_size=3", "generation=sample", "seed=3", "trace=true")
    assert code == 0
    requests = result["requests"]
    assert [(each["conversation"], each["turn"]) for each in requests] == PLACES
    assert [each["number"] for each in requests] == list(range(6))
    assert [each["prompt"] for each in requests] == ["one", "two", "three", "four", "five", "six"]
    assert [each["history"] for each in requests] == [None, "ids", "ids", None, None, "ids"]
    for before, after in ((0, 1), (1, 2), (4, 5)):
        lengths = [requests[n]["prompt_tokens"] for n in (before, after)]
        added = len(f"\n\n{requests[after]['prompt']}")
        assert lengths[1] == lengths[0] + len(requests[before]["token_ids"]) + added
    categories = result["summary"]["categories"]
    assert {name: each["new_tokens"] for name, each in categories.items()} == {"a": 30, "b": 6}
    assert capsys.readouterr().out.count("\f\n") == 5
    _, alone = run("decode", "generation=sample", "seed=3")
    for key in ("prompt", "prompt_tokens", "token_ids", "finish_reason", "number", "history"):
        assert [each[key] for each in requests] == [each[key] for each in alone["requests"]]


def test_a_conversation_that_outgrows_the_context_ends_and_the_others_go_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"category": "a", "turns": ["x" * 505, "two", "three"]}, ROWS[2]]
    code, result = run("decode", "batch_size=3", rows=rows)
    assert code == 0
    found = [(each["turn"], len(each["token_ids"]), each["finish_reason"]) for each in result["requests"]]
    assert found == [(0, 6, "length"), (1, 0, "context"), (2, 0, "context"), (0, 6, "length"), (1, 6, "length")]
    assert "no room in the target's context for later turns: 2 have no answer" in capsys.readouterr().err


def test_a_prompt_as_long_as_the_context_is_told(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run("decode", rows=[{"category": "a", "turns": ["x" * 512]}, ROWS[2]])
    assert code == 0
    assert result["requests"][0]["finish_reason"] == "context"
    assert "1 of the prompts fill the target's context: no room for an answer" in capsys.readouterr().err


def test_turns_without_anything_to_decode_are_there_too(run: Run) -> None:
    code, result = run("decode", "batch_size=3", new_tokens=0)
    assert code == 0
    assert [(each["conversation"], each["turn"]) for each in result["requests"]] == PLACES
    assert {each["finish_reason"] for each in result["requests"]} == {"length"}


def test_first_turns_alone_are_the_default_and_have_no_place(run: Run) -> None:
    code, result = run("decode", turns="first")
    assert code == 0
    assert [each["prompt"] for each in result["requests"]] == ["one", "four", "five"]
    assert not {"number", "conversation", "turn", "history"} & set(result["requests"][0])


def test_an_audit_of_all_turns_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("audit") == (2, {})
    assert "prompts.turns: an audit decodes first turns" in capsys.readouterr().err
