"""Reading, rolling back and refusing: the cache against the table models, ragged batches, real architectures."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from specpipe.audit.tables import FixedProposer, table
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.ngram import NgramProposer
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.linear import half_exponent, pack_linears
from specpipe.verifier.reader import Reader
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import TableModel, ToyTokenizer, chain, context, greedy, pipeline_of, right_but_at, small, window


@pytest.mark.parametrize("place", range(4))
def test_a_rejection_leaves_the_cache_at_the_committed_length(place: int) -> None:
    """C30: right except at `place`: there the round stops, the text is the plain one, and nothing is read twice."""
    rule, prompt = context(11), [1, 2, 3]
    pipeline = pipeline_of(rule, 11, right_but_at(rule, place, 11), gamma=4, max_new_tokens=17)
    sequence = pipeline.sequences([prompt])[0]
    for step in pipeline.decode(sequence):
        if step.drafted > place:
            assert step.accepted == place or sequence.finish_reason
        assert pipeline.verifier.reader.cache.lengths == [len(sequence.tokens) - 1]
    assert sequence.new_tokens == greedy(rule, prompt, 17)
    first, *later = pipeline.verifier.target.model.calls
    assert first.positions == [list(range(len(prompt) + 4))]
    assert [len(call.ids[0]) for call in later] == [step.drafted + 1 for step in sequence.steps[1:]]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_full_acceptance_round_after_round(k: int) -> None:
    """C29: a draft that is always right is always accepted, bonus token included."""
    rule = context(11)
    pipeline = pipeline_of(rule, 11, right_but_at(rule, -1, 11), gamma=k, max_new_tokens=17)
    done = pipeline.generate([[1, 2, 3]])[0]
    assert done.token_ids == greedy(rule, [1, 2, 3], 17)
    assert done.spec_decode["num_draft_tokens"] == done.spec_decode["num_accepted_draft_tokens"] > 0


def test_the_first_draft_is_judged_by_the_row_before_it() -> None:
    """C8: shifted rows would accept the repeated 1."""
    done = pipeline_of(chain(32), 32, FixedProposer(lambda t, k: [1]), gamma=1, max_new_tokens=2).generate([[1, 1, 1]])[
        0
    ]
    assert done.token_ids[0] == 2
    assert (done.spec_decode["num_draft_tokens"], done.spec_decode["num_accepted_draft_tokens"]) == (1, 0)


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]])
@pytest.mark.parametrize("place", range(4))
def test_a_rule_over_a_window_is_kept_across_its_border(prompt: list[int], place: int) -> None:
    """C32: the cache drops nothing, so a rejection at any place around the border loses nothing."""
    rule = window(11, 8)
    pipeline = pipeline_of(rule, 11, right_but_at(rule, place, 11), gamma=4, max_new_tokens=20)
    assert pipeline.generate([prompt])[0].token_ids == greedy(rule, prompt, 20)


def test_the_cache_grows_past_its_first_allocation() -> None:
    rule = chain(32)
    pipeline = pipeline_of(rule, 32, right_but_at(rule, 2, 32), gamma=4, max_new_tokens=600)
    assert pipeline.generate([[3]])[0].token_ids == greedy(rule, [3], 600)


# ---- batches ----


def run(pipeline: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Decode together: one step for all unfinished rows, in order, until none is left."""
    sequences = pipeline.sequences(prompts)
    while live := [s for s in sequences if s.finish_reason is None]:
        pipeline.step(live)
    return [s.new_tokens for s in sequences]


def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    """C33, C34, C35: ragged prompts, draft lengths and acceptance; every order of the rows; finished rows leave."""
    rule = table(5, seed=4, zeros=0)

    def guess(tokens: list[int], k: int) -> list[int]:
        right = right_but_at(rule, tokens[0], 5).guess(tokens, k)
        return right[: [4, 0, 2, 4][tokens[0]]]

    prompts = [[0, 1, 2, 3, 4, 0, 1, 2, 3], [1], [2, 4, 4], [3, 3]]
    alone = [run(pipeline_of(rule, 5, FixedProposer(guess), max_new_tokens=9), [prompt])[0] for prompt in prompts]
    assert alone == [greedy(rule, prompt, 9) for prompt in prompts]
    for order in itertools.permutations(range(4)):
        together = run(pipeline_of(rule, 5, FixedProposer(guess), max_new_tokens=9), [prompts[i] for i in order])
        assert together == [alone[i] for i in order]


def test_logits_of_a_ragged_batch_equal_those_of_single_rows() -> None:
    """C33: stale keys are masked, not zeroed: rows that accepted 4, 0 and 2 of 4 read on as if alone."""
    target = tiny(dtype="float64", device="cpu")
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30]]
    blocks = [[41, 42, 43, 44, 45], [51], [61, 62, 63]]
    drafts = [[41, 42, 43, 44], [9, 9, 9, 9], [61, 62, 9, 9]]
    together, alone = Reader(target.model), [Reader(target.model) for _ in prompts]

    def sequences() -> list[Sequence]:
        return [Sequence(p, GenerationSettings(max_new_tokens=50), chance=Chance(0)) for p in prompts]

    batch, single = sequences(), sequences()
    for round_drafts in (drafts, [[1, 2], [], [3]]):
        ours = together.read(batch, Draft.of(round_drafts))
        theirs = [r.read([s], Draft.of([d]))[0] for r, s, d in zip(alone, single, round_drafts, strict=True)]
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, atol=1e-12)
        for s, block in [*zip(batch, blocks, strict=True), *zip(single, blocks, strict=True)]:
            s.commit(block, 4, [])
        together.roll_back(batch)
        for reader, s in zip(alone, single, strict=True):
            reader.roll_back([s])


def test_padding_of_a_ragged_batch_stays_inside_the_context() -> None:
    """C35: learned positions; a row at the end of the context beside one with a long prompt to read."""
    model = small("GPT2")
    reader, alone = Reader(model), Reader(model)
    prompts = [list(range(1, 58)), list(range(1, 31))]
    near_end, fresh = (Sequence(p, GenerationSettings(max_new_tokens=5), chance=Chance(0)) for p in prompts)
    other = Sequence([5], GenerationSettings(max_new_tokens=5), chance=Chance(0))
    reader.read([near_end, other], Draft.of([[], []]))
    near_end.commit([7], 0, [])
    together = reader.read([near_end, fresh], Draft.of([[], [9]]))
    for sequence, draft, logits in ((near_end, [], together[0]), (fresh, [9], together[1])):
        assert torch.allclose(logits, alone.read([sequence], Draft.of([draft]))[0], atol=1e-12)


def test_longrope_models_are_used_up_to_their_original_context() -> None:
    """A block over that border would turn all keys by other factors than token by token."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    model = small("Phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=16)
    target = Target(model, ToyTokenizer(), "Phi3", None)
    assert target.context == 16
    parts = {"sampler": Rejection(), "settings": GenerationSettings(max_new_tokens=None, ignore_eos=True)}
    texts = []
    for gamma in (0, 3, 8):
        pipeline = Pipeline(
            verifier=EagerVerifier(target),
            proposer=NgramProposer(),
            num_speculative_tokens=gamma,
            **parts,  # type: ignore[arg-type]
        )
        texts.append(pipeline.generate([[5, 9, 5, 9]])[0].token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 12


def test_an_interrupted_step_leaves_nothing_behind() -> None:
    """C30's kin: Ctrl-C between scoring and rolling back; decoding goes on as if it had not been."""

    class Once(Rejection):
        tripped = False

        def accept(self, *given: Any) -> tuple[int, int]:
            if not Once.tripped and given[3] is not None and len(given[0]) == 4:
                Once.tripped = True
                raise KeyboardInterrupt
            return super().accept(*given)

    rule = context(11)
    pipeline = pipeline_of(rule, 11, right_but_at(rule, 2, 11), gamma=4, sampler=Once(), max_new_tokens=17)
    sequence = pipeline.sequences([[1, 2, 3]])[0]
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.decode(sequence))
    list(pipeline.decode(sequence))
    assert sequence.new_tokens == greedy(rule, [1, 2, 3], 17)


def test_a_new_request_in_a_row_starts_empty() -> None:
    rule = table(5, seed=6, zeros=0)
    pipeline = pipeline_of(rule, 5, right_but_at(rule, 1, 5), max_new_tokens=6)
    for prompt in ([1, 2, 3, 4], [2], [1, 2]):
        assert pipeline.generate([prompt])[0].token_ids == greedy(rule, prompt, 6)


def test_a_reader_that_was_idle_catches_up() -> None:
    """One rule: a model reads the tokens it has not read yet."""
    rule = context(11)
    reader = Reader(TableModel(rule, 11))
    sequence = Sequence([1, 2], GenerationSettings(max_new_tokens=50), chance=Chance(0))
    reader.read([sequence], Draft.of([[3]]))
    for token in (4, 5, 6):
        sequence.commit([token], 0, [])
    reader.cache.lengths = [2]
    logits = reader.read([sequence], Draft.of([[7]]))[0]
    assert logits.argmax(-1).tolist() == [int(rule([1, 2, 4, 5, 6]).argmax()), int(rule([1, 2, 4, 5, 6, 7]).argmax())]
    assert reader.model.calls[-1].positions == [[2, 3, 4, 5]]  # type: ignore[union-attr, index]


# ---- which models ----


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT2", "GPTNeoX", "Gemma", "Phi3", "Qwen3", "OPT", "StableLm"])
def test_ordinary_decoders_decode_as_hugging_face_does(kind: str) -> None:
    """Learned, rotary and partial rotary positions; grouped heads; tied and untied heads."""
    more = {
        "Phi3": {"pad_token_id": 0, "sliding_window": None},
        "Gemma": {"head_dim": 8},
        "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
        "Qwen3": {"head_dim": 8},
    }
    model = small(kind, **more.get(kind, {}))
    prompt, n = [5, 9, 5, 9, 5], 20
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        plain = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False
        )
    wanted = plain[0, len(prompt) :].tolist()
    target = Target(model, ToyTokenizer(), kind, None)
    settings = GenerationSettings(max_new_tokens=n, ignore_eos=True)
    pipeline = Pipeline(
        verifier=EagerVerifier(target), proposer=NgramProposer(), sampler=Rejection(), settings=settings
    )
    ours = pipeline.generate([prompt])[0].token_ids
    # min_new_tokens bans the end-of-text id in Hugging Face's run; where it would have won, the two part ways.
    cut = ours.index(2) if 2 in ours else n
    assert ours[:cut] == wanted[:cut]


@pytest.mark.parametrize(
    ("kind", "config", "layers"),
    [
        ("Llama4Text", {"head_dim": 8, "num_local_experts": 2}, "chunked_attention"),
        ("GPTNeo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "local"),
        ("Qwen3Next", {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("Mamba", {"state_size": 4}, "linear_attention"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]}, "conv"),
    ],
)
def test_layers_that_cannot_be_rolled_back_are_refused_by_name(kind: str, config: dict[str, Any], layers: str) -> None:
    """C31: refused at the start; never a different output."""
    model = small(kind, **config)
    with pytest.raises(UserError, match=layers):
        EagerVerifier(Target(model, ToyTokenizer(), kind, None))


def test_an_encoder_decoder_is_refused() -> None:
    model = TableModel(chain(8), 8)
    model.config.is_encoder_decoder = True
    with pytest.raises(UserError, match="encoder-decoder"):
        EagerVerifier(Target(model, ToyTokenizer(), "t5", None))


@pytest.mark.parametrize(("kind", "says"), [("Bloom", "cannot be read with a cache"), ("Bert", "not a causal model")])
def test_other_architectures_are_refused_by_name(kind: str, says: str) -> None:
    """Positions made of the attention mask; attention in both directions."""
    if kind == "Bloom":
        model = small("Bloom", n_head=4, n_layer=2)
    else:
        import transformers

        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, intermediate_size=64)).double().eval()
    with pytest.raises(UserError, match=says) as error:
        EagerVerifier(Target(model, ToyTokenizer(), kind, None))
    assert type(model).__name__ in str(error.value)


def test_a_model_with_hidden_state_is_found_out_by_the_rehearsal() -> None:
    """C31: `running`: its sum lives outside the cache and cannot be cut back, and nothing in its config says so."""

    class Running(TableModel):
        total = 0

        def forward(self, input_ids: torch.Tensor, cache: Any = None, **given: Any) -> Any:
            result = super().forward(input_ids, cache=cache, **given)
            if cache is None:
                self.total = 0
            rows = []
            for token in input_ids[0].tolist():
                self.total += token
                rows.append(context(self.size)([self.total]))
            result.logits[0] = torch.stack(rows[-result.logits.shape[1] :])
            return result

    with pytest.raises(UserError, match="roll-back"):
        EagerVerifier(Target(Running(context(11), 11), ToyTokenizer(), "running", None))


# ---- packed weights ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 6, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_compute_what_plain_ones_do(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(96, 80, bias=bias).to(dtype)
    model, exact = torch.nn.Sequential(copy.deepcopy(plain)), plain.double()
    x = torch.randn(1, rows, 96, dtype=dtype)
    with torch.inference_mode():
        pack_linears(model)
        got, wanted = model(x), exact(x.double())
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-8 * wanted.abs().max())


def test_bf16_weights_are_packed_as_float16_only_without_loss() -> None:
    """A power of two makes room for very small weights; a range that no power of two can hold is refused."""
    weight = torch.tensor([1.5, -3e-5, 1e-7, 0.0, 2.0**-13]).bfloat16()
    exponent = half_exponent(weight)
    assert exponent is not None
    scaled = weight.float() * 2.0**exponent
    assert torch.equal(scaled.half().float() / 2.0**exponent, weight.float())
    assert not torch.equal(weight.float().half().float(), weight.float())  # without the power of two, 1e-7 loses digits
    assert half_exponent(torch.tensor([1e5, 1.01e-8]).bfloat16()) is None
    layer = torch.nn.Linear(4, 2, bias=False).bfloat16()
    layer.weight.data = torch.tensor([[1e5, 0, 0, 0], [0, 1e-7, 0, 0]]).bfloat16()
    x = torch.ones(1, 4).bfloat16()
    wanted = layer(x)
    model = torch.nn.Sequential(layer)
    pack_linears(model)
    assert torch.allclose(model(x), wanted, rtol=2**-7)


def test_float64_models_are_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).double())
    assert pack_linears(model) == 0


def test_prepack_changes_what_runs() -> None:
    """C45."""
    assert EagerVerifier(tiny(device="cpu")).prepared.packed > 0 or not torch.backends.mkldnn.is_available()
    assert EagerVerifier(tiny(device="cpu"), prepack=False).prepared.packed == 0


# ---- long texts ----


@pytest.mark.parametrize("piece", [1, 3, 5])
@pytest.mark.parametrize("kind", [("Llama", {}), ("Mistral", {"sliding_window": 3})])
def test_a_long_text_is_read_in_pieces_with_the_same_logits(
    piece: int, kind: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a short one, and again behind a roll-back: padding and pieces change nothing."""

    def rows() -> list[torch.Tensor]:
        read = Reader(small(kind[0], **kind[1]))
        texts = [
            Sequence(prompt, GenerationSettings(max_new_tokens=30), chance=Chance(0))
            for prompt in ([5, 9, 3, 20, 7, 8, 8, 1, 30, 2, 11], [8, 4])
        ]
        seen = read.read(texts, Draft.of([[3], []], read.device))
        texts[0].commit([6], 1, [])
        texts[1].commit([7], 0, [])
        read.cut(texts[0], 4)
        return [*seen, *read.read(texts, Draft.of([[], [1, 2]], read.device))]

    whole, widths = rows(), []
    monkeypatch.setattr("specpipe.verifier.reader.PIECE", piece)
    forward = Reader._forward
    monkeypatch.setattr(
        Reader, "_forward", lambda self, ids, *rest: widths.append(ids.shape[1]) or forward(self, ids, *rest)
    )
    for ours, plain in zip(rows(), whole, strict=True):
        assert (ours - plain).abs().max() < 1e-10
    assert max(widths) <= piece + 2  # the last piece, and a draft behind it
    assert len(widths) > 2
