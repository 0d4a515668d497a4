"""Suffix decoding: which match, which continuation, how far, what is shared between requests and what is forgotten."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from specpipe.audit.tables import table
from specpipe.chance import Chance
from specpipe.errors import UserError
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.suffix import (
    ESCAPE,
    OUTPUT_WEIGHT,
    Document,
    Outputs,
    SuffixProposer,
    Trie,
    Window,
)
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from tests.stand_ins import constant, context, greedy, pipeline_of

REPEATS = itertools.count()  # a stream of its own for each request
FREE: dict[str, Any] = {"min_probability": 0.0}  # nothing but the text ends a draft


def request(prompt: list[int], output: tuple[int, ...] = (), stop: tuple[int, ...] = ()) -> Sequence:
    settings = GenerationSettings(max_new_tokens=10_000)
    sequence = Sequence(prompt, settings, stop_ids=stop, chance=Chance(0, prompt, repeat=next(REPEATS)))
    sequence.tokens.extend(output)
    return sequence


def ask(proposer: SuffixProposer | NgramProposer, sequence: Sequence, k: int = 3) -> list[int]:
    return proposer.propose([sequence], [k]).row(0)[0]


def propose(ids: list[int], k: int = 3, stop: tuple[int, ...] = (), **options: float) -> list[int]:
    return ask(SuffixProposer(**FREE | options), request(ids, stop=stop), k)


def has_seen(*outputs: list[int], **options: float) -> SuffixProposer:
    """A proposer that decoded requests with these outputs, to their ends."""
    proposer = SuffixProposer(**FREE | options)
    for output in outputs:
        sequence = request([0])
        ask(proposer, sequence)
        sequence.commit(output, 0, [])
        sequence.finish_reason = "stop"
    return proposer


# ---- which match, which continuation ----


def test_the_longest_match_wins() -> None:
    assert propose([1, 2, 3, 9, 9, 2, 5, 9, 2, 5, 9, 1, 2], k=1) == [3]
    assert propose([1, 2, 3, 9, 9, 2, 5, 9, 2, 5, 9, 1, 2], k=1, max_depth=2) == [5]


def test_the_most_frequent_continuation_is_followed_at_every_node() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 8, 7, 1, 2, 4, 0, 1, 2]
    assert propose(text, k=2) == [3, 8]


def test_of_equally_frequent_continuations_the_latest_wins() -> None:
    """C40: the leftmost would give 3 9 1."""
    assert propose([1, 2, 3, 9, 1, 2, 4, 1, 2]) == [4, 1, 2]
    assert propose([2, 3, 2, 4, 2, 4, 2, 3, 2], k=1, max_depth=2) == [3]


def test_a_texts_own_end_never_matches_itself() -> None:
    """C40, C28: nothing repeats, or a single token; and the end does not count where it is not followed."""
    assert propose([1, 2, 3]) == []
    assert propose([1]) == []
    assert propose([1, 2, 3, 1, 2], k=1, min_probability=2 / 3) == [3]  # (1 + 1/3) / (1 + 1): 3 always followed
    assert ask(SuffixProposer(**FREE), request([9], (1, 2, 3))) == []


def test_a_draft_goes_on_from_a_shorter_suffix_where_the_match_meets_the_texts_end() -> None:
    """A loop is drafted to any length, also one longer than the trie is deep; from one output it goes on in another."""
    assert propose([5, 5], k=4) == [5, 5, 5, 5]
    assert propose([1, 2, 3, 1, 2], k=8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert ask(has_seen([1, 2, 3], [3, 4, 5]), request([7, 1]), 9) == [2, 3, 4, 5]
    loop = list(range(7)) * 5
    assert propose(loop, k=30, max_depth=4) == (list(range(7)) * 5)[:30]


def reference(own: list[int], outputs: list[list[int]], depth: int) -> dict[int, float]:
    """The likelihoods behind a text by counting, as the class states them."""

    def followers(text: list[int], suffix: list[int]) -> Counter[int]:
        n = len(suffix)
        return Counter(text[i] for i in range(n, len(text)) if text[i - n : i] == suffix)

    p: dict[int, float] = {}
    for m in range(1, min(depth - 1, len(own)) + 1):
        counts: Counter[int] = Counter()
        for weight, text in [(1.0, own), *((OUTPUT_WEIGHT, output) for output in outputs)]:
            for token, times in followers(text, own[-m:]).items():
                counts[token] += weight * times  # type: ignore[assignment]
        n, escape = sum(counts.values()), ESCAPE / m
        if n:
            p = {x: (counts[x] + escape * p.get(x, 0.0)) / (n + escape) for x in counts.keys() | p.keys()}
    return p


@pytest.mark.parametrize("seed", range(30))
def test_what_is_drafted_is_the_likeliest_by_counting(seed: int) -> None:
    """One token, its likelihood from where `min_probability` begins to forbid it; the other bound fails just above."""
    source = random.Random(seed)
    size, depth = source.choice([2, 3, 5]), source.randint(2, 7)
    outputs = [source.choices(range(size), k=source.randint(1, 30)) for _ in range(source.randint(0, 3))]
    own = source.choices(range(size), k=source.randint(1, 30))
    wanted = reference(own, outputs, depth)

    def drafted(least: float) -> list[int]:
        proposer = has_seen(*outputs, max_depth=depth, min_probability=least)
        return ask(proposer, request(own), 1)

    if not wanted:
        assert drafted(0.0) == []
        return
    best = max(wanted.values())
    (token,) = drafted(best - 1e-9)
    assert wanted[token] == pytest.approx(best, abs=1e-12)
    assert drafted(best + 1e-9) == []


def test_the_likelihoods_that_the_class_states() -> None:
    """Once behind one token 1/3, twice 1/2; where six tokens match, the shorter suffixes add to 3/4."""
    assert reference([1, 2, 1], [], 24) == {2: pytest.approx(1 / 3)}
    assert reference([1, 2, 0, 1, 2, 9, 1], [], 2) == {2: pytest.approx(1 / 2)}
    assert reference([*range(6), 7, *range(6)], [], 24)[7] > 3 / 4


# ---- how far ----


def test_a_draft_ends_before_its_likelihood_falls_below_the_least() -> None:
    """2 is followed by 3, 3, 4: 2/5. Then 3 by 5 and 6 at order 1 and 2: 1/4 of order 1, (1 + 1/4) / 3."""
    text = [2, 3, 5, 0, 2, 4, 0, 2, 3, 6, 9, 2]
    assert propose(text, k=2, min_probability=0.16) == [3, 6]
    assert propose(text, k=2, min_probability=0.17) == [3]
    assert propose(text, k=2, min_probability=0.41) == []


@pytest.mark.parametrize(("stop", "wanted"), [((), [9, 4, 1]), ((7,), [9, 4, 1]), ((7, 9), [9])])
def test_a_proposal_ends_behind_a_stop(stop: tuple[int, ...], wanted: list[int]) -> None:
    """C25."""
    assert propose([1, 2, 9, 4, 1, 2], stop=stop) == wanted


# ---- what requests share ----


def test_outputs_of_earlier_requests_are_used_to_their_last_token() -> None:
    """The last step ends a request, and may be read when the request itself is gone."""
    proposer = has_seen([1, 2, 3, 4, 5])
    gc.collect()
    assert ask(proposer, request([7, 1, 2])) == [3, 4, 5]
    assert ask(has_seen([1, 2, 3, 4, 5], max_cached_tokens=0), request([7, 1, 2])) == []


def test_outputs_of_running_requests_are_used_within_the_same_call() -> None:
    one, two = request([0], (1, 2, 3, 4)), request([7, 1, 2])
    draft = SuffixProposer(**FREE).propose([two, one], [3, 3])
    assert draft.row(0)[0] == [3, 4]


def test_prompts_of_other_requests_are_not_used() -> None:
    proposer = SuffixProposer(**FREE)
    assert ask(proposer, request([1, 2, 3, 4, 5])) == []
    assert ask(proposer, request([7, 1, 2])) == []


def test_the_outputs_decide_where_the_own_text_knows_little() -> None:
    """4 followed 2 once in the own text, 5 in nine and in eleven outputs."""
    own = [2, 4, 2]
    assert ask(has_seen(*[[2, 5]] * 9), request(own), 1) == [4]
    assert ask(has_seen(*[[2, 5]] * 11), request(own), 1) == [5]


def test_without_a_global_part_interleaved_requests_get_what_each_gets_alone() -> None:
    """C40: a batch that grows step by step through one proposer; with the global part it does differ."""
    source = random.Random(3)
    texts = [source.choices(range(3), k=60) for _ in range(2)]

    def drafts(cached: int, rows: list[int]) -> list[list[list[int]]]:
        proposer = SuffixProposer(max_cached_tokens=cached)
        sequences = {b: request(texts[b][:4]) for b in rows}
        given = []
        for i in range(4, 60):
            draft = proposer.propose(list(sequences.values()), [5] * len(rows))
            given.append([draft.row(row)[0] for row in range(len(rows))])
            for b, sequence in sequences.items():
                sequence.tokens.append(texts[b][i])
        return given

    for cached in (0, 1000):
        alone = [[one, two] for (one,), (two,) in zip(drafts(cached, [0]), drafts(cached, [1]), strict=True)]
        assert (drafts(cached, [0, 1]) == alone) is (cached == 0)


def test_rejected_drafts_never_enter() -> None:
    """The target commits 9 each time instead of what was drafted; nothing but committed tokens is counted."""
    proposer, sequence = SuffixProposer(**FREE), request([1, 2, 3, 1, 2])
    assert ask(proposer, sequence) == [3, 1, 2]
    sequence.commit([9], 3, [0.0])
    sequence.commit([1, 2], 0, [])
    ask(proposer, sequence)
    assert paths(proposer._texts[sequence].trie) == counted([[1, 2, 3, 1, 2, 9, 1, 2]], 24)
    assert paths(proposer._outputs.trie) == counted([[9, 1, 2]], 24)


# ---- behind a draft of another proposer ----


def texts_and_drafts(seed: int) -> tuple[list[int], list[int], int]:
    source = random.Random(seed)
    size = source.choice([1, 2, 3, 6])
    text = source.choices(range(size), k=source.randint(1, 40))
    return text, source.choices(range(size), k=source.randint(0, 6)), source.randint(2, 8)


@pytest.mark.parametrize("seed", range(60))
def test_an_extension_is_what_would_be_proposed_had_the_draft_been_committed(seed: int) -> None:
    """And nothing of it stays: counts, preferences and ends are those of the text alone, and so they grow on."""
    text, draft, depth = texts_and_drafts(seed)
    options: dict[str, Any] = {"max_depth": depth, "max_cached_tokens": 0}
    proposer, sequence = SuffixProposer(**FREE | options), request(text)
    assert proposer.extend([sequence], [draft], [5]).row(0)[0] == propose([*text, *draft], 5, **options)
    assert state(proposer, sequence) == state_of(text, depth)
    sequence.tokens.extend([0, 1, 0])
    ask(proposer, sequence)
    assert state(proposer, sequence) == state_of([*text, 0, 1, 0], depth)


def test_a_draft_that_stays_in_the_trie_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trie, "take_back", lambda trie, document, trial: None)
    different = 0
    for seed in range(20):
        text, draft, depth = texts_and_drafts(seed)
        proposer, sequence = SuffixProposer(max_depth=depth), request(text)
        proposer.extend([sequence], [draft], [5])
        different += state(proposer, sequence) != state_of(text, depth)
    assert different >= 15


def state(proposer: SuffixProposer, sequence: Sequence) -> object:
    own = proposer._texts[sequence]
    return seen(own.trie, own._document)


def state_of(text: list[int], depth: int) -> object:
    trie, document = Trie(depth), Document(0)
    for token in text:
        trie.append(document, token)
    return seen(trie, document)


def seen(trie: Trie, document: Document) -> object:
    ends = [(window.start, node.times, node.followed, node.last.age) for window, node in document.ends]
    return paths(trie), preferences(trie), ends, document.tokens


def test_an_extension_knows_the_outputs_and_leaves_them_as_they_were() -> None:
    proposer = has_seen([1, 2, 3, 4])
    assert proposer.extend([request([7, 1])], [[2]], [3]).row(0)[0] == [3, 4]
    assert paths(proposer._outputs.trie) == counted([[1, 2, 3, 4]], 24)


def test_no_request_is_kept_alive() -> None:
    proposer, sequence = SuffixProposer(), request([1, 2], (1, 2))
    ask(proposer, sequence)
    del sequence
    gc.collect()
    assert len(proposer._texts) == 0
    ask(proposer, request([5]))
    assert len(proposer._outputs._sources) == 1


# ---- counts and eviction ----


def paths(trie: Trie) -> dict[tuple[int, ...], int]:
    """Every path of a trie with its count, leaves read to the depth of the trie."""
    found: dict[tuple[int, ...], int] = {}
    open_paths = [((), trie.root)]
    while open_paths:
        path, child = open_paths.pop()
        if isinstance(child, Window):
            text = child.document.tokens[child.start :][: trie.max_depth]
            found |= {tuple(text[:n]): 1 for n in range(len(path), len(text) + 1)}
            continue
        if path:
            found[path] = child.times
        children = child.children or ({} if child.only is None else {child.best: child.only})
        assert child.followed == sum(each.times for each in children.values())
        open_paths += [((*path, token), each) for token, each in children.items()]  # type: ignore[misc]
    return found


def counted(texts: list[list[int]], depth: int) -> dict[tuple[int, ...], int]:
    """The same by counting."""
    spans = (tuple(t[i : i + n]) for t in texts for i in range(len(t)) for n in range(1, min(depth, len(t) - i) + 1))
    return dict(Counter(spans))


@pytest.mark.parametrize("seed", range(60))
def test_eviction_bounds_memory_and_leaves_what_the_kept_outputs_alone_give(seed: int) -> None:
    """Outputs of several requests grow in turns; counts and preferences equal those of a trie of what is kept."""
    source = random.Random(seed)
    depth, limit, size = source.randint(2, 6), source.randint(1, 40), source.choice([1, 2, 3, 6])
    outputs, running = Outputs(depth, limit), [request([0])]
    for _ in range(40):
        if source.random() < 0.2 or not running:
            running.append(request([0]))
        outputs.catch_up(running)
        grown = source.choice(running)
        grown.tokens.extend(source.choices(range(size), k=source.randint(1, 4)))
        if source.random() < 0.15:
            grown.finish_reason = "stop"
        outputs.catch_up(running)
        running = [sequence for sequence in running if sequence.finish_reason is None]
        kept = [document.tokens[document.head :] for document in outputs._documents]
        assert sum(map(len, kept)) == outputs.size <= limit
        assert paths(outputs.trie) == counted(kept, depth)
        assert preferences(outputs.trie) == preferences(trie_of(kept, depth))


def trie_of(texts: list[list[int]], depth: int) -> Trie:
    trie = Trie(depth)
    for number, text in enumerate(texts):
        document = Document(number)
        for token in text:
            trie.append(document, token)
    return trie


def preferences(trie: Trie) -> dict[tuple[int, ...], int]:
    """What is proposed behind each path that is followed."""
    places = {path: trie.find(list(path)) for path in paths(trie) if len(path) < trie.max_depth}
    return {path: place[0].front(place[1]) for path, place in places.items() if place}


def test_the_oldest_output_is_forgotten_first() -> None:
    proposer = has_seen([1, 2, 3], [4, 5, 6], max_cached_tokens=4)
    assert ask(proposer, request([7, 4, 5]), 1) == [6]
    assert ask(proposer, request([7, 1, 2]), 1) == []
    assert proposer._outputs.size == 4


def test_an_output_longer_than_the_cache_keeps_its_end() -> None:
    proposer = has_seen([1, 2, 3, 4, 5, 6, 7, 8], max_cached_tokens=3)
    assert ask(proposer, request([0, 6])) == [7, 8]
    assert ask(proposer, request([0, 4])) == []


# ---- what comes out ----


@pytest.mark.parametrize(("k", "cached"), [(0, 1000), (1, 20), (3, 0), (5, 20), (8, 1000)])
def test_greedy_text_is_the_plain_text_for_every_draft_length(k: int, cached: int) -> None:
    """C36: several requests through one proposer, so that the global part drafts too."""
    for size in (2, 11):
        for rule in (table(size, seed=size, zeros=0), context(size)):
            prompts = [[0, 1, 1, 0, 1], [1], [0, 1, 1, 0, 1]]
            proposer = SuffixProposer(max_cached_tokens=cached)
            done = pipeline_of(rule, size, proposer, gamma=k, max_new_tokens=30).generate(prompts)
            assert [each.token_ids for each in done] == [greedy(rule, prompt, 30) for prompt in prompts]


def right_tokens(proposer: SuffixProposer | NgramProposer, text: list[int], k: int = 5) -> int:
    """Accepted drafts when a text's first token is given and the rest is decoded greedily."""
    sequence, right = request(text[:1]), 0
    while len(sequence.tokens) < len(text):
        at = len(sequence.tokens)
        draft = ask(proposer, sequence, min(k, len(text) - at - 1))
        wrong = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
        right += wrong
        sequence.tokens.extend(text[at : at + wrong + 1])
    return right


def test_on_repetitive_text_it_is_right_at_least_as_often_as_prompt_lookup() -> None:
    """Random phrases of one to six tokens: without limits from its own text, as it is with the texts before."""
    source = random.Random(0)
    phrases = [[source.randrange(50) for _ in range(source.randint(1, 6))] for _ in range(12)]
    texts = [[t for p in source.choices(phrases, weights=range(1, 13), k=150) for t in p] for _ in range(4)]
    lookup = sum(right_tokens(NgramProposer(), text) for text in texts)
    alone = sum(right_tokens(SuffixProposer(**FREE, max_cached_tokens=0), text) for text in texts)
    proposer = SuffixProposer()
    assert lookup <= alone <= sum(right_tokens(proposer, text) for text in texts)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_depth", 1),
        ("max_depth", 2.5),
        ("min_probability", "x"),
        ("min_probability", -0.1),
        ("min_probability", 1.1),
        ("max_cached_tokens", -1),
        ("max_cached_tokens", True),
    ],
)
def test_wrong_options_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key):
        SuffixProposer(**{key: value})  # type: ignore[arg-type]


def test_a_request_whose_random_numbers_were_used_before_drafts_from_its_own_text_alone() -> None:
    """What the stream put out the first time must not be drafted the second: drafts and draws would depend."""
    rule = constant([0.5, 0.3, 0.2])
    proposer = SuffixProposer()
    pipeline = pipeline_of(rule, 3, proposer, gamma=4, temperature=1.0, max_new_tokens=30)
    alone = pipeline_of(rule, 3, SuffixProposer(max_cached_tokens=0), gamma=4, temperature=1.0, max_new_tokens=30)
    wanted = alone.generate([[0, 1]])[0].token_ids
    pipeline.generate([[0, 1]])
    assert pipeline.generate([[0, 1]])[0].token_ids == wanted
    assert pipeline.generate([[2, 1]])[0].spec_decode["num_draft_tokens"] > 0
