"""Suffix decoding: which match, which continuation, how far, what is shared between requests and what is forgotten."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter

import pytest

from specpipe.audit.tables import table
from specpipe.chance import Chance
from specpipe.errors import UserError
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.suffix import Document, Outputs, SuffixProposer, Trie, Window
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from tests.stand_ins import constant, context, greedy, pipeline_of

REPEATS = itertools.count()  # a stream of its own for each request
FREE = {"max_spec_factor": 100.0, "min_probability": 0.0}  # nothing but the text ends a draft


def request(prompt: list[int], output: tuple[int, ...] = (), stop: tuple[int, ...] = ()) -> Sequence:
    settings = GenerationSettings(max_new_tokens=10_000)
    sequence = Sequence(prompt, settings, stop_ids=stop, chance=Chance(0, prompt, repeat=next(REPEATS)))
    sequence.tokens.extend(output)
    return sequence


def ask(proposer: SuffixProposer | NgramProposer, sequence: Sequence, k: int = 3) -> list[int]:
    return proposer.propose([sequence], [k]).row(0)[0]


def propose(ids: list[int], k: int = 3, stop: tuple[int, ...] = (), **options: float) -> list[int]:
    return ask(SuffixProposer(**FREE | options), request(ids, stop=stop), k)  # type: ignore[arg-type]


def has_seen(*outputs: list[int], **options: float) -> SuffixProposer:
    """A proposer that decoded requests with these outputs, to their ends."""
    proposer = SuffixProposer(**FREE | options)  # type: ignore[arg-type]
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
    assert propose([5, 5], k=4) == [5]
    assert propose([1, 2, 3, 1, 2], k=3, min_probability=1.0) == [3, 1, 2]
    assert ask(SuffixProposer(**FREE), request([9], (1, 2, 3))) == []


def test_a_match_of_all_but_one_of_max_depth_tokens_goes_on() -> None:
    """A path that reaches `max_depth` continues from its own last tokens."""
    loop = list(range(7)) * 5
    assert propose(loop, k=30, max_depth=4) == (list(range(7)) * 5)[:30]


# ---- how far ----


def test_a_draft_ends_before_its_probability_falls_below_the_least() -> None:
    """2 is followed by 3, 3, 4 and 3 by 5, 6: 2/3, then 1/3."""
    text = [2, 3, 5, 0, 2, 4, 0, 2, 3, 6, 9, 2]
    assert propose(text, k=2, min_probability=0.33) == [3, 6]
    assert propose(text, k=2, min_probability=0.34) == [3]
    assert propose(text, k=2, min_probability=0.67) == []


@pytest.mark.parametrize(("factor", "wanted"), [(0.4, 0), (0.5, 1), (1.0, 2), (1.9, 3), (2.0, 4), (9.0, 5)])
def test_a_draft_is_at_most_factor_times_the_match(factor: float, wanted: int) -> None:
    """The match is 1 2; five tokens are asked for."""
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2], k=5, max_spec_factor=factor) == [3, 4, 5, 6, 7][:wanted]


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


def test_the_candidate_with_the_higher_score_wins_and_the_own_one_if_they_are_equal() -> None:
    """Own: 3 or 4 behind 2, score 1/2. Global: 5 6 7 behind 2, score 3; then 5 alone, half of the time: equal."""
    own = [2, 3, 2, 4, 2]
    assert propose(own, k=1) == [4]
    assert ask(has_seen([2, 5, 6, 7]), request(own), 3) == [5, 6, 7]
    assert ask(has_seen([2, 5], [2, 6]), request(own), 1) == [4]


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


def preferences(trie: Trie) -> dict[tuple[int, ...], tuple[int, float]]:
    """What is proposed behind each path, and with which frequency."""
    places = {path: trie.find(list(path)) for path in paths(trie) if len(path) < trie.max_depth}
    steps = {path: place[0].most_frequent(place[1]) for path, place in places.items() if place}
    return {path: (step[0], step[2]) for path, step in steps.items() if step}


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


@pytest.mark.parametrize("k", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("cached", [0, 20, 1000])
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
    alone = sum(right_tokens(SuffixProposer(**FREE, max_cached_tokens=0), text) for text in texts)  # type: ignore[arg-type]
    proposer = SuffixProposer()
    assert lookup <= alone <= sum(right_tokens(proposer, text) for text in texts)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_depth", 1),
        ("max_depth", 2.5),
        ("max_spec_factor", 0),
        ("max_spec_factor", "x"),
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
