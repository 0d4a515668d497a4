"""A draft model with another tokenizer: it reads the text in its own tokens and drafts the tokens that both have."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import specpipe
from specpipe.audit.exact import largest_difference, output_law, target_law
from specpipe.audit.tables import Rule, table
from specpipe.chance import Chance
from specpipe.errors import ContractError, UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.draft import words_of
from specpipe.proposers.model import ModelProposer
from specpipe.proposers.translation import LETTERS, SameTokens, Spelling, Translation
from specpipe.samplers.block import Block
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target
from tests.stand_ins import TableModel, context, greedy

SAMPLE = {"temperature": 1.0}
LETTER = "abcdefgh"


class Toy:
    """A tokenizer that takes the longest piece at each place, and its first one for a letter that it does not know.

    `bos` is put in front of a text; neither it nor `eos` is text.
    """

    chat_template = None

    def __init__(self, *pieces: str, bos: str | None = None, eos: str | None = None) -> None:
        special = [name for name in (bos, eos) if name]
        self.pieces = [*special, *pieces]
        self.all_special_tokens = special
        self.added_tokens_decoder = {i: SimpleNamespace(content=s, special=True) for i, s in enumerate(special)}
        self.bos_token_id = None if bos is None else self.pieces.index(bos)
        self.eos_token_id = None if eos is None else self.pieces.index(eos)

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        ordinary = sorted(set(self.pieces) - set(self.all_special_tokens), key=len, reverse=True)
        while text:
            piece = next((piece for piece in ordinary if text.startswith(piece)), None)
            ids.append(self.pieces.index(piece) if piece else len(self.all_special_tokens))
            text = text[len(piece or text[0]) :]
        return {"input_ids": ids}

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}

    def text(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids if self.pieces[i] not in self.all_special_tokens)

    def decode(self, ids: list[int], **_: Any) -> str:
        return self.text(ids)


CHARACTERS = Toy(*LETTER)
PERMUTED, PARTIAL = Toy("c", "a", "b"), Toy("b", "x", "a", "bc")
PAIRS = Toy(*(a + b for a in LETTER for b in LETTER), *LETTER, bos="<s>")


class Foreign(ModelProposer):
    """Drafts with a table model that has a tokenizer of its own."""

    def __init__(self, rule: Rule, tokenizer: Any, context: int | None = None, **asked: Any) -> None:
        super().__init__(**asked)
        self.drafter = TableModel(rule, len(tokenizer.pieces), context)
        self.tokenizer = tokenizer

    def bind(self, target: Target) -> None:
        with warnings.catch_warnings(action="ignore"):
            words = Translation(target, Target(self.drafter, self.tokenizer, "small", None))
        self.map = words.ids
        self._use(self.drafter, target.vocabulary, self.drafter.config.max_position_embeddings, words)


def pipeline_of(
    rule: Rule, tokenizer: Toy, proposer: Any, gamma: int = 3, sampler: Any = None, **asked: Any
) -> Pipeline:
    return Pipeline(
        verifier=EagerVerifier(Target(TableModel(rule, len(tokenizer.pieces), 64), tokenizer, "big", None)),
        proposer=proposer,
        sampler=sampler or Rejection(),
        settings=GenerationSettings(**asked),
        num_speculative_tokens=gamma,
    )


def knowing(rule: Rule, theirs: Toy, ours: Toy, seen: list[list[int]] | None = None) -> Rule:
    """What the target says of the text, on the draft's ids."""

    def own(ids: list[int]) -> Tensor:
        if seen is not None:
            seen.append(ids)
        wanted = rule(theirs(ours.text(ids))["input_ids"])
        logits = torch.full((len(ours.pieces),), -5.0, dtype=torch.float64)
        for piece, i in ours.get_vocab().items():
            if piece in theirs.pieces:
                logits[i] = wanted[theirs.pieces.index(piece)]
        return logits

    return own


def error_of(proposer: Any, sampler: Any, gamma: int = 2) -> float:
    """Largest error of the joint law of three tokens out of the pipeline."""
    rule = table(3, seed=3, zeros=0)
    pipeline = pipeline_of(rule, Toy("a", "b", "c"), proposer, gamma, sampler, max_new_tokens=3, **SAMPLE)
    wanted = target_law(rule, [1, 0], 3, GenerationSettings(**SAMPLE))
    return largest_difference(output_law(pipeline, [1, 0], 3), wanted)


def request(tokens: list[int], **asked: Any) -> Sequence:
    return Sequence(tokens, GenerationSettings(**asked), chance=Chance(0, tokens))


def test_the_draft_reads_one_bos_and_its_own_positions() -> None:
    """C20: characters and pairs of characters, three rounds; `TableModel` refuses a position out of place."""
    rule, seen = context(8), []  # type: tuple[Rule, list[list[int]]]
    proposer = Foreign(knowing(rule, CHARACTERS, PAIRS, seen), PAIRS)
    pipeline = pipeline_of(rule, CHARACTERS, proposer, max_new_tokens=12)
    [sequence] = pipeline.sequences([[0, 1, 2, 3, 4]])
    steps = list(pipeline.decode(sequence))
    assert [step.accepted for step in steps] == [3, 3, 3]
    assert sequence.new_tokens == greedy(rule, [0, 1, 2, 3, 4], 12)
    assert all(ids[0] == 0 and ids.count(0) == 1 for ids in seen)
    starts = [call.positions[0][0] for call in proposer.drafter.calls]
    assert starts == [0, 4, 5, 3, 6, 7, 5, 8, 9]  # <s> ab cd e; then fg hi ..: pairs, half as many as characters
    assert {len(ids) for ids in seen[:3]} == {4, 5, 6}


def test_the_cache_is_rolled_back_to_what_still_stands() -> None:
    """Rows read again are those of the text that came anew, and of a last token that grew."""
    seen: list[list[list[int]]] = []
    rule: Rule = lambda ids: torch.nn.functional.one_hot(torch.tensor((ids[-1] + 1) % 8), 8).double() * 9  # noqa: E731
    proposer = Foreign(knowing(rule, CHARACTERS, PAIRS), PAIRS)
    pipeline = pipeline_of(rule, CHARACTERS, proposer, gamma=2, max_new_tokens=9)
    [sequence] = pipeline.sequences([[0, 1, 2]])
    for _ in pipeline.decode(sequence):
        seen.append([call.ids[0] for call in proposer.drafter.calls])
        proposer.drafter.calls.clear()
    spelled = [[" ".join(PAIRS.pieces[i] for i in ids) for ids in calls] for calls in seen]
    assert spelled == [["<s> ab c", "d"], ["cd ef", "g"], ["gh a", "b"]]


@pytest.mark.parametrize("asked", [{}, {"draw": "argmax"}, {"min_confidence": 0.4}])
@pytest.mark.parametrize("sampler", [Rejection, Block])
@pytest.mark.parametrize("ours", [PERMUTED, PARTIAL, Toy("x", "c", "b", bos="<s>", eos="<e>")])
def test_the_output_has_exactly_the_targets_law(ours: Toy, sampler: type, asked: dict[str, Any]) -> None:
    """Permuted, partly shared, and partly shared with special tokens."""
    proposer = Foreign(table(len(ours.pieces), seed=7, zeros=0), ours, **asked)
    assert error_of(proposer, sampler()) <= 1e-12


class OwnIds(Foreign):
    """Wrong: the token is mapped, its q is left in the draft's ids (C19)."""

    def _next(self, row: Any, logits: Tensor) -> bool:
        q = logits.softmax(-1)
        row.drafted.append(int(self.map[row.sequence.chance.propose(q)]))
        row.laws.append(q)
        return True


class DropsWhatTheTargetLacks(Foreign):
    """Wrong: drawn from all that the draft has; what the target lacks is dropped afterwards, q is what is left."""

    def _next(self, row: Any, logits: Tensor) -> bool:
        q = logits.softmax(-1)
        drawn, known = int(self.map[row.sequence.chance.propose(q)]), self.map >= 0
        if drawn >= 0:
            row.drafted.append(drawn)
            row.laws.append(q.new_zeros(self._size).index_copy(0, self.map[known], q[known]))
        return drawn >= 0


def test_q_left_in_the_drafts_ids_would_be_seen() -> None:
    assert error_of(OwnIds(table(3, seed=7, zeros=0), PERMUTED), Rejection()) > 1e-2


def test_a_law_that_was_not_renormalised_would_be_seen() -> None:
    with pytest.raises(ContractError, match="q that sums to"):
        error_of(DropsWhatTheTargetLacks(table(4, seed=7, zeros=0), PARTIAL), Rejection())


def test_q_is_a_law_over_the_shared_tokens() -> None:
    rule = table(len(PAIRS.pieces), seed=7, zeros=0)
    proposer = Foreign(rule, PAIRS)
    theirs = Toy("h", "x", "ab", "c", "a", "b")
    proposer.bind(Target(TableModel(context(6), 6), theirs, "big", None))
    draft = proposer.propose([request([4, 5], **SAMPLE)], [2])
    assert draft.probs is not None
    assert draft.probs[0].sum(-1).tolist() == pytest.approx([1, 1])
    own = rule(PAIRS("ab")["input_ids"]).softmax(-1)
    kept = torch.tensor([own[PAIRS.pieces.index(piece)] if piece in PAIRS.pieces else 0 for piece in theirs.pieces])
    assert torch.allclose(draft.probs[0, 0], kept / kept.sum())
    assert (draft.probs[0, :, 1] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_batch_draft_as_they_do_alone(temperature: float) -> None:
    rule, other = table(8, seed=4, zeros=0), table(len(PAIRS.pieces), seed=5, zeros=0)
    settings = {"temperature": temperature, "stop_token_ids": [0], "max_new_tokens": 12}
    prompts = [[1, 2, 3], [4], [5, 6], [7, 7, 7, 7, 7]]
    pipeline = pipeline_of(rule, CHARACTERS, Foreign(other, PAIRS), **settings)
    alone = [done.token_ids for done in pipeline.generate(prompts)]
    sequences = pipeline.sequences(prompts)
    for _ in pipeline.decode_together(sequences, 3):
        pass
    assert [sequence.new_tokens for sequence in sequences] == alone


def test_the_context_is_counted_in_the_drafts_own_tokens() -> None:
    """C27: seven characters are <s> and four pairs, so six positions are room for two drafts."""
    rule = context(8)
    proposer = Foreign(knowing(rule, CHARACTERS, PAIRS), PAIRS, context=6)
    pipeline = pipeline_of(rule, CHARACTERS, proposer, max_new_tokens=12)
    [sequence] = pipeline.sequences([[0, 1, 2, 3, 4, 5, 6]])
    with pytest.warns(UserWarning, match="context of 6"):
        steps = list(pipeline.decode(sequence))
    assert steps[0].drafted == 2
    assert steps[-1].drafted == 0
    assert sequence.new_tokens == greedy(rule, [0, 1, 2, 3, 4, 5, 6], 12)


def test_nothing_is_drafted_behind_a_stop_of_the_target() -> None:
    rule = context(8)
    proposer = Foreign(knowing(rule, CHARACTERS, PAIRS), PAIRS)
    first = greedy(rule, [1, 2], 2)
    proposer.bind(Target(TableModel(rule, 8), CHARACTERS, "big", None))
    sequence = Sequence([1, 2], GenerationSettings(), stop_ids=[first[1]], chance=Chance(0))
    assert proposer.propose([sequence], [5]).row(0)[0] == first


def test_a_request_that_bans_all_shared_tokens_gets_no_draft() -> None:
    rule = context(8)
    proposer = Foreign(table(3, seed=1, zeros=0), Toy("a", "b", "x"))
    pipeline = pipeline_of(rule, CHARACTERS, proposer, banned_token_ids=[0, 1], max_new_tokens=4, **SAMPLE)
    [sequence] = pipeline.sequences([[2, 3]])
    assert all(step.drafted == 0 for step in pipeline.decode(sequence))


def test_what_another_guessed_is_read_as_text_too() -> None:
    """`extend`: as if the guesses were committed, and forgotten when they are not."""
    rule = table(len(PAIRS.pieces), seed=7, zeros=0)
    proposer, fresh = Foreign(rule, PAIRS), Foreign(rule, PAIRS)
    for each in (proposer, fresh):
        each.bind(Target(TableModel(context(8), 8), CHARACTERS, "big", None))
    sequence = request([1, 2, 3])
    [behind] = proposer.extend([sequence], [[4, 5]], [3]).tokens.tolist()
    assert behind == fresh.propose([request([1, 2, 3, 4, 5])], [3]).tokens[0].tolist()
    assert proposer.propose([sequence], [3]).tokens.tolist() == fresh.propose([request([1, 2, 3])], [3]).tokens.tolist()


# ---- vocabularies ----

TEXT = (
    "the river runs under the old bridge and the children run over the bridge to see the river. "
    "when the water is high the old bridge sings, and when it is low the river sings to the children. "
) * 2


def byte_level(size: int, *special: str, **roles: str) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=letters, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


def sentencepiece(size: int) -> Any:
    """As Llama's: words begin with U+2581, bytes that are no piece are <0xNN>, <s> is put in front."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def target_of(tokenizer: Any, name: str, size: int = 0) -> Target:
    return Target(TableModel(context(4), size or len(tokenizer.get_vocab())), tokenizer, name, None)


@pytest.fixture(scope="module")
def gpt() -> Any:
    return byte_level(340, "<|end|>", "<|user|>", eos_token="<|end|>")


@pytest.fixture(scope="module")
def llama() -> Any:
    return sentencepiece(80)


@pytest.fixture(params=["gpt to llama", "llama to gpt"])
def words(request: pytest.FixtureRequest, gpt: Any, llama: Any) -> tuple[Translation, Any, Any]:
    """A translation, the target's tokenizer and the draft's."""
    theirs, ours = (gpt, llama) if request.param == "gpt to llama" else (llama, gpt)
    with pytest.warns(UserWarning, match="tokens there too"):
        return Translation(target_of(theirs, "big"), target_of(ours, "small")), theirs, ours


def test_the_letters_of_bytes_are_those_of_byte_level_tokenizers() -> None:
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for character in ("\x00", " ", "a", "\u00ad", "\u0142", "\u20ac", "\U0001f600"):
        assert bytes(LETTERS[letter] for letter in encode(character)[0][0]) == character.encode()
    assert LETTERS.keys() == set(pre_tokenizers.ByteLevel.alphabet())


def test_pieces_meet_as_bytes_and_special_tokens_only_their_like(words: tuple[Translation, Any, Any]) -> None:
    """Byte-level and sentencepiece: words with a space in front, single bytes, the ends of text; nothing else."""
    translation, theirs, ours = words
    names = {ours.convert_ids_to_tokens(d): theirs.convert_ids_to_tokens(t) for t, d in translation._own.items()}
    if "\u2581river" in names:
        names = {value: key for key, value in names.items()}
    assert names["\u0120river"] == "\u2581river"
    assert names["\u0120"] == "\u2581"
    assert names["\u00c3"] == "<0xC3>"
    assert names["a"] == "a"
    assert names["<|end|>"] == "</s>"
    assert not names.keys() & {"<|user|>"}
    assert not set(names.values()) & {"<s>", "<unk>", "<0x61>"}
    ids = translation.ids.tolist()
    assert all(ids[d] == t for t, d in translation._own.items())
    assert sum(i >= 0 for i in ids) == len(translation._own)


def test_a_text_is_read_as_the_draft_would_read_it(words: tuple[Translation, Any, Any]) -> None:
    translation, theirs, ours = words
    for text in (TEXT, "caf\u00e9 \u20ac <s></s><|end|> \U0001f600", "x"):
        ids = theirs(text, add_special_tokens=True, split_special_tokens=True)["input_ids"]
        assert translation.encode(ids) == ours(text, split_special_tokens=True)["input_ids"]


def test_nothing_is_drafted_inside_a_character(words: tuple[Translation, Any, Any]) -> None:
    """Behind it the text is whole again; a character that was never finished is a replacement."""
    translation, theirs, ours = words
    ids = theirs("the \u20ac", add_special_tokens=False)["input_ids"]
    assert [bool(translation.encode(ids[:n])) for n in range(len(ids) - 3, len(ids) + 1)] == [True, False, False, True]
    broken = [*ids[:-1], theirs.convert_tokens_to_ids("a")]
    own = Spelling(ours).text
    assert b"".join(own.get(token, b"") for token in translation.encode(broken)).endswith("the \ufffda".encode())


def test_special_tokens_become_their_counterparts_or_nothing(words: tuple[Translation, Any, Any]) -> None:
    translation, theirs, ours = words
    river = theirs("river", add_special_tokens=False)["input_ids"]
    lonely = theirs.convert_tokens_to_ids("<|user|>" if "<|user|>" in theirs.get_vocab() else "<s>")
    got = translation.encode([*river, lonely, theirs.eos_token_id])
    assert got == [*ours("river")["input_ids"], ours.eos_token_id]


def test_only_the_space_that_a_tokenizer_puts_in_front_is_no_text(gpt: Any, llama: Any) -> None:
    with pytest.warns(UserWarning, match="another tokenizer"):
        translation = Translation(target_of(llama, "big"), target_of(gpt, "small"))
    river = llama("river", add_special_tokens=False)["input_ids"]
    got = translation.encode([*river, llama.eos_token_id, *river])
    assert got == [*gpt("river")["input_ids"], gpt.eos_token_id, *gpt(" river")["input_ids"]]


def test_a_bos_that_both_have_is_not_doubled(llama: Any) -> None:
    other = sentencepiece(60)
    with pytest.warns(UserWarning, match="another tokenizer"):
        translation = Translation(target_of(llama, "big"), target_of(other, "small"))
    for bos in (True, False):
        ids = llama("the river", add_special_tokens=bos)["input_ids"]
        assert translation.encode(ids) == other("the river")["input_ids"]


def test_equal_vocabularies_are_not_translated(gpt: Any) -> None:
    """Equal sizes prove nothing (C18)."""
    assert isinstance(words_of(target_of(gpt, "big"), target_of(gpt, "small")), SameTokens)
    with pytest.warns(UserWarning, match="another tokenizer"):
        permuted = words_of(target_of(Toy("a", "b"), "big", 2), target_of(Toy("b", "a"), "small", 2))
    assert isinstance(permuted, Translation)
    assert permuted.ids.tolist() == [1, 0]


def test_ids_beyond_the_models_are_left_out() -> None:
    with pytest.warns(UserWarning, match="another tokenizer"):
        words = Translation(target_of(Toy(*"abcd"), "big", 3), target_of(Toy(*"dcba"), "small", 6))
    assert words.ids.tolist() == [-1, 2, 1, 0, -1, -1]


def test_how_much_is_shared_is_said_and_too_little_is_refused() -> None:
    big = target_of(Toy(*"abc"), "big")
    with pytest.warns(UserWarning, match=r"small has .* than big, and 3 of its 4 tokens are tokens there too \(75%\)"):
        Translation(big, target_of(Toy(*"abcx"), "small"))
    with pytest.raises(UserError, match=r"^model: small has .* big, and 3 of its 72 tokens .*: too few"):
        Translation(big, target_of(PAIRS, "small"))


# ---- from the command line's words ----


def test_a_draft_from_a_directory_with_its_own_tokenizer(tmp_path: Path, gpt: Any) -> None:
    """Bytes against a few merges: greedy decoding is what it is without a draft."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(gpt), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    gpt.save_pretrained(tmp_path)
    asked = ("target=tiny", "target.device=cpu", "generation.max_new_tokens=24")
    wanted = specpipe.load(*asked, "proposer=none").generate("the r\u00edver")[0].token_ids
    with pytest.warns(UserWarning, match=r"than tiny, and 256 of its \d+ tokens"):
        pipeline = specpipe.load(*asked, "proposer=draft", f"proposer.model={tmp_path}", "proposer.dtype=float32")
    done = pipeline.generate("the r\u00edver")[0]
    assert done.token_ids == wanted
    assert done.spec_decode["num_draft_tokens"] > 0
    assert pipeline.generate(["the r\u00edver", "the old bridge"])[1].spec_decode["num_draft_tokens"] > 0
