"""Counted n-grams: the counts, the law smoothed from them, the file, and drafts that come from the law they return."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from specpipe.audit.exact import explore, largest_difference, output_law, target_law
from specpipe.audit.tables import table
from specpipe.chance import Chance
from specpipe.draft import Draft, fault_of
from specpipe.errors import UserError
from specpipe.proposers.counts import Counts, Origin, Smoothed, fit, load, save, vocabulary_hash
from specpipe.proposers.table import SHIPPED, CountsProposer
from specpipe.samplers.block import Block
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.smollm2 import DIRECTORY, cache_root
from tests.stand_ins import ToyTokenizer, pipeline_of

V = 3
P = table(V, seed=3, zeros=0)
TEXTS = [[0, 1, 0, 1, 2], [1, 2, 1, 1], [2], [0, 1, 0, 0, 2, 1, 0, 1, 0]]
SAMPLE = {"temperature": 1.0}
ROUNDING = 1e-6  # q is float32


class Letters(ToyTokenizer):
    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate("abc")}


class Words:
    """A target as far as a table must know it."""

    def __init__(self, vocabulary: int = V, tokenizer: Any = None, name: str = "toy") -> None:
        self.vocabulary, self.tokenizer, self.name = vocabulary, tokenizer or Letters(), name


ORIGIN = Origin("toy", vocabulary_hash(Letters()), "made by hand")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.safetensors"


def proposer(path: Path, order: int = 3, counts: Counts | None = None, vocabulary: int = V, **asked: Any) -> Any:
    save(counts or fit(TEXTS, order=order, size=V), ORIGIN, path)
    made = CountsProposer(path=str(path), **asked)
    made.bind(Words(vocabulary))
    return made


def sequence(ids: list[int], stop: tuple[int, ...] = (), chance: Chance | None = None, **settings: Any) -> Sequence:
    return Sequence(ids, GenerationSettings(**settings), stop_ids=stop, chance=chance or Chance(0, ids))


def listed(counts: Counts, n: int) -> dict[tuple[int, ...], int]:
    return {
        tuple(gram): times
        for gram, times in zip(counts.grams[n - 1].tolist(), counts.times[n - 1].tolist(), strict=True)
    }


# ---- counts ----


def test_counts_of_a_hand_made_text() -> None:
    """None reaches from one text into the next: (2, 1) and (1, 2, 1) occur in the second text only."""
    counts = fit([[0, 1, 0, 1, 2], [1, 2, 1, 1]], order=3, size=V)
    assert (counts.order, counts.tokens, counts.largest) == (3, 9, 2)
    assert listed(counts, 1) == {(0,): 2, (1,): 5, (2,): 2}
    assert listed(counts, 2) == {(0, 1): 2, (1, 0): 1, (1, 1): 1, (1, 2): 2, (2, 1): 1}
    assert listed(counts, 3) == {(0, 1, 0): 1, (0, 1, 2): 1, (1, 0, 1): 1, (1, 2, 1): 1, (2, 1, 1): 1}


def test_counts_are_those_of_a_plain_loop() -> None:
    source = random.Random(3)
    texts = [source.choices(range(7), k=source.randint(0, 12)) for _ in range(60)]
    counts = fit(iter(texts), order=3, size=7)
    for n in (1, 2, 3):
        loop = Counter(tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1))
        assert listed(counts, n) == loop
        assert counts.grams[n - 1].tolist() == sorted(map(list, loop))


@pytest.mark.parametrize("wrong", [{"order": 0}, {"order": 4}, {"size": 2}, {"size": 0}, {"size": 2**21}])
def test_what_cannot_be_counted_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"size|ends at 1"):
        fit(TEXTS, **{"order": 2, "size": V} | wrong)


# ---- the law ----


def test_the_law_is_absolute_discounting_by_hand() -> None:
    """0 1 0 1 2 over four ids: n_1 = 1, n_2 = 2, so D_1 = 2 / (2 + 6); of the bigrams 01:2, 10:1, 12:1, D_2 = 3 / 7."""
    counts = fit([[0, 1, 0, 1, 2]], order=2, size=4)
    assert counts.discounts == (2 / 8, 3 / 7)
    law = Smoothed(counts, 2, 4)
    floor = 3 * (1 / 4) / 5 / 4  # three discounts of five tokens, over four ids
    unigrams = [1.75 / 5 + floor, 1.75 / 5 + floor, 0.75 / 5 + floor, floor]
    assert law.law([]).tolist() == pytest.approx(unigrams, abs=1e-15)
    seen, rest = (1 - 3 / 7) / 2, 3 / 7  # behind 1: 0 and 2 once each
    behind_1 = [seen + rest * unigrams[0], rest * unigrams[1], seen + rest * unigrams[2], rest * unigrams[3]]
    assert law.law([1]).tolist() == pytest.approx(behind_1, abs=1e-15)
    behind_0 = [3 / 14 * share for share in unigrams]  # behind 0: 1 twice
    behind_0[1] += (2 - 3 / 7) / 2
    assert law.law([0]).tolist() == pytest.approx(behind_0, abs=1e-15)
    assert law.law([3]).tolist() == law.law([]).tolist()  # never seen


@pytest.mark.parametrize("singletons", [True, False])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_law_sums_to_one_behind_every_context(order: int, singletons: bool) -> None:
    """Seen, unseen and shorter than the table's; over more ids than were counted; every id has mass."""
    counts = fit([*TEXTS, [5, 5, 5]], order=3, size=6)
    law = Smoothed(counts if singletons else counts.without_singletons(), order, 8)
    for context in [[], *([a] for a in range(8)), *([a, b] for a in range(8) for b in range(8))]:
        q = law.law(law.context(context))
        assert q.sum().item() == pytest.approx(1, abs=1e-14)
        assert (q > 0).all()


def test_what_remains_without_singletons_keeps_its_share() -> None:
    """Behind 0 of 0 1 0 1 0 2 2 1: 1 twice, 2 once. Dropped, the 2 leaves its share to the unigrams."""
    counts = fit([[0, 1, 0, 1, 0, 2, 2, 1]], order=2, size=V)
    less = counts.without_singletons()
    assert listed(less, 1) == listed(counts, 1) == {(0,): 3, (1,): 3, (2,): 2}
    assert listed(less, 2) == {(0, 1): 2, (1, 0): 2}
    d = counts.discounts[1]
    assert d == less.discounts[1] == 4 / 10  # 3 once, 2 twice
    unigrams = Smoothed(counts, 1, V).law([]).tolist()
    whole = [2 * d / 3 * share for share in unigrams]
    whole[1] += (2 - d) / 3
    whole[2] += (1 - d) / 3
    assert Smoothed(counts, 2, V).law([0]).tolist() == pytest.approx(whole, abs=1e-15)
    pruned = [(1 + d) / 3 * share for share in unigrams]
    pruned[1] += (2 - d) / 3
    assert Smoothed(less, 2, V).law([0]).tolist() == pytest.approx(pruned, abs=1e-15)
    assert Smoothed(less, 2, V).law([2]).tolist() == unigrams


def test_a_table_of_nothing_is_uniform() -> None:
    assert Smoothed(fit([], order=2, size=4), 2, 4).law([1]).tolist() == [0.25] * 4
    assert fit([[]], order=3, size=4).largest == -1


# ---- drafts ----


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, {}),
        ({}, {"top_k": 2, "temperature": 0.7, "frequency_penalty": 0.5}),
        ({"draw": "argmax"}, {}),
        ({"min_confidence": 0.45}, {}),
    ],
)
@pytest.mark.parametrize("sampler", [Rejection, Block])
def test_the_output_has_exactly_the_targets_law(
    path: Path, sampler: type, asked: dict[str, Any], settings: dict[str, Any]
) -> None:
    settings = {**SAMPLE, **settings}
    pipeline = piped(proposer(path, **asked), sampler(), max_new_tokens=3, **settings)
    wanted = target_law(P, [1, 0], 3, GenerationSettings(**settings))
    assert largest_difference(output_law(pipeline, [1, 0], 3), wanted) <= ROUNDING


def piped(made: Any, sampler: Any, **settings: Any) -> Any:
    """A pipeline over a table model; the proposer is bound already."""
    made.bind = lambda target: None
    return pipeline_of(P, V, made, gamma=2, sampler=sampler, **settings)


class BeforeTheSettings(CountsProposer):
    """Draws under the settings and returns the law without them: the wrong variant."""

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        right = super().extend(sequences, drafts, lengths)
        for b, k in enumerate(right.lengths):
            for i in range(k):
                assert right.probs is not None
                before = [*sequences[b].tokens, *drafts[b], *right.row(b)[0][:i]]
                right.probs[b, i] = self._law.law(self._law.context(before)).float()
        return right


def test_a_q_from_before_the_settings_would_be_seen(path: Path) -> None:
    settings = {"temperature": 0.5, "logit_bias": {2: 1.0}}
    proposer(path)
    wrong = BeforeTheSettings(path=str(path))
    wrong.bind(Words())
    wanted = target_law(P, [1, 0], 3, GenerationSettings(**settings))
    pipeline = piped(wrong, Rejection(), max_new_tokens=3, **settings)
    assert largest_difference(output_law(pipeline, [1, 0], 3), wanted) > 1e-3
    assert contract_error(wrong, settings) > 1e-2


@pytest.mark.parametrize(
    "settings", [SAMPLE, {"temperature": 0.5, "logit_bias": {2: 1.0}}, {"temperature": 1, "top_p": 0.8}]
)
def test_drafts_come_from_the_q_that_is_returned(path: Path, settings: dict[str, Any]) -> None:
    """Every way a draft can be drawn, explored: its probability is the product of the rows it came with."""
    assert contract_error(proposer(path), settings) <= ROUNDING


def contract_error(made: CountsProposer, settings: dict[str, Any]) -> float:
    """Largest difference between a draft's probability and what its q says."""

    def drafted(chance: Chance) -> tuple[tuple[int, ...], float]:
        x, q = made.propose([sequence([1, 0], chance=chance, **settings)], [3]).row(0)
        assert q is not None
        return tuple(x), q[range(3), x].prod().item()

    return max(abs(said - mass) for (_, said), mass in explore(drafted))


@pytest.mark.parametrize("settings", [{}, {"frequency_penalty": 0.4}])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_at_temperature_0_drafts_are_the_best_tokens_of_the_law(
    path: Path, order: int, settings: dict[str, float]
) -> None:
    made = proposer(path, order=order)
    for ids in [[a, b] for a in range(V) for b in range(V)]:
        x, q = made.propose([sequence(ids, **settings)], [4]).row(0)
        assert q is None
        for i, token in enumerate(x):
            logits = made._law.law(made._law.context([*ids, *x[:i]])).log()
            for each in x[:i]:
                logits[each] -= settings.get("frequency_penalty", 0)
            assert token == logits.tolist().index(max(logits.tolist()))


def test_of_equally_good_tokens_the_lowest_id_is_drafted(path: Path) -> None:
    made = proposer(path, counts=fit([[2], [1]], order=1, size=V), vocabulary=6)
    assert made.propose([sequence([0])], [2]).row(0)[0] == [1, 1]
    made = proposer(path, counts=fit([], order=1, size=V), vocabulary=6)
    assert made.propose([sequence([4])], [2]).row(0)[0] == [0, 0]


def test_argmax_drafts_the_best_token_under_the_settings_without_q(path: Path) -> None:
    made = proposer(path, draw="argmax")
    x, q = made.propose([sequence([0], temperature=1.0)], [3]).row(0)
    assert (x, q) == (made.propose([sequence([0])], [3]).row(0)[0], None)
    assert x[0] not in made.propose([sequence([0], temperature=1.0, banned_token_ids=[x[0]])], [3]).row(0)[0]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0, "top_k": 1}, {"min_new_tokens": 0, "logit_bias": {0: 0}}]
)
def test_nothing_is_drafted_behind_a_stop(path: Path, settings: dict[str, Any]) -> None:
    """C21, C25. Also not when another proposer's draft ends in one."""
    made = proposer(path, counts=fit([[0, 1, 2, 0, 1, 2, 0, 1, 2]], order=2, size=V))
    assert made.propose([sequence([0], **settings)], [5]).row(0)[0] == [1, 2, 0, 1, 2]
    assert made.propose([sequence([0], (2,), **settings)], [5]).row(0)[0] == [1, 2]
    for draft in ([1, 2], [1, 2, 0]):
        assert made.extend([sequence([0], (2,), **settings)], [draft], [5]).lengths == [0]
    assert made.propose([sequence([2], (2,), **settings)], [1]).row(0)[0] == [0]  # in a prompt it stops nothing


def test_a_draft_ends_where_the_table_is_not_sure(path: Path) -> None:
    """1 is surely followed by 2 (9 of 10), 2 by 1 or 0 alike."""
    counts = fit([[1, 2]] * 9 + [[2, 1], [2, 0]], order=2, size=V)
    for settings in ({}, SAMPLE, {"logit_bias": {0: 0.0}}):
        made = proposer(path, counts=counts, min_confidence=0.6)
        assert made.propose([sequence([1], **settings), sequence([2], **settings)], [1, 1]).lengths == [1, 0]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.8, "repetition_penalty": 1.3}])
def test_rows_of_a_batch_draft_as_they_do_alone(path: Path, settings: dict[str, Any]) -> None:
    """C33, C37: ragged limits, one row without a draft, one that stops."""
    made = proposer(path)
    prompts, lengths = [[0], [1, 2, 1], [2, 2], [0, 1]], [3, 5, 0, 4]
    batch = made.propose([sequence(ids, (2,), **settings) for ids in prompts], lengths)
    assert fault_of(batch, lengths, V) is None
    for b, (ids, k) in enumerate(zip(prompts, lengths, strict=True)):
        alone, q = made.propose([sequence(ids, (2,), **settings)], [k]).row(0)
        x, probs = batch.row(b)
        assert x == alone
        assert alone == [] or (probs is None) == (q is None)
        assert q is None or torch.equal(probs, q)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "frequency_penalty": 0.7}])
@pytest.mark.parametrize("drafts", [[[0], [1, 2]], [[], [2, 1, 0]]])
def test_extending_a_draft_is_proposing_behind_it(
    path: Path, settings: dict[str, Any], drafts: list[list[int]]
) -> None:
    made, prompts, lengths = proposer(path), [[1], [0, 1]], [3, 2]
    before = [sequence(ids, **settings) for ids in prompts]
    committed = [sequence(ids, **settings) for ids in prompts]
    for each, draft in zip(committed, drafts, strict=True):
        for token in draft:
            each.commit([token], 0, [])
    extended, proposed = made.extend(before, drafts, lengths), made.propose(committed, lengths)
    assert [each.tokens for each in before] == prompts
    assert extended.lengths == proposed.lengths == lengths
    for b in range(2):
        (x, q), (y, r) = extended.row(b), proposed.row(b)
        assert x == y
        assert (q is None and r is None) or torch.equal(q, r)  # type: ignore[arg-type]


def test_a_lower_order_uses_the_shorter_ngrams_alone(path: Path) -> None:
    for order in (1, 2, 3):
        lower, fitted = proposer(path, order=3)._counts, fit(TEXTS, order=order, size=V)
        for context in ([0], [0, 1], [2, 2]):
            ours, theirs = Smoothed(lower, order, V), Smoothed(fitted, order, V)
            assert torch.equal(ours.law(ours.context(context)), theirs.law(theirs.context(context)))
    assert CountsProposer(path=str(path), order=2).order == 2


def test_rows_with_and_without_q_are_joined() -> None:
    """Each row comes back as it was given, shorter ones too."""
    q = torch.tensor([[0.5, 0.5, 0.0]])
    draft = Draft.joined([([1], q), ([2, 0], None), ([], None)], 3, ["a", "b", None])
    assert (draft.lengths, draft.sources) == ([1, 2, 0], ["a", "b", None])
    x, law = draft.row(0)
    assert x == [1]
    assert law is not None
    assert torch.equal(law, q)
    assert draft.row(1) == ([2, 0], None)
    assert draft.row(2) == ([], None)
    assert fault_of(draft, [2, 2, 2], 3) is None
    assert Draft.joined([([1], None)], 3).probs is None


# ---- the file ----


@pytest.mark.parametrize(("token", "dtype"), [(65_535, torch.uint16), (65_536, torch.int32)])
def test_ids_that_fit_two_bytes_take_two_bytes(path: Path, token: int, dtype: torch.dtype) -> None:
    save(fit([[token, 1]], order=1, size=70_000), ORIGIN, path)
    assert load_file(path)["1.grams"].dtype == dtype
    assert load(path)[0].grams[0].tolist() == [[1], [token]]


def test_what_was_saved_is_loaded(path: Path) -> None:
    for counts in (
        fit(TEXTS, order=3, size=V),
        fit(TEXTS, order=2, size=V).without_singletons(),
        fit([], order=1, size=V),
    ):
        save(counts, ORIGIN, path)
        again, origin = load(path)
        assert origin == ORIGIN
        assert (again.tokens, again.size, again.discounts) == (counts.tokens, counts.size, counts.discounts)
        for ours, theirs in zip((*again.grams, *again.times), (*counts.grams, *counts.times), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == torch.int32


def saved(path: Path, metadata: dict[str, str] | None = None, **tensors: Any) -> None:
    """A good table of bigrams with some parts replaced."""
    good = {"1.grams": [[0], [1]], "1.times": [2, 2], "2.grams": [[0, 1], [1, 0]], "2.times": [2, 1]}
    parts = {name: torch.tensor(rows, dtype=torch.int32) for name, rows in good.items()}
    parts |= {name.replace("_", ".").removeprefix("t"): rows for name, rows in tensors.items()}
    numbers = {"order": "2", "discounts": "[0.5, 0.5]", "tokens": "4", "size": "3"}
    said = {"format": "specpipe counts", "version": "1", **numbers, **vars(ORIGIN), **(metadata or {})}
    save_file({name: rows for name, rows in parts.items() if rows is not None}, path, said)


def ints(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"metadata": {"format": "pt"}}, "is not a table of token counts"),
        ({"metadata": {"version": "2"}}, "is of version 2; this specpipe reads version 1"),
        ({"metadata": {"order": "two"}}, "is damaged: Expecting value"),
        ({"metadata": {"tokens": "[]"}}, "is damaged: int.. argument"),
        ({"metadata": {"discounts": "[0.5]"}}, r"is damaged: discounts \[0.5\]"),
        ({"metadata": {"discounts": "[0.5, 1]"}}, r"is damaged: discounts \[0.5, 1.0\]"),
        ({"metadata": {"order": "3"}}, "is damaged: '3.grams'"),
        ({"metadata": {"order": "0"}}, "is damaged: order 0, 3 ids"),
        ({"metadata": {"size": "4000000"}}, "is damaged: order 2, 4000000 ids"),
        ({"t2_times": None}, "is damaged: '2.times'"),
        ({"t2_times": ints(2)}, r"is damaged: its 2-grams are \[2, 2\]"),
        ({"t2_times": torch.tensor([2.0, 1.0])}, "is damaged: counts of torch.float32"),
        ({"t1_grams": ints(0, 1)}, r"is damaged: its 1-grams are \[2\]"),
        ({"t2_times": ints(2, 0)}, "its 2-grams have ids or counts out of range"),
        ({"t2_grams": ints([0, 1], [1, 3])}, "its 2-grams have ids or counts out of range"),
        ({"t2_grams": ints([0, -1], [1, 0])}, "its 2-grams have ids or counts out of range"),
        ({"t2_grams": ints([1, 0], [0, 1])}, "its 2-grams are not in ascending order"),
        ({"t2_grams": ints([0, 1], [0, 1])}, "its 2-grams are not in ascending order"),
        ({"t2_times": ints(3, 1)}, "its 2-grams occur more often than their beginnings"),
        ({"t2_grams": ints([0, 1], [2, 0])}, "its 2-grams occur more often than their beginnings"),
        ({"metadata": {"tokens": "3"}}, "its 1-grams occur more often than their beginnings"),
    ],
)
def test_a_file_that_is_no_sound_table_is_refused_in_one_line(path: Path, parts: dict[str, Any], said: str) -> None:
    saved(path)
    load(path)
    saved(path, **parts)
    with pytest.raises(UserError, match=said) as caught:
        CountsProposer(path=str(path))
    assert caught.value.key == "path"
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(path: Path, tmp_path: Path) -> None:
    proposer(path)
    cut = path.read_bytes()[:-7]
    for content in (cut, b"", b"not a table at all, a text", cut[:20]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"^path: '.*table\.safetensors' cannot be read: "):
            CountsProposer(path=str(path))
    for missing in (tmp_path / "nowhere.safetensors", tmp_path):
        with pytest.raises(UserError, match=r"^path: there is no file '.*'"):
            CountsProposer(path=str(missing))


def test_a_table_for_another_vocabulary_is_refused_with_both_names(path: Path) -> None:
    """C18: the map from tokens to ids is compared, not its size."""

    class Others(Letters):
        def get_vocab(self) -> dict[str, int]:
            return {letter: i for i, letter in enumerate("acb")}

    proposer(path)
    made = CountsProposer(path=str(path))
    with pytest.raises(UserError, match=r"^path: table.safetensors was counted for toy; big has another vocabulary"):
        made.bind(Words(tokenizer=Others(), name="big"))
    with pytest.raises(UserError, match="big has another vocabulary"):
        made.bind(Words(vocabulary=2, name="big"))
    with pytest.raises(UserError, match=r"^path: the shipped table is for SmolLM2-135M-Instruct, and toy has another"):
        CountsProposer().bind(Words())


def test_a_padded_embedding_is_no_other_vocabulary(path: Path) -> None:
    """C18: the law is over all of the target's ids."""
    draft = proposer(path, vocabulary=7).propose([sequence([0, 1], **SAMPLE)], [2])
    assert draft.probs is not None
    assert draft.probs.shape == (1, 2, 7)


@pytest.mark.parametrize(
    "wrong", [{"path": 3}, {"order": 4}, {"order": "2"}, {"draw": "best"}, {"min_confidence": 2}, {"order": 3}]
)
def test_wrong_values_are_named(path: Path, wrong: dict[str, Any]) -> None:
    save(fit(TEXTS, order=2, size=V), ORIGIN, path)
    with pytest.raises(UserError) as caught:
        CountsProposer(**{"path": str(path)} | wrong)
    assert caught.value.key == next(iter(wrong))


# ---- the shipped table ----


def test_the_shipped_table_is_small_and_says_where_it_comes_from() -> None:
    counts, origin = load(SHIPPED)
    assert SHIPPED.stat().st_size < 300_000
    assert counts.order == 2
    assert origin.target == "SmolLM2-135M-Instruct"
    assert re.search(r"Apache-2\.0", origin.source)


@pytest.mark.real
@pytest.mark.skipif(not (cache_root() / DIRECTORY).is_dir(), reason="the default target is not in the cache")
def test_the_shipped_table_drafts_for_the_default_target() -> None:
    tokenizer = Tokenizer.from_file(str(cache_root() / DIRECTORY / "tokenizer.json"))
    made = CountsProposer()
    made.bind(Words(49_152, tokenizer, "SmolLM2-135M-Instruct"))
    ids = tokenizer.encode("The capital of").ids
    drafted = made.propose([sequence(ids)], [1]).row(0)[0]
    assert tokenizer.decode(drafted) in (" the", " a")
