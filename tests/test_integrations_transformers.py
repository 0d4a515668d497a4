"""`custom_generate`: what comes out is what `generate` says without it, token for token or law for law."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as transformers_version
from transformers.generation import (
    BaseStreamer,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
)

from specpipe import load
from specpipe.audit.exact import Law, explore, largest_difference
from specpipe.audit.tables import FixedProposer
from specpipe.errors import UserError
from specpipe.integrations import asked, transformers
from specpipe.integrations.transformers import pipelined, speculative
from specpipe.proposers.layer_skip import LayerSkip
from specpipe.proposers.ngram import NgramProposer
from specpipe.samplers.rejection import Rejection
from specpipe.verifier.attention import NAME
from specpipe.verifier.smollm2 import DIRECTORY, cache_root, ensure_smollm2
from tests.stand_ins import sharpened, small
from tests.wrong_rules import TOKEN_RULES

RAGGED = [[5, 6, 7, 5, 6, 7, 5], [9], [11, 12, 11, 12]]
N = 20


def model_of(kind: str = "Llama", **config: Any) -> Any:
    return sharpened(small(kind, **config)).float()


def padded(prompts: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Rows of one width, as a tokenizer with padding_side='left' gives them."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def both(model: Any, custom: Any, prompts: list[list[int]] = RAGGED, **given: Any) -> tuple[Tensor, Tensor]:
    """What `generate` returns without and with the callable."""
    given = {"max_new_tokens": N, "do_sample": False, **given}
    plain = model.generate(**padded(prompts), **given)
    return plain, model.generate(**padded(prompts), custom_generate=custom, **given)


# ---- greedy: the same tokens ----


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT2", "Gemma2"])
@pytest.mark.parametrize("prompts", [RAGGED, RAGGED[:1]], ids=["batch", "one row"])
def test_greedy_tokens_are_those_of_generate(kind: str, prompts: list[list[int]]) -> None:
    custom = speculative(NgramProposer(max_ngram=2), num_speculative_tokens=4)
    plain, ours = both(model_of(kind), custom, prompts)
    assert torch.equal(plain, ours)
    assert custom.summary is not None
    assert custom.summary["spec_decode"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("proposer", "sampler"),
    [("none", "rejection"), ("suffix", "block"), ("cascade", "rejection"), (LayerSkip(layers=1), "block")],
)
def test_they_are_with_other_proposers_and_samplers(proposer: Any, sampler: str) -> None:
    custom = speculative(proposer, sampler=sampler, draft_length="adaptive", num_speculative_tokens=3)
    plain, ours = both(model_of(), custom)
    assert torch.equal(plain, ours)


def test_accepted_drafts_save_passes() -> None:
    custom = speculative("ngram")
    both(model_of(), custom, RAGGED[:1], max_new_tokens=40)
    assert custom.summary is not None
    assert custom.summary["tokens_per_target_pass"] > 1.2


def test_padding_that_was_read_as_text_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant of the test above: no row is stripped of its padding."""
    monkeypatch.setattr(transformers, "_prompts", lambda input_ids, model_kwargs: input_ids.tolist())
    plain, ours = both(model_of(), speculative("ngram"))
    assert not torch.equal(plain, ours)


@pytest.mark.parametrize("several", [False, True])
def test_rows_end_at_eos_and_are_padded_as_by_generate(several: bool) -> None:
    model = model_of()
    texts = model.generate(**padded(RAGGED), max_new_tokens=N, do_sample=False, eos_token_id=None)
    eos = [texts[0, -15].item(), texts[1, -4].item()]
    plain, ours = both(model, speculative("ngram"), eos_token_id=eos if several else eos[0], pad_token_id=60)
    assert (plain[:, -1] == 60).any()
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    "limits",
    [{"max_new_tokens": 1}, {"max_new_tokens": None, "max_length": 12}, {"min_new_tokens": 9}, {"min_length": 18}],
    ids=str,
)
def test_limits_are_those_of_generate(limits: dict[str, Any]) -> None:
    model = model_of()
    eos = model.generate(**padded(RAGGED), max_new_tokens=N, do_sample=False, eos_token_id=None)[:, -17].tolist()
    plain, ours = both(model, speculative("ngram"), eos_token_id=eos, **limits)
    assert torch.equal(plain, ours)


leaves_padding_alone = pytest.mark.skipif(
    Version(transformers_version) < Version("5.24"), reason="this transformers penalises padding, which is refused"
)


@pytest.mark.parametrize(
    "shaped",
    [
        pytest.param({"repetition_penalty": 1.7}, marks=leaves_padding_alone),
        {"suppress_tokens": list(range(20))},
        {"bad_words_ids": [[x] for x in range(25, 45)]},
        {"sequence_bias": [[[7], 6.0], [[30], -9.0]]},
        {"renormalize_logits": True},
    ],
    ids=str,
)
def test_what_shapes_the_logits_shapes_ours(shaped: dict[str, Any]) -> None:
    """In a batch with padding, which counts neither as prompt nor as output."""
    model = model_of()
    plain, ours = both(model, speculative("ngram"), **shaped)
    assert torch.equal(plain, ours)
    if "renormalize_logits" not in shaped:
        assert not torch.equal(plain, both(model, speculative("ngram"))[0])


# ---- sampled: the same law ----


THREE: dict[str, Any] = {"vocab_size": 3, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
PROMPT = [1, 0, 1]
GUESS = FixedProposer(lambda tokens, k: [(sum(tokens) + i) % 3 for i in range(k)])
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.5},
    "typical_p": {"typical_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "sequence_bias": {"sequence_bias": [[[0], 1.5]]},
    "suppress_tokens": {"suppress_tokens": [1]},
    "bad_words_ids": {"bad_words_ids": [[2]]},
    "min_length": {"eos_token_id": 2, "min_length": 4, "pad_token_id": 0},
    "all together": {
        "temperature": 1.3,
        "top_k": 2,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "sequence_bias": [[[0], 0.5]],
        "eos_token_id": 2,
        "min_length": 5,
        "pad_token_id": 0,
    },
}


def our_law(model: Any, custom: Any, monkeypatch: pytest.MonkeyPatch, n: int = 2, **given: Any) -> Law:
    """Of n new tokens: every decision inside the call explored."""

    def text(chance: Any) -> tuple[int, ...]:
        monkeypatch.setattr("specpipe.pipeline.Chance", lambda *_, **__: chance)
        with torch.random.fork_rng(devices=[]):
            ids = model.generate(**padded([PROMPT]), custom_generate=custom, max_new_tokens=n, **given)
        return tuple(ids[0, len(PROMPT) :].tolist())

    law: Law = {}
    for ids, mass in explore(text):
        law[ids] = law.get(ids, 0.0) + mass
    return law


def their_law(model: Any, n: int = 2, **given: Any) -> Law:
    """Of n new tokens, from the scores that `generate` draws each of them from."""
    law: Law = {(): 1.0}
    for _ in range(n):
        longer: Law = {}
        for ids, mass in law.items():
            if given.get("eos_token_id") in ids:
                longer[ids] = mass
                continue
            told = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
            scores = model.generate(**padded([[*PROMPT, *ids]]), **told, **given).scores[0][0]
            longer |= {(*ids, x): mass * p for x, p in enumerate(scores.softmax(-1).tolist()) if p > 0}
        law = longer
    return law


@pytest.fixture(scope="module")
def three() -> Any:
    """A model of three ids."""
    return model_of(**THREE)


@pytest.mark.parametrize("settings", SETTINGS)
def test_sampled_tokens_follow_the_law_of_generate(settings: str, three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact up to float32, which both compute in."""
    given = {"do_sample": True, **SETTINGS[settings]}
    ours = our_law(three, speculative(GUESS), monkeypatch, **given)
    assert largest_difference(ours, their_law(three, **given)) < 1e-5


@pytest.mark.parametrize("proposer", [GUESS, LayerSkip(layers=1)], ids=["fixed", "drawn"])
def test_so_they_do_behind_longer_drafts(proposer: Any, three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"do_sample": True, **SETTINGS["all together"]}
    ours = our_law(three, speculative(proposer), monkeypatch, n=3, **given)
    assert largest_difference(ours, their_law(three, n=3, **given)) < 1e-5


FORGOTTEN = {
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "typical_p": "TypicalLogitsWarper",
    "repetition_penalty": "RepetitionPenaltyLogitsProcessor",
    "sequence_bias": "SequenceBiasLogitsProcessor",
    "suppress_tokens": "SuppressTokensLogitsProcessor",
    "bad_words_ids": "NoBadWordsLogitsProcessor",
    "min_length": "MinLengthLogitsProcessor",
}


@pytest.mark.parametrize("settings", FORGOTTEN)
def test_a_processor_that_is_left_out_shows(settings: str, three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variants of the mapping."""
    kind = next(kind for kind in asked.READ if kind.__name__ == FORGOTTEN[settings])
    monkeypatch.setitem(asked.READ, kind, lambda processor, ends, rows: {})
    given = {"do_sample": True, **SETTINGS[settings]}
    ours = our_law(three, speculative(GUESS), monkeypatch, **given)
    assert largest_difference(ours, their_law(three, **given)) > 1e-3


def test_a_wrong_sampler_shows(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = speculative(GUESS, sampler=TOKEN_RULES["accept everything"])
    law = our_law(three, wrong, monkeypatch, do_sample=True)
    assert largest_difference(law, their_law(three, do_sample=True)) > 1e-3


def test_manual_seed_repeats_a_run_and_equal_rows_differ() -> None:
    model, custom = model_of(), speculative("ngram")

    def sample(seed: int) -> Tensor:
        torch.manual_seed(seed)
        given = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2, "eos_token_id": None}
        ids: Tensor = model.generate(**padded(RAGGED[:2]), custom_generate=custom, pad_token_id=0, **given)
        return ids

    once = sample(1)
    assert torch.equal(once, sample(1))
    assert not torch.equal(once, sample(2))
    assert once.shape[0] == 4
    assert not torch.equal(once[0], once[1])


def test_greedy_decoding_leaves_torchs_generator_alone() -> None:
    model = model_of()
    before = torch.random.get_rng_state()
    model.generate(**padded(RAGGED), custom_generate=speculative(), max_new_tokens=3, do_sample=False)
    assert torch.equal(before, torch.random.get_rng_state())


# ---- as generate returns and streams it ----


class Recorder(BaseStreamer):
    """Notes what it is given, and how many passes the model had made by then."""

    def __init__(self, passes: Callable[[], int] = lambda: 0) -> None:
        self.put_in: list[list[int]] = []
        self.at: list[int] = []
        self.ended = 0
        self._passes = passes

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.put_in.append(value.tolist())
        self.at.append(self._passes())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one row", "batch"])
def test_a_streamer_is_told_what_generate_tells_it(prompts: list[list[int]]) -> None:
    """Through the argument of `generate` itself, which does not hand it on."""
    model = model_of()
    eos = model.generate(**padded(prompts), max_new_tokens=N, do_sample=False, eos_token_id=None)[0, -12].item()
    given = {"max_new_tokens": N, "do_sample": False, "eos_token_id": eos}
    plain, ours = Recorder(), Recorder()
    model.generate(**padded(prompts), streamer=plain, **given)
    model.generate(**padded(prompts), streamer=ours, custom_generate=speculative("ngram"), **given)
    assert ours.put_in == plain.put_in
    assert ours.ended == plain.ended == 1


def test_tokens_are_streamed_as_they_are_accepted() -> None:
    model = model_of()
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    custom = speculative("ngram")
    model.generate(**padded(RAGGED[:1]), custom_generate=custom, max_new_tokens=2, do_sample=False)
    model.register_forward_hook(count)
    told = Recorder(lambda: passes)
    model.generate(**padded(RAGGED[:1]), custom_generate=custom, streamer=told, max_new_tokens=N, do_sample=False)
    assert told.at[:2] == [0, 1]  # the prompt before the first pass, a token behind it
    assert told.at[-1] == passes > 2


def test_a_dict_is_returned_when_it_is_asked_for() -> None:
    plain, ours = both(model_of(), speculative(), return_dict_in_generate=True)
    assert torch.equal(plain.sequences, ours.sequences)
    assert type(plain) is type(ours)


class AfterSum(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return input_ids.sum(-1) > 350


def test_criteria_of_the_users_own_end_a_row_where_they_end_it_in_generate() -> None:
    plain, ours = both(model_of(), speculative("ngram"), RAGGED[:1], stopping_criteria=[AfterSum()], eos_token_id=None)
    assert plain.shape[1] < len(RAGGED[0]) + N
    assert torch.equal(plain, ours)


def test_max_time_ends_a_row() -> None:
    given = {"max_time": 1e-9, "max_new_tokens": N, "do_sample": False}
    ids = model_of().generate(**padded(RAGGED[:1]), custom_generate=speculative("ngram"), **given)
    assert ids.shape[1] == len(RAGGED[0]) + 1


# ---- whose model it is ----


def test_the_model_is_left_as_it_is() -> None:
    model = small("Llama").float()
    names, attention = list(model.state_dict()), model.config._attn_implementation
    places = [weight.data_ptr() for weight in model.parameters()]
    both(model, speculative("ngram"))
    assert list(model.state_dict()) == names
    assert [weight.data_ptr() for weight in model.parameters()] == places
    assert model.config._attn_implementation == attention != NAME
    ids = padded(RAGGED[:1])["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prepared_layers_say_the_same(dtype: torch.dtype) -> None:
    """There is no program for float64."""
    model = model_of().to(dtype)
    plain, _ = both(model, speculative())
    custom = speculative("ngram", prepare=True)
    _, ours = both(model, custom)
    assert torch.equal(plain, ours)
    assert torch.equal(plain, both(model, custom)[1])
    kinds = {type(part).__name__ for part in model.modules()}
    assert "FusedLayer" in kinds
    assert ("PanelLinear" in kinds) == (dtype == torch.float32)


def test_a_callable_that_is_kept_follows_the_model() -> None:
    """Another model, another way of attending: what was made for the former is not used."""
    custom = speculative("ngram")
    for model in (model_of(), model_of("Qwen2")):
        assert torch.equal(*both(model, custom))
        model.set_attn_implementation("eager")
        assert torch.equal(*both(model, custom))


def test_changed_weights_are_the_models() -> None:
    model, custom = model_of(), speculative("ngram")
    first, _ = both(model, custom)
    for weight in model.parameters():
        weight.data *= 0.7
    plain, ours = both(model, custom)
    assert torch.equal(plain, ours)
    assert not torch.equal(first, ours)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return load("target=tiny", "target.device=cpu", "proposer=ngram", "generation.max_new_tokens=3", "seed=5")


def test_a_pipeline_object_decodes_for_its_own_target(pipeline: Any) -> None:
    """Its settings and seed are the call's; the streamer works as with any other."""
    model, custom, told = pipeline.verifier.target.model, pipelined(pipeline), Recorder()
    prompt = [list(b"ab ab ab")]
    plain = model.generate(**padded(prompt), max_new_tokens=N, do_sample=False)
    ours = model.generate(**padded(prompt), max_new_tokens=N, do_sample=False, custom_generate=custom, streamer=told)
    assert torch.equal(plain, ours)
    assert [token for value in told.put_in[1:] for token in value] == ours[0, len(prompt[0]) :].tolist()
    assert (pipeline.settings.max_new_tokens, pipeline.seed) == (3, 5)


def test_a_pipeline_for_another_model_is_refused(pipeline: Any) -> None:
    with pytest.raises(UserError, match="custom_generate: the pipeline is for another model"):
        both(model_of(), pipelined(pipeline))


# ---- what cannot be kept is refused ----


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


ONE = RAGGED[:1]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "custom_generate: .*beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "custom_generate: .*assisted generation"),
    "assistant": ({"assistant_model": "MODEL"}, "custom_generate: .*assisted generation"),
    "unknown processor": ({"logits_processor": [Unknown()]}, "logits_processor: Unknown has no equal"),
    "n-grams": ({"no_repeat_ngram_size": 2}, "logits_processor: NoRepeatNGramLogitsProcessor has no equal"),
    "forced eos": ({"forced_eos_token_id": 2}, "logits_processor: ForcedEOS"),
    "top_h": ({"do_sample": True, "top_h": 0.5}, "logits_processor: TopH"),
    "epsilon": ({"do_sample": True, "epsilon_cutoff": 0.01}, "logits_processor: Epsilon"),
    "allowed": ({"prefix_allowed_tokens_fn": lambda b, ids: [1, 2]}, "logits_processor: PrefixConstrained"),
    "bad words": ({"bad_words_ids": [[3, 4]]}, r"bad_words_ids: \[3, 4\] is more than one token"),
    "biased words": ({"sequence_bias": [[[3, 4], 1.0]]}, "sequence_bias: .* more than one token"),
    "twice": (
        {"do_sample": True, "temperature": 0.5, "logits_processor": [TemperatureLogitsWarper(0.7)], "top_k": 0},
        "logits_processor: TemperatureLogitsWarper stands where",
    ),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: "),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions: "),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation: 'static'"),
    "positions": ({"position_ids": torch.arange(1, 8)[None]}, "position_ids: does not count"),
    "holes": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}, "attention_mask: hides tokens"),
    "context": ({"max_new_tokens": 60}, "max_new_tokens: 60 tokens behind 7 do not fit .* 64"),
    "late eos": (
        {"stopping_criteria": [AfterSum()], "min_new_tokens": 3, "eos_token_id": 2},
        "stopping_criteria: AfterSum may end",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_one_line(case: str) -> None:
    model = model_of()
    given, said = REFUSED[case]
    given = {"max_new_tokens": 5, "do_sample": False, **given}
    given |= {"assistant_model": model} if "assistant_model" in given else {}
    with pytest.raises(UserError, match=said) as error:
        model.generate(**padded(ONE) | given, custom_generate=speculative("ngram"))
    assert "\n" not in str(error.value)


def test_a_cache_of_the_users_own_is_refused() -> None:
    from transformers import DynamicCache

    model = model_of()
    cache = DynamicCache(config=model.config)
    word = next(name for name in transformers.CACHES if name in inspect.signature(model.forward).parameters)
    with pytest.raises(UserError, match=f"{word}: is for passes"):
        model.generate(**padded(ONE), custom_generate=speculative(), max_new_tokens=2, **{word: cache})


def test_a_penalty_on_padding_is_refused() -> None:
    given = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3)], "max_new_tokens": 4}
    with pytest.raises(UserError, match="repetition_penalty: penalises padding"):
        model_of().generate(**padded(RAGGED), custom_generate=speculative(), **given)
    plain, ours = both(model_of(), speculative("ngram"), ONE, **given)
    assert torch.equal(plain, ours)


def test_criteria_of_the_users_own_are_refused_in_a_batch() -> None:
    with pytest.raises(UserError, match="stopping_criteria: AfterSum may look at all rows"):
        model_of().generate(
            **padded(RAGGED), custom_generate=speculative(), max_new_tokens=4, stopping_criteria=[AfterSum()]
        )


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(UserError, match="model: is in training mode"):
        model_of().train().generate(**padded(ONE), custom_generate=speculative(), max_new_tokens=4)


@pytest.mark.parametrize("proposer", ["table", "mlp", "distilled"])
def test_a_proposer_that_compares_tokenizers_asks_for_one(proposer: str) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        model_of().generate(**padded(ONE), custom_generate=speculative(proposer), max_new_tokens=4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"proposer": "ngrams"}, "proposer: no option 'ngrams'.*'ngram'"),
        ({"proposer": 3}, "proposer: int has no method 'propose'"),
        ({"sampler": "reject"}, "sampler: no option"),
        ({"prepare": 1}, "prepare: 1 is not true or false"),
    ],
    ids=str,
)
def test_a_wrong_part_is_refused_at_once(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        speculative(**given)


def test_parts_may_be_objects() -> None:
    custom = speculative(NgramProposer(), sampler=Rejection(), num_speculative_tokens=2)
    assert torch.equal(*both(model_of(), custom))


# ---- the default target ----


@pytest.mark.real
@pytest.mark.skipif(
    not (cache_root() / DIRECTORY).is_dir() and os.environ.get("CI") != "true",
    reason="the default target is not in the cache; `make demo` fetches it",
)
def test_the_default_target_says_the_same_with_trained_heads() -> None:
    """In a batch, padded by its own tokenizer, in float32."""
    folder = ensure_smollm2()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    said = ["Name three rivers.", "Repeat after me, twice: the quick brown fox jumps over the lazy dog."]
    chats = [[{"role": "user", "content": text}] for text in said]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    custom = speculative("mlp", num_speculative_tokens=3, tokenizer=tokenizer)
    ours = model.generate(**inputs, custom_generate=custom, max_new_tokens=24, do_sample=False)
    assert torch.equal(plain, ours)
    assert custom.summary is not None
    assert custom.summary["tokens_per_target_pass"] > 1.2
