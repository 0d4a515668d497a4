"""The text that students are trained on: what is kept of a token, what an interrupted run leaves, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import probabilities
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.reader import Reader
from specpipe.verifier.targets import Target, tiny
from train import generate
from train.generate import Corpus, TargetText, in_validation, of_similar_length, refuse_other_heads
from train.shards import Document, Text, read_manifest, write_manifest, write_shard

V, H = 257, 64  # of `tiny`
PROMPTS = [f"{'tell ' * (i % 4)}me of {i}" for i in range(18)]
ENDS = tuple(range(0, V, 8))
OTHER = "its {} is "


def document(tokens: int, prompt: int, temperature: float = 0.0, *, hidden: int = 3, vocabulary: int = 100) -> Document:
    """Any document; another one for other sizes."""
    chance = torch.Generator().manual_seed(10 * tokens + prompt)
    n = tokens - prompt
    return Document(
        torch.randint(vocabulary, (tokens,), generator=chance),
        prompt,
        torch.randn(n, hidden, generator=chance).to(torch.bfloat16),
        torch.randn(n, generator=chance),
        temperature,
    )


def same(a: Document, b: Document) -> bool:
    return (a.prompt, a.temperature) == (b.prompt, b.temperature) and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("ids", "states", "logz")
    )


# ---- shards ----

DOCUMENTS = [document(7, 3), document(4, 3, 1.0), document(9, 1, 0.7)]


@pytest.mark.parametrize("vocabulary", [100, 65_536, 65_537])
def test_what_is_read_is_what_was_written(tmp_path: Path, vocabulary: int) -> None:
    documents = [*DOCUMENTS, document(30, 2, vocabulary=vocabulary)]
    told = [write_shard(tmp_path / f"train-{i}", documents[i : i + 2], vocabulary) for i in (0, 2)]
    text = Text([tmp_path / "train-0", tmp_path / "train-2"], vocabulary=vocabulary, hidden=3)
    assert len(text) == 4
    assert all(same(read, written) for read, written in zip(text, documents, strict=True))
    assert text.lengths == [7, 4, 9, 30]
    assert text.generated == sum(each["generated"] for each in told) == 4 + 1 + 8 + 28
    assert text.generated_ids().tolist() == torch.cat([each.answer for each in documents]).tolist()
    assert [each["tokens"] for each in told] == [11, 39]


def test_a_shard_is_mapped_and_not_loaded(tmp_path: Path) -> None:
    """What is asked for comes from the file, then and no earlier."""
    write_shard(tmp_path / "s", DOCUMENTS, 100)
    text = Text([tmp_path / "s"], vocabulary=100, hidden=3)
    logz = np.memmap(tmp_path / "s" / "logz.bin", dtype=np.float32, mode="r+")
    logz[0] = 5.0
    logz.flush()
    assert text[0].logz[0] == 5.0


def test_a_document_that_is_changed_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    write_shard(tmp_path / "s", DOCUMENTS, 100)
    text = Text([tmp_path / "s"], vocabulary=100, hidden=3)
    for part in (text[0].ids, text[0].states, text[0].logz):
        part.zero_()
    assert same(text[0], DOCUMENTS[0])


def cut(name: str, count: int) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        content = (folder / f"{name}.bin").read_bytes()
        (folder / f"{name}.bin").write_bytes(content[: len(content) - count] if count else b"")

    return damage


def with_docs(place: tuple[int, int], number: int) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        docs = np.fromfile(folder / "docs.bin", dtype=np.int64).reshape(-1, 4)
        docs[place] += number
        docs.tofile(folder / "docs.bin")

    return damage


def written_off(folder: Path) -> None:
    mask = np.fromfile(folder / "mask.bin", dtype=np.uint8)
    mask[3] = 0
    mask.tofile(folder / "mask.bin")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a token is no longer marked": (written_off, "12 tokens are marked as written, with 13 states, 13 logz"),
    "a logz is missing": (cut("logz", 4), "13 tokens are marked as written, with 13 states, 12 logz"),
    "a state is missing": (cut("state", 6), "13 tokens are marked as written, with 12 states, 13 logz"),
    "half a state is missing": (cut("state", 2), "cannot be read"),
    "an id is missing": (cut("ids", 2), "it has 20 marks for 19 ids"),
    "ids are empty": (cut("ids", 0), "cannot be read"),
    "a file is missing": (lambda folder: (folder / "mask.bin").unlink(), "cannot be read"),
    "a document is missing": (cut("docs", 32), "its documents do not cover its ids"),
    "all documents are missing": (cut("docs", 0), "its documents do not cover its ids"),
    "a document is longer": (with_docs((1, 1), 1), "its documents do not cover its ids"),
    "a document is negative": (with_docs((1, 1), -99), "its documents do not cover its ids"),
    "a document begins later": (with_docs((0, 0), 1), "its documents do not cover its ids"),
    "states are another document's": (with_docs((1, 2), 1), "its documents do not cover its states"),
    "the mask is shifted": (
        lambda folder: (folder / "mask.bin").write_bytes((folder / "mask.bin").read_bytes()[1:]),
        "it has 19 marks for 20 ids",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_shard_is_refused(tmp_path: Path, what: str) -> None:
    damage, said = DAMAGE[what]
    write_shard(tmp_path / "s", DOCUMENTS, 100)
    damage(tmp_path / "s")
    with pytest.raises(UserError, match=said) as refused:
        Text([tmp_path / "s"], vocabulary=100, hidden=3)
    assert refused.value.key == "data.folder"


def test_ids_that_the_target_lacks_and_states_of_another_size_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "s", DOCUMENTS, 100)
    highest = max(int(each.ids.max()) for each in DOCUMENTS)
    with pytest.raises(UserError, match=rf"it holds id {highest}, but the target's end at {highest - 1}\.$"):
        Text([tmp_path / "s"], vocabulary=highest, hidden=3)
    for hidden in (1, 13, 4):
        with pytest.raises(UserError, match=r"^data\.folder: "):
            Text([tmp_path / "s"], vocabulary=100, hidden=hidden)


def test_a_manifest_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, {"shards": {}})
    assert read_manifest(tmp_path) == {"format": "specpipe training text", "version": 1, "shards": {}}
    for content, said in (('{"format": "other", "version": 2}', "of version 2"), ("{", "damaged"), ("[]", "damaged")):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=said):
            read_manifest(tmp_path)


# ---- generation ----


def settings(place: Path, **asked: Any) -> TargetText:
    """Of text that is written in a moment, at a place."""
    prompts = asked.pop("prompts", PROMPTS)
    file = place.parent / f"{place.name}.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    usual: dict[str, Any] = {"max_new_tokens": 4, "val_share": 0.3, "rows": 5, "folder": str(place)}
    return TargetText(prompts=str(file), **usual | asked)


def written(folder: Path, target: Target | None = None, note: Any = lambda line: None, **asked: Any) -> Corpus:
    return settings(folder, **asked).prepare(target or tiny(device="cpu"), note)


def ending_often() -> Target:
    """`tiny` where one id in eight is an end of text."""
    target = tiny(device="cpu")
    target.eos_ids = ENDS
    return target


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return written(tmp_path_factory.mktemp("text") / "data", ending_often(), max_new_tokens=16)


@pytest.fixture(scope="module")
def documents(corpus: Corpus) -> list[Document]:
    return [*corpus.train, *corpus.val]


@cache
def by_plain_forward(each: Document) -> tuple[Tensor, Tensor]:
    """[n, V] logits and [n, H] final states behind each written token, without a cache."""
    model = plain().model
    with torch.inference_mode():
        hidden = model.base_model(input_ids=each.ids[None], use_cache=False).last_hidden_state[0]
        return model.lm_head(hidden)[each.prompt - 1 : -1], hidden[each.prompt - 1 : -1]


def test_each_prompt_is_answered_at_each_temperature_on_one_side(corpus: Corpus) -> None:
    encode = plain().tokenizer
    for side, text in (("val", corpus.val), ("train", corpus.train)):
        expected = {
            (tuple(encode(prompt)["input_ids"]), temperature)
            for prompt in PROMPTS
            if in_validation(prompt, 0.3) == (side == "val")
            for temperature in (0.0, 1.0)
        }
        found = [(tuple(each.ids[: each.prompt].tolist()), each.temperature) for each in text]
        assert set(found) == expected
        assert len(found) == len(expected) > 0


def test_the_split_depends_on_the_prompt_alone_and_has_the_wished_share() -> None:
    some = [f"prompt {i}" for i in range(4000)]
    chosen = [prompt for prompt in some if in_validation(prompt, 0.05)]
    assert 0.04 < len(chosen) / len(some) < 0.06
    assert all(in_validation(prompt, 0.3) for prompt in chosen)


def test_the_mask_marks_what_was_written(corpus: Corpus) -> None:
    for text, side in ((corpus.train, "train"), (corpus.val, "val")):
        folders = sorted(corpus.folder.glob(f"{side}-*"))
        mask = np.concatenate([np.fromfile(folder / "mask.bin", dtype=np.uint8) for folder in folders])
        rows = sum(len(each.states) for each in text)
        assert int(mask.sum()) == rows == sum(len(each.logz) for each in text) == text.generated
        assert text.generated == corpus.describe()[f"{side}_generated"]
        assert all(len(each.states) == len(each.answer) > 0 for each in text)


@cache
def plain() -> Target:
    """Whose linear layers nobody packs."""
    return tiny(device="cpu")


def off(documents: list[Document], states: Callable[[Document], Tensor]) -> float:
    """Largest distance between the law of `states` under the head and the law that each token was drawn from."""
    head = plain().head_weight
    return max(
        float(((states(each).float() @ head.T).softmax(-1) - by_plain_forward(each)[0].softmax(-1)).abs().sum(-1).max())
        for each in documents
    )


def test_states_are_those_that_each_token_was_drawn_from(documents: list[Document]) -> None:
    """Up to their rounding to bfloat16; one place on or back they are not."""
    assert off(documents, lambda each: each.states) < 0.06
    assert off(documents, lambda each: each.states.roll(-1, 0)) > 1
    assert off(documents, lambda each: each.states.roll(1, 0)) > 1
    for each in documents:
        assert torch.allclose(each.states.float(), by_plain_forward(each)[1], rtol=2**-8, atol=1e-5)


def test_logz_is_over_the_whole_vocabulary(documents: list[Document]) -> None:
    for each in documents:
        logits = by_plain_forward(each)[0]
        assert torch.allclose(each.logz, logits.logsumexp(-1), atol=1e-4)
        assert not torch.allclose(each.logz, logits[:, : V - 40].logsumexp(-1), atol=1e-4)


def test_greedy_text_is_the_best_token_and_sampled_text_is_drawn_from_the_law(documents: list[Document]) -> None:
    """Token for token, with the randomness of seed, prompt and temperature."""
    for each in documents:
        logits, _ = by_plain_forward(each)
        chance = Chance(0, each.ids[: each.prompt].tolist(), repeat=int(each.temperature))
        law = GenerationSettings(temperature=each.temperature)
        drawn = [chance.draw(probabilities(row, law)) if each.temperature else int(row.argmax()) for row in logits]
        assert each.answer.tolist() == drawn


def test_a_text_ends_with_its_first_end_id_which_counts_as_written(documents: list[Document]) -> None:
    ends = set(ENDS)
    lengths = {len(each.answer) for each in documents}
    assert len(lengths) > 4
    for each in documents:
        *before, last = each.answer.tolist()
        assert ends.isdisjoint(before)
        assert last in ends or len(each.answer) == 16


def test_text_does_not_depend_on_what_stands_beside_it(documents: list[Document], tmp_path: Path) -> None:
    """Other rows in a pass, ended ones let go at other times: the same tokens."""
    alone = written(tmp_path / "alone", ending_often(), max_new_tokens=16, rows=3)
    ids = {tuple(each.ids.tolist()) for each in (*alone.train, *alone.val)}
    assert ids == {tuple(each.ids.tolist()) for each in documents}


def test_prompts_that_come_twice_count_once_and_too_long_ones_not_at_all(tmp_path: Path) -> None:
    told: list[str] = []
    long = "a" * 31
    corpus = written(tmp_path / "t", note=told.append, prompts=[*PROMPTS, *PROMPTS, long, long], max_prompt_tokens=30)
    assert len(corpus.train) + len(corpus.val) == 2 * len(PROMPTS)
    assert told[0] == "1 prompts of more than 30 tokens are left out"


def test_prompt_and_answer_fit_the_context(tmp_path: Path) -> None:
    told: list[str] = []
    written(tmp_path / "t", note=told.append, prompts=[*PROMPTS, "a" * 508, "b" * 509])
    assert told[0] == "1 prompts of more than 508 tokens are left out"


def test_a_side_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.prompts: 1 prompts leave none for"):
        written(tmp_path / "t", prompts=["alone"])
    corpus = written(tmp_path / "t")  # the folder is free for others
    assert len(corpus.val)


def test_passes_over_prompts_have_little_padding() -> None:
    widths, text = [3, 3, 3, 4, 9, 10, 200, *[1000] * 7, 4000, 5000], TargetText()
    families = [[generate._Answer([1] * width, 0, text)] for width in widths]
    groups = [[family[0].sequence.prompt_length for family in group] for group in of_similar_length(families)]
    assert groups == [[3, 3, 3], [4], [9, 10], [200], [1000] * 4, [1000] * 3, [4000], [5000]]


def test_a_prompt_is_read_once_for_all_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others then write is theirs: the text of one temperature is the one that it has alone."""
    begun: list[tuple[int, ...]] = []
    read = Reader.read

    def noted(self: Reader, sequences: list[Sequence], draft: Draft) -> list[torch.Tensor]:
        begun.extend(tuple(each.tokens) for each in sequences if not each.new_tokens)
        return read(self, sequences, draft)

    monkeypatch.setattr(Reader, "read", noted)
    together = written(tmp_path / "together", temperatures=[0.0, 1.0, 0.7], rows=7)
    documents = documents_of(together)
    prompts = {tuple(each.ids[: each.prompt].tolist()) for each in documents}
    assert len(documents) == 3 * len(prompts)
    assert sorted(ids for ids in begun if ids in prompts) == sorted(prompts)  # the others are the verifier's rehearsal
    for each in documents_of(written(tmp_path / "alone", temperatures=[0.0])):
        assert any(torch.equal(each.ids, other.ids) for other in documents if other.temperature == 0)


def documents_of(corpus: Corpus) -> list[Document]:
    return [text[i] for text in (corpus.train, corpus.val) for i in range(len(text))]


# ---- one folder, several runs ----


def content(folder: Path) -> dict[str, bytes]:
    """All that is there but locks."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock" and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "SHARD", 4)


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None) -> Path:
    """A folder whose writer was interrupted between two shards."""
    left = [2]

    def write(*given: Any) -> dict[str, Any]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return write_shard(*given)

    monkeypatch.setattr(generate, "write_shard", write)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "data")
    monkeypatch.setattr(generate, "write_shard", write_shard)
    return tmp_path / "data"


def test_an_interrupted_run_goes_on_and_the_bytes_are_the_same(interrupted: Path, tmp_path: Path) -> None:
    before = {name: data for name, data in content(interrupted).items() if name.endswith(".bin")}
    assert len({name.split("/")[0] for name in before}) == 2
    written(interrupted)
    written(tmp_path / "straight")
    assert content(interrupted) == content(tmp_path / "straight")
    assert before.items() <= content(interrupted).items()


def test_other_text_does_not_go_on_with_an_interrupted_run(interrupted: Path) -> None:
    """Its shards would be taken for those of the other seed."""
    with pytest.raises(UserError, match=OTHER.format("seed")):
        written(interrupted, seed=1)


@pytest.mark.usefixtures("small_shards")
def test_a_lost_shard_is_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    written(tmp_path / "data")
    before = content(tmp_path / "data")
    lost = sorted((tmp_path / "data").glob("train-*"))[1]
    for file in (*lost.iterdir(), tmp_path / "data" / "manifest.json"):
        file.unlink()
    lost.rmdir()
    written(tmp_path / "data")
    assert content(tmp_path / "data") == before


@pytest.mark.usefixtures("small_shards")
def test_a_second_run_writes_nothing_and_a_higher_limit_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(tmp_path / "data", limit=11)
    assert first.fresh
    before = content(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(generate, "write_shard", None)
        again = written(tmp_path / "data", limit=11)
        assert not again.fresh
        assert again.describe() == first.describe()
        assert content(tmp_path / "data") == before
    more = written(tmp_path / "data")
    assert (len(first.train) + len(first.val), len(more.train) + len(more.val)) == (22, 36)
    after = content(tmp_path / "data")
    assert {name for name in before if after[name] != before[name]} == {"manifest.json"}
    straight = written(tmp_path / "straight")
    assert more.describe() == straight.describe()
    with monkeypatch.context() as patch:
        patch.setattr(generate, "write_shard", None)
        assert written(tmp_path / "data", limit=11).describe() == first.describe()


@pytest.mark.usefixtures("small_shards")
def test_no_more_shards_are_written_or_used_than_the_wished_tokens_take(tmp_path: Path) -> None:
    some = written(tmp_path / "data", tokens=33)  # a shard has four prompts, two answers each, of four tokens
    assert some.train.generated == 64
    assert len(list((tmp_path / "data").glob("train-*"))) == 2
    more = written(tmp_path / "data", tokens=65)
    assert more.fresh
    assert more.train.generated > 64
    again = written(tmp_path / "data", tokens=33)
    assert not again.fresh
    assert again.describe() == some.describe()
    straight = written(tmp_path / "straight")
    assert [same(a, b) for a, b in zip(some.train, straight.train, strict=False)] == [True] * 16
    assert some.val.generated == straight.val.generated


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("seed", {"seed": 1}),
        ("prompts", {"prompts": PROMPTS[1:]}),
        ("temperatures", {"temperatures": [0.0]}),
        ("max_new_tokens", {"max_new_tokens": 5}),
        ("max_prompt_tokens", {"max_prompt_tokens": 60}),
        ("val_share", {"val_share": 0.2}),
        ("rows", {"rows": 6}),
        ("weights", {"target": tiny(device="cpu", seed=1)}),
        ("weights", {"target": tiny(device="cpu", dtype="bfloat16")}),
        ("target", {"target": Target(tiny(device="cpu").model, tiny(device="cpu").tokenizer, "other", None)}),
    ],
)
def test_a_folder_of_other_text_is_refused_by_what_differs(key: str, asked: dict[str, Any], one_folder: Path) -> None:
    before = content(one_folder)
    with pytest.raises(UserError, match=rf"^data\.folder: .* holds other text: {OTHER.format(key)}"):
        written(one_folder, **asked)
    assert content(one_folder) == before


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "data"
    written(folder)
    return folder


def test_without_a_folder_it_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it depends on, so that other text never meets it."""
    monkeypatch.setattr(generate, "cache_root", lambda: tmp_path / "cache")
    places = {
        settings(tmp_path / "t", **{"folder": None, "max_new_tokens": 2, **asked})
        .prepare(tiny(device="cpu"), lambda line: None)
        .folder
        for asked in ({}, {}, {"seed": 1}, {"limit": 17})
    }
    assert len(places) == 2
    assert all(place.parent == tmp_path / "cache" / "text" for place in places)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("prompts: .*cannot be read", {"prompts": "nowhere.jsonl"}),
        ("prompts: .*nowhere.*cannot be read", {"prompts": ["nowhere.jsonl"]}),
        ("temperatures: ", {"temperatures": []}),
        ("temperatures: ", {"temperatures": 1.0}),
        ("temperatures: ", {"temperatures": [-1.0]}),
        ("limit: ", {"limit": 0}),
        ("tokens: ", {"tokens": 0}),
        ("max_new_tokens: ", {"max_new_tokens": 1}),
        ("val_share: ", {"val_share": 0.0}),
        ("val_share: ", {"val_share": 0.6}),
        ("rows: ", {"rows": 0}),
        ("batch_size: ", {"batch_size": 0}),
        ("seed: ", {"seed": -1}),
    ],
)
def test_a_wrong_value_names_its_key(said: str, asked: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        TargetText(**asked)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("Granite", {"logits_scaling": 8.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Gemma2", {"final_logit_softcapping": 1.0}),
    ],
)
def test_a_target_whose_logits_are_more_than_state_times_head_is_refused(kind: str, setting: dict[str, float]) -> None:
    """Its states alone would teach another law, with probabilities above 1."""
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.5}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **ends, **setting)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises(UserError, match="logits") as caught:
        refuse_other_heads(Target(model, None, kind, None))
    assert caught.value.key == "target"


def test_a_plain_head_is_taken() -> None:
    refuse_other_heads(tiny(device="cpu"))
