"""The loop as a whole: same text whatever is proposed, seeds, contracts, and the Python interface."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

import specpipe
from specpipe.audit.tables import FixedProposer, TableProposer, table
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import ContractError, UserError
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.none import NoProposer
from specpipe.sequence import Sequence
from specpipe.stats import completion, summarise
from tests.stand_ins import constant, context, greedy, pipeline_of, right_but_at


@pytest.mark.parametrize("gamma", [0, 1, 3, 5, 8])
def test_greedy_text_is_the_plain_text_for_every_draft_length(gamma: int) -> None:
    """C36: stand-ins, exact; n-gram drafts that match often and rarely."""
    for size in (2, 11):
        rule = table(size, seed=size, zeros=0)
        for prompt in ([0, 1, 1, 0, 1], [1]):
            done = pipeline_of(rule, size, NgramProposer(), gamma=gamma, max_new_tokens=30).generate([prompt])[0]
            assert done.token_ids == greedy(rule, prompt, 30)


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_proposer_without_proposals_is_plain_decoding(gamma: int) -> None:
    """C28."""
    rule = context(11)
    done = pipeline_of(rule, 11, FixedProposer(lambda t, k: []), gamma=gamma, max_new_tokens=9).generate([[1, 2]])[0]
    assert done.token_ids == greedy(rule, [1, 2], 9)
    assert done.spec_decode["num_plain_steps"] == 9
    assert done.tokens_per_target_pass == 1


def test_settings_that_turn_drafting_off_do() -> None:
    """C45: gamma 0 and `none` never draft; other gammas draft as many as they say."""
    rule = context(11)
    for gamma in (0, 2, 5):
        done = pipeline_of(rule, 11, right_but_at(rule, -1, 11), gamma=gamma, max_new_tokens=12).generate([[1]])[0]
        assert len(done.spec_decode["acceptance_histogram"]) == gamma + 1
        assert done.spec_decode["num_draft_tokens"] == {0: 0, 2: 8, 5: 10}[gamma]
    done = pipeline_of(rule, 11, NoProposer(), gamma=5, max_new_tokens=12).generate([[1]])[0]
    assert done.spec_decode["num_draft_tokens"] == 0


# ---- seeds ----

P, Q = constant([0.5, 0.3, 0.2]), constant([0.6, 0.3, 0.1])


def sampled(seed: int, prompts: list[list[int]], **settings: float) -> list[list[int]]:
    pipeline = pipeline_of(
        P, 3, TableProposer(Q, 3), gamma=3, seed=seed, **{"temperature": 1.0, "max_new_tokens": 50} | settings
    )
    return [done.token_ids for done in pipeline.generate(prompts)]


def test_a_seed_fixes_the_text() -> None:
    """C37: same seed, same ids, other runs in between; another seed, other ids; greedy ignores it."""
    first = sampled(1, [[0]])
    sampled(2, [[1, 2]])
    assert sampled(1, [[0]]) == first
    assert sampled(2, [[0]]) != first
    assert len({tuple(sampled(seed, [[0]], temperature=0.0)[0]) for seed in range(5)}) == 1


def test_a_requests_text_does_not_depend_on_its_neighbours() -> None:
    alone = sampled(1, [[2, 1]])[0]
    assert sampled(1, [[0], [2, 1], [1]])[1] == alone
    assert sampled(1, [[2, 1], [0]])[0] == alone


def test_equal_prompts_of_a_run_get_streams_of_their_own() -> None:
    one, two = sampled(1, [[0], [0]])
    assert one != two


def test_the_three_streams_are_independent() -> None:
    """One stream for two purposes would repeat numbers; these do not, within 1,000 draws of each."""
    chance = Chance(7, [1, 2])
    streams = [
        [stream.random() for _ in range(1000)] for stream in (chance._drafting, chance._accepting, chance._drawing)
    ]
    assert len({number for stream in streams for number in stream}) == 3000


def test_a_run_cut_by_a_stop_and_continued_repeats_with_its_seed() -> None:
    """C37, second half."""

    def twice() -> list[int]:
        pipeline = pipeline_of(
            P, 3, TableProposer(Q, 3), gamma=3, seed=5, temperature=1.0, max_new_tokens=30, stop_token_ids=[2]
        )
        first = pipeline.sequences([[0]])[0]
        for _ in pipeline.decode(first):
            pass
        chance, then = first.chance, pipeline.sequences([first.tokens])[0]
        then.chance = chance
        for _ in pipeline.decode(then):
            pass
        return then.tokens

    assert twice() == twice()


def test_drawn_text_follows_the_law_end_to_end() -> None:
    """20,000 tokens of P3: chi-square; the histogram of the drafts fits q (proposal contract, C2)."""
    drafts: list[int] = []

    class Recording(TableProposer):
        def propose(self, sequences: list, lengths: list[int]) -> Draft:  # type: ignore[type-arg]
            draft = super().propose(sequences, lengths)
            drafts.extend(draft.row(0)[0])
            return draft

    pipeline = pipeline_of(P, 3, Recording(Q, 3), gamma=3, temperature=1.0, max_new_tokens=50)
    ids = [x for done in pipeline.generate([[0]] * 400) for x in done.token_ids]
    for seen, law in ((ids, [0.5, 0.3, 0.2]), (drafts, [0.6, 0.3, 0.1])):
        chi2 = sum((seen.count(x) - len(seen) * w) ** 2 / (len(seen) * w) for x, w in enumerate(law))
        assert chi2 < 18.4  # p = 1e-4 at 2 degrees of freedom


# ---- contracts ----


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (Draft.of([[1, 1, 1, 1]]), "at most"),
        (Draft.of([[1], [1]]), "at most"),
        (Draft.of([[77]]), "ids end at 2"),
        (Draft(torch.tensor([[1]]), [1], torch.tensor([[[1.0, 0.0, 0.0]]])), "q is 0"),
        (Draft(torch.tensor([[1]]), [1], torch.tensor([[[0.6]]])), "q of shape"),
        (Draft(torch.tensor([[1]]), [1], torch.tensor([[[0.6, 0.4]]])), "q of shape"),
        (Draft(torch.tensor([[1]]), [1], torch.tensor([[[1.2, 0.6, 0.2]]])), "sums to"),
        (Draft(torch.tensor([[1]]), [1], torch.tensor([[[-0.2, 1.0, 0.2]]])), "negative"),
        (Draft(torch.tensor([[1]]), [1], torch.tensor([[[0, 1, 0]]])), "not floating point"),
        (Draft(torch.tensor([[1]]), [2]), "tokens of shape"),
    ],
)
def test_a_proposer_that_breaks_its_contract_is_named(draft: Draft, says: str) -> None:
    class Rogue:
        def propose(self, sequences: list, lengths: list[int]) -> Draft:  # type: ignore[type-arg]
            return draft

    with pytest.raises(ContractError, match=f"Rogue.*{says}"):
        pipeline_of(P, 3, Rogue(), gamma=3, temperature=1.0).generate([[0]])


class Meddling:
    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        sequences[0].tokens.append(0)
        return Draft.of([[]])


class Forgetful:
    def propose(self, sequences: list[Sequence], lengths: list[int]) -> None:
        return None


@pytest.mark.parametrize(
    ("proposer", "says"), [(Meddling(), "changed the tokens"), (Forgetful(), "NoneType, not a Draft")]
)
def test_a_proposer_is_named_that_changes_a_request_or_returns_something_else(proposer: Any, says: str) -> None:
    with pytest.raises(ContractError, match=f"{type(proposer).__name__}.*{says}"):
        pipeline_of(P, 3, proposer, gamma=3).generate([[0]])


def test_what_is_no_proposer_is_refused_before_anything_is_decoded() -> None:
    with pytest.raises(UserError, match=r"^proposer: dict has no method 'propose'"):
        pipeline_of(P, 3, {})


def test_a_foreign_id_is_named_before_a_real_model_sees_it() -> None:
    pipeline = specpipe.load("target=tiny", "target.device=cpu", "generation.max_new_tokens=5")
    pipeline.proposer = FixedProposer(lambda tokens, k: [99_999])
    with pytest.raises(ContractError, match="FixedProposer proposed"):
        pipeline.generate("hello")


# ---- time ----


def test_parts_of_the_time_sum_to_the_wall_time() -> None:
    import time

    pipeline = pipeline_of(context(11), 11, NgramProposer(), max_new_tokens=40)
    start = time.perf_counter()
    done = pipeline.generate([[1, 2, 3]])[0]
    wall = time.perf_counter() - start
    assert all(seconds >= 0 for seconds in done.timing.values())
    assert 0.5 * wall < sum(done.timing.values()) <= wall


# ---- devices ----


def test_the_device_path_decodes_what_the_host_path_decodes() -> None:
    """Acceptance with one read per step, forced on the CPU: same ids, same counters, same alpha."""
    check_device_path(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_decodes_what_the_host_decodes() -> None:
    from specpipe import load

    for generation in ("greedy", "sample", "nucleus"):
        texts = [
            load("target=tiny", f"target.device={device}", "target.dtype=float64", f"generation={generation}")
            .generate([[65, 66, 67, 65, 66]])[0]
            .token_ids
            for device in ("cpu", "cuda")
        ]
        assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("generation", ["greedy", "sample"])
@pytest.mark.parametrize("proposer", [["none"], ["ngram"], ["layer_skip", "proposer.layers=1"]])
def test_passes_recorded_in_cuda_graphs_decode_what_the_host_decodes(proposer: list[str], generation: str) -> None:
    from specpipe import load
    from specpipe.verifier.graphs import GraphedModel

    name, *parts = proposer
    words = ("target=tiny", "target.dtype=float64", f"generation={generation}", f"proposer={name}", *parts)
    pipelines = [load(*words, f"target.device={device}") for device in ("cpu", "cuda")]
    done = [pipeline.generate([[65, 66, 67, 65, 66], [70]]) for pipeline in pipelines]
    assert [each.token_ids for each in done[0]] == [each.token_ids for each in done[1]]
    assert pipelines[1].verifier.engine == "graphs"
    model = pipelines[1].verifier.reader.model
    assert isinstance(model, GraphedModel)
    assert model._made
    assert not model.given_up


def check_device_path(device: torch.device) -> None:
    class Elsewhere:
        """A device that is not called cpu."""

        type = "elsewhere"

    rule = table(6, seed=8, zeros=0.2)
    proposers = [
        NgramProposer(),
        TableProposer(table(6, seed=9), 6),
        FixedProposer(lambda t, k: [random.Random(len(t)).randrange(6)] * k),
    ]
    for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8, "top_k": 4}):
        for proposer in proposers:
            host, there = (
                pipeline_of(rule, 6, proposer, gamma=3, seed=3, max_new_tokens=40, **settings) for _ in range(2)
            )
            there.verifier.device = Elsewhere()
            a, b = host.generate([[1, 2]])[0], there.generate([[1, 2]])[0]
            assert a.token_ids == b.token_ids
            assert a.spec_decode == b.spec_decode
            assert a.alpha == pytest.approx(b.alpha)


# ---- the Python interface ----


def test_load_gives_a_pipeline_that_generates_and_streams() -> None:
    pipeline = specpipe.load("target=tiny", "proposer=ngram", "generation.max_new_tokens=12", "target.device=cpu")
    texts = [done.text for done in pipeline.generate(["hello", "hello there"])]
    assert len(texts) == 2
    assert "".join(piece.text for piece in pipeline.stream("hello")) == texts[0]
    assert len(pipeline.generate("hello")) == 1
    assert len(pipeline.generate([[72, 73]])[0].token_ids) == 12


def test_requests_that_share_passes_take_their_time_together_once() -> None:
    """theory.md: a request's timing sums to its wall time, the summary's to that of the batch."""
    pipeline = pipeline_of(context(11), 11, right_but_at(context(11), 1, 11), gamma=3, max_new_tokens=12)
    sequences = pipeline.sequences([[1, 2, 3], [4], [5, 6]])
    start = time.perf_counter()
    steps = [step for _, step in pipeline.decode_together(sequences, 3)]
    wall = time.perf_counter() - start
    assert all(len(sequence.new_tokens) == 12 for sequence in sequences)
    assert {step.rows for step in steps} <= {1, 2, 3}
    assert sum(summarise([sequence.steps for sequence in sequences], 3)["timing"].values()) <= wall
    each = [sum(completion("", sequence, "", 3).timing.values()) for sequence in sequences]
    assert max(each) <= wall < sum(each) + wall / 2


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_rows_that_finish_leave_their_batch_and_the_others_keep_what_was_read(batch_size: int) -> None:
    """C28, C33: each text is the one it is alone; nothing but new tokens is read after a row has left."""
    rule = table(11, seed=4, zeros=0)
    pipeline = pipeline_of(rule, 11, right_but_at(rule, 2, 11), gamma=3, max_new_tokens=20, stop_token_ids=[0, 5])
    prompts = [[1, 2, 3], [4], [5, 6], [7, 7], [8]]
    alone = [done.token_ids for done in pipeline.generate(prompts)]
    assert len({len(ids) for ids in alone}) > 1
    model = pipeline.verifier.target.model
    model.calls.clear()
    sequences = pipeline.sequences(prompts)
    for _ in pipeline.decode_together(sequences, batch_size):
        pass
    assert [sequence.new_tokens for sequence in sequences] == alone
    assert max(len(row) for call in model.calls for row in call.ids) <= 3 + 3  # a prompt and its first drafts
