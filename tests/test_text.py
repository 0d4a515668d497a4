"""Streaming text: whole characters only, and joined exactly what decoding all ids at once gives."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specpipe.errors import UserError
from specpipe.sequence import Step
from specpipe.text import LONGEST_WINDOW, Piece, TextCodec
from specpipe.verifier.targets import tiny


def byte_tokenizer() -> Any:
    """256 bytes, then `<|end|>` as a special token."""
    return tiny(device="cpu").tokenizer


def word_tokenizer() -> Any:
    """Like sentencepiece: `▁` stands for a space, and the first one of a text is dropped when it is decoded."""
    vocab = {word: i for i, word in enumerate(["▁", "▁a", "▁river", "s", "▁é", ",", "▁▁", "\n", "日"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback_tokenizer() -> Any:
    """Like Llama 2: words, and one token for each byte of a character that is in no word."""
    vocab = {"<unk>": 0, "▁the": 1, "▁": 2, "s": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def steps(ids: Ids[int]) -> Iterator[Step]:
    """Plain decoding: one id a step."""
    yield from (Step(drafted=0, accepted=0, tokens=[token], overlaps=[]) for token in ids)


def stream(codec: TextCodec, blocks: Iterable[Step]) -> list[Piece]:
    pieces = codec.pieces()
    return [*(piece for step in blocks for piece in pieces.push(step)), *pieces.flush()]


def joined(codec: TextCodec, ids: Ids[int]) -> str:
    return "".join(piece.text for piece in stream(codec, steps(ids)))


def byte_ids(codec: TextCodec, text: str | bytes) -> list[int]:
    """Ids of the byte tokenizer, one for each byte, whether they are UTF-8 or not."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {byte: letters.index(letter) for byte, letter in _letters().items()}
    return [spelled[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def _letters() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones as they are, the others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@pytest.mark.parametrize("text", ["plain", "Füße, 日本語 and 🏔️🏞️", "  two  spaces \n\n\ttab ", "👩‍👩‍👧‍👦" * 5, ""])
def test_text_streams_byte_by_byte_without_ever_showing_half_a_character(text: str) -> None:
    codec = TextCodec(byte_tokenizer())
    ids = byte_ids(codec, text)
    pieces = stream(codec, steps(ids))
    assert "".join(piece.text for piece in pieces) == text == codec.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)


def test_a_character_comes_out_with_the_token_that_completes_it() -> None:
    codec = TextCodec(byte_tokenizer())
    mountain = byte_ids(codec, "🏔")
    assert len(mountain) == 4
    pieces = codec.pieces()
    shown = [list(pieces.push(step)) for step in steps(mountain)]
    assert shown == [[], [], [], [Piece("🏔", "plain")]]


def test_the_kind_of_a_piece_is_that_of_the_token_that_completed_it() -> None:
    codec = TextCodec(byte_tokenizer())
    ids = byte_ids(codec, "aé")
    rejected = Step(drafted=4, accepted=2, tokens=ids, overlaps=[])
    assert stream(codec, [rejected]) == [Piece("a", "accepted"), Piece("é", "correction")]
    full = Step(drafted=2, accepted=2, tokens=ids, overlaps=[])
    assert stream(codec, [full]) == [Piece("a", "accepted"), Piece("é", "bonus")]


@pytest.mark.parametrize("seed", range(40))
def test_random_ids_with_broken_bytes_join_to_what_decoding_at_once_gives(seed: int) -> None:
    codec = TextCodec(byte_tokenizer())
    chance = random.Random(seed)
    # Lead bytes, continuation bytes, text and special tokens in proportions that make every kind of breakage common.
    end = codec.encode("<|end|>")
    lead, follow = byte_ids(codec, bytes([0xC3, 0xE2, 0xF0, 0xFF])), byte_ids(codec, bytes([0x82, 0x9F, 0x98, 0xAC]))
    pool = [lead, follow, follow, byte_ids(codec, "a é"), end if chance.random() < 0.5 else follow]
    ids = [chance.choice(chance.choice(pool)) for _ in range(chance.randrange(1, 80))]
    assert joined(codec, ids) == codec.decode(ids)


@pytest.mark.parametrize("seed", range(40))
def test_random_words_of_a_tokenizer_that_drops_the_first_space_join_exactly(seed: int) -> None:
    codec = TextCodec(word_tokenizer())
    chance = random.Random(seed)
    ids = [chance.randrange(10) for _ in range(chance.randrange(1, 80))]
    assert joined(codec, ids) == codec.decode(ids)


@pytest.mark.parametrize("seed", range(20))
def test_characters_spelled_in_byte_tokens_join_exactly(seed: int) -> None:
    codec = TextCodec(byte_fallback_tokenizer())
    chance = random.Random(seed)
    words = [[1], [2], [3], *([4 + byte for byte in letter.encode()] for letter in "é日🏔")]
    ids = [token for _ in range(30) for token in chance.choice(words)]
    assert joined(codec, ids) == codec.decode(ids)
    assert "\N{REPLACEMENT CHARACTER}" not in joined(codec, ids)


def test_bytes_that_are_no_character_hold_back_a_few_tokens_at_most() -> None:
    codec = TextCodec(byte_tokenizer())
    ids = byte_ids(codec, b"\x82" * 300)
    pieces = codec.pieces()
    behind = 0
    out = ""
    for count, step in enumerate(steps(ids), 1):
        out += "".join(piece.text for piece in pieces.push(step))
        behind = max(behind, count - len(out))
    assert behind <= 3
    assert out + "".join(piece.text for piece in pieces.flush()) == codec.decode(ids)


def test_special_tokens_have_no_text_and_do_not_break_a_character() -> None:
    codec = TextCodec(byte_tokenizer())
    (end,) = codec.encode("<|end|>")
    first, *others = byte_ids(codec, "🏔")
    ids = [end, first, end, *others, end, *byte_ids(codec, " b"), end]
    assert joined(codec, ids) == "🏔 b" == codec.decode(ids)


@pytest.mark.parametrize("what", ["text", "broken", "special", "lead bytes"])
def test_the_cost_of_a_token_does_not_grow_with_the_answer(what: str) -> None:
    codec = CountingCodec(byte_tokenizer())
    unit = {"text": byte_ids(codec, "abc"), "broken": byte_ids(codec, b"\x82"), "lead bytes": byte_ids(codec, b"\xf0")}
    unit["special"] = [*byte_ids(codec, "a"), *codec.encode("<|end|>") * 50]
    ids = (unit[what] * 1000)[:1000]
    assert joined(codec, ids) == codec.decode(ids)
    assert codec.longest <= LONGEST_WINDOW + 1
    assert codec.read < 60 * len(ids)


class CountingCodec(TextCodec):
    """Counts the ids that streaming decodes."""

    read = 0
    longest = 0

    def decode(self, ids: Ids[int]) -> str:
        if len(ids) < 1000:
            self.read += len(ids)
            self.longest = max(self.longest, len(ids))
        return super().decode(ids)


def test_an_answer_of_nothing_has_no_pieces() -> None:
    assert stream(TextCodec(byte_tokenizer()), []) == []


def test_a_chat_template_that_is_not_there_is_refused_by_its_key() -> None:
    with pytest.raises(UserError, match=r"prompts\.chat: .*no chat template"):
        TextCodec(byte_tokenizer(), chat=True)
    assert TextCodec(byte_tokenizer()).chat is False


@pytest.mark.real
def test_the_real_tokenizer_streams_any_ids_exactly() -> None:
    from transformers import AutoTokenizer

    from specpipe.verifier.smollm2 import ensure_smollm2

    codec = TextCodec(AutoTokenizer.from_pretrained(str(ensure_smollm2())))
    chance = random.Random(0)
    for _ in range(50):
        ids = [chance.randrange(len(codec._tokenizer)) for _ in range(60)]
        assert joined(codec, ids) == codec.decode(ids)
    story = "Füße — 日本語, 👩‍👩‍👧‍👦 and\n\n```python\ndef f():\n\treturn [x]\n```\n" * 4
    ids = codec._tokenizer(story)["input_ids"]
    pieces = stream(codec, steps(ids))
    assert "".join(piece.text for piece in pieces) == story
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)
