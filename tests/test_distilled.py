"""A draft made of the target's layers: what is copied and what is shared, its folders, and the tokens it can say."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specpipe.audit.exact import explore
from specpipe.chance import Chance
from specpipe.errors import UserError
from specpipe.proposers import distilled, layer_skip
from specpipe.proposers.artifact import Card, in_eight_bits, multiplied_out, save_card
from specpipe.proposers.counts import vocabulary_hash
from specpipe.proposers.distilled import DistilledDraft, pruned, save_draft, save_trained_parts, trained_weights
from specpipe.proposers.draft import DraftModel
from specpipe.proposers.layer_skip import with_layers
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target
from tests.stand_ins import sharpened, small, uncached

V = 61
IDS = [0, 3, 18, 42, 60]
TEXT = [5, 9, 5, 9, 5, 3, 2, 8, 1, 7]
SAMPLE = {"temperature": 1.0}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 2},
    "Gemma2": {"head_dim": 8, **WINDOWS},
    "Gemma3Text": {"head_dim": 8, **WINDOWS},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0], "sliding_window": None, "use_sliding_window": False},
    "Phi": {},  # with a bias in its head
    "GPT2": {},
}


class Tokenizer:
    """Of V words, the first of them named `first`."""

    def __init__(self, first: str = "a") -> None:
        self.first = first

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.first if i == 0 else 'w'}{i}": i for i in range(V)}


@cache
def four_layers(kind: str = "Llama", **config: Any) -> Any:
    """In float32, the same object each time."""
    model = sharpened(small(kind, **{"num_hidden_layers": 4, **KINDS[kind], **config})).float()
    bias = model.get_output_embeddings().bias
    if bias is not None:
        bias.data = torch.linspace(-1, 1, V)
    return model


def target_of(model: Any, tokenizer: Any = None) -> Target:
    return Target(model, tokenizer or Tokenizer(), "toy", None)


def card(**said: Any) -> Card:
    usual: dict[str, Any] = {"kind": "distilled", "target": "toy", "hidden": 32}
    return Card(**{"vocabulary": vocabulary_hash(Tokenizer()), **usual, **said})


def bound(folder: Path, target: Target, dtype: str = "float32", **asked: Any) -> DistilledDraft:
    made = DistilledDraft(path=str(folder), dtype=dtype, **asked)
    made.bind(target)
    return made


def asked_for(tokens: list[int], chance: Any = None, **settings: Any) -> Sequence:
    return Sequence(tokens, GenerationSettings(**settings), chance=chance or Chance(0))


def law(made: DistilledDraft, tokens: list[int], **settings: Any) -> Tensor:
    """[V] q of the first draft."""
    q = made.propose([asked_for(tokens, **SAMPLE | settings)], [1]).probs
    assert q is not None
    return q[0, 0]


# ---- some layers as a model of their own ----


@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_are_the_target_and_some_are_the_model_that_skips_the_others(kind: str) -> None:
    model = four_layers(kind)
    assert torch.allclose(uncached(pruned(model, [0, 1, 2, 3]), TEXT), uncached(model, TEXT), atol=1e-5)
    for layers in ([1, 3], [0, 3], [2]):
        own = pruned(model, layers)
        assert torch.allclose(uncached(own, TEXT), uncached(with_layers(model, layers), TEXT), atol=1e-5)
        assert own.config.num_hidden_layers == len(layers)
        numbers = [part.layer_idx for part in own.modules() if hasattr(part, "q_proj") or hasattr(part, "c_attn")]
        assert numbers == list(range(len(layers)))


def test_layers_whose_kinds_the_config_does_not_tell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = four_layers("SmolLM3")
    monkeypatch.setattr(layer_skip, "PER_LAYER", ("layer_types",))
    with pytest.raises(UserError, match=r"^layers: layers \[2, 3\] of SmolLM3ForCausalLM do not make a model of their"):
        pruned(model, [2, 3])


@pytest.mark.parametrize("layers", [[], [1, 0], [0, 4], [0, 0], [-1]])
def test_layers_that_the_target_lacks_are_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match=r"^layers: "):
        pruned(four_layers(), layers)


def test_a_packed_model_cannot_be_trained() -> None:
    model = copy.deepcopy(four_layers())
    EagerVerifier(target_of(model))
    with pytest.raises(ValueError, match=r"^14 of its weights are not those of its config"):
        pruned(model, [0, 1])


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_embedding_and_head_are_the_targets_and_all_else_is_not(kind: str) -> None:
    """Of tied and untied models; a training step and a change of type leave the target as it is."""
    model = four_layers(kind)
    before, own = uncached(model, TEXT), pruned(model, [0, 2])
    for part in ("get_input_embeddings", "get_output_embeddings"):
        ours, theirs = getattr(own, part)().weight, getattr(model, part)().weight
        assert ours.data_ptr() == theirs.data_ptr()
        assert not ours.requires_grad
    theirs = {weight.data_ptr() for weight in model.parameters()}
    trained = [weight for weight in own.parameters() if weight.requires_grad]
    assert {id(weight) for weight in trained} == {
        id(dict(own.named_parameters())[name]) for name in trained_weights(own)
    }
    assert not any(weight.data_ptr() in theirs for weight in trained)
    own(input_ids=torch.tensor([TEXT])).logits.logsumexp(-1).sum().backward()
    torch.optim.SGD(own.parameters(), lr=1.0).step()
    assert not torch.allclose(uncached(own, TEXT), uncached(with_layers(model, [0, 2]), TEXT), atol=1e-2)
    own.double()
    assert torch.equal(uncached(model, TEXT), before)
    assert model.dtype == torch.float32


# ---- the folders ----


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma3Text", "Phi"])
def test_a_saved_draft_is_loaded_by_transformers_alone(kind: str, tmp_path: Path) -> None:
    own = pruned(four_layers(kind), [1, 2])
    save_draft(tmp_path, own, card(), torch.tensor(IDS))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    again, report = loaded
    assert not any(report.values())
    assert torch.equal(uncached(again, TEXT), uncached(own, TEXT))
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["vocab_size"] == V
    assert told["tie_word_embeddings"] == (kind not in ("Qwen2", "Phi"))
    assert told["dtype"] == told["torch_dtype"] == "float32"
    assert told["architectures"] == [type(own).__name__]
    if kind != "Gemma3Text":  # whose kinds of layers have thetas of their own
        assert told["rope_theta"] == told["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma3Text", "Phi"])
def test_trained_parts_and_the_targets_embedding_and_head_are_the_draft(
    kind: str, packed: bool, tmp_path: Path
) -> None:
    """In 8 bits: exactly the weights that those stand for, close to those that were saved."""
    model = four_layers(kind)
    own = pruned(model, [1, 2])
    save_trained_parts(tmp_path, own, card(), torch.arange(V))
    held = load_file(tmp_path / "model.safetensors")
    assert not any("embed_tokens" in name or name == "lm_head.weight" for name in held)
    target = target_of(model)
    if packed:
        target = target_of(copy.deepcopy(model))
        EagerVerifier(target)
    found = law(bound(tmp_path, target), TEXT)
    exact = uncached(own, TEXT)[-1].softmax(-1)
    own.load_state_dict(multiplied_out(in_eight_bits(trained_weights(own))), strict=False)
    rounded = uncached(own, TEXT)[-1].softmax(-1)
    assert torch.allclose(found, rounded, atol=1e-5)
    assert not torch.allclose(found, exact, atol=1e-5)
    assert (rounded - exact).abs().sum() < 0.5


@pytest.mark.parametrize("save", [save_draft, save_trained_parts])
def test_the_draft_and_the_target_have_one_embedding_in_memory(save: Callable[..., None], tmp_path: Path) -> None:
    model = four_layers("Qwen2")
    save(tmp_path, pruned(model, [1]), card(), torch.tensor(IDS))
    drafter = bound(tmp_path, target_of(model))._reader.model
    ours, theirs = drafter.get_input_embeddings().weight, model.get_input_embeddings().weight
    assert (ours.data_ptr() == theirs.data_ptr()) == (save is save_trained_parts)
    assert torch.equal(ours, theirs)


# ---- the tokens it can say ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("distilled")
    save_draft(made, pruned(four_layers(), [1, 2]), card(), torch.tensor(IDS))
    return made


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("parts")
    save_trained_parts(made, pruned(four_layers(), [1, 2]), card(), torch.tensor(IDS))
    return made


def kept_law(folder: Path, ids: list[int], temperature: float = 1.0) -> Tensor:
    """[V] softmax over the kept logits of the saved model, which is read without a cache."""
    logits = uncached(AutoModelForCausalLM.from_pretrained(folder), TEXT)[-1] / temperature
    return torch.zeros(V).scatter(0, torch.tensor(ids), logits[ids].softmax(-1))


@pytest.mark.parametrize("kind", ["Llama", "Phi", "Gemma2"])
def test_q_is_the_models_law_over_the_kept_ids_alone(kind: str, tmp_path: Path) -> None:
    save_draft(tmp_path, pruned(four_layers(kind), [1, 2]), card(), torch.tensor(IDS))
    for temperature in (1.0, 0.7):
        q = law(bound(tmp_path, target_of(four_layers(kind))), TEXT, temperature=temperature)
        assert torch.allclose(q, kept_law(tmp_path, IDS, temperature), atol=1e-5)
        assert q[IDS].sum().item() == pytest.approx(1, abs=1e-6)
        assert q.count_nonzero() == len(IDS)


def offsets(model: Any, ids: Tensor) -> Tensor:
    """As if what is stored were offsets from the row, as in EAGLE-3's `d2t`."""
    return (ids + torch.arange(len(ids))) % V


def permuted(model: Any, ids: Tensor) -> Tensor:
    return ids.flip(0)


@pytest.mark.parametrize("wrong", [offsets, permuted])
def test_ids_read_as_offsets_and_rows_in_another_order_would_be_seen(
    wrong: Callable[..., Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, wanted = distilled.keep_rows, kept_law(folder, IDS)
    assert torch.allclose(law(bound(folder, target_of(four_layers())), TEXT), wanted, atol=1e-5)
    monkeypatch.setattr(distilled, "keep_rows", lambda model, ids: plain(model, wrong(model, ids)))
    assert not torch.allclose(law(bound(folder, target_of(four_layers())), TEXT), wanted, atol=1e-2)


def test_the_head_has_the_kept_rows_in_memory_of_their_own(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    whole = model.get_output_embeddings().weight
    distilled.keep_rows(model, torch.tensor(IDS))
    head = model.get_output_embeddings().weight
    assert head.is_contiguous()
    assert head.untyped_storage().nbytes() == len(IDS) * 32 * 4
    assert torch.equal(head, whole[IDS])
    assert torch.equal(model.get_input_embeddings().weight, whole)


def test_drafts_and_the_text_before_them_are_in_the_targets_ids(folder: Path) -> None:
    """Every way to draft two tokens: kept ids, drawn from rows that follow what was drafted before."""
    made = bound(folder, target_of(four_layers()))
    whole = AutoModelForCausalLM.from_pretrained(folder)

    def drafted(chance: Any) -> tuple[list[int], float]:
        x, q = made.propose([asked_for(TEXT, chance, **SAMPLE)], [2]).row(0)
        assert q is not None
        return x, float(q[range(2), x].prod())

    ways = list(explore(drafted))
    assert len(ways) == len(IDS) ** 2
    for (x, said), mass in ways:
        assert set(x) <= set(IDS)
        assert said == pytest.approx(mass, abs=1e-6)
    for (x, said), _ in ways[::6]:
        rows = uncached(whole, [*TEXT, x[0]])[-2:, IDS].softmax(-1)
        assert said == pytest.approx(float(rows[range(2), [IDS.index(token) for token in x]].prod()), abs=1e-5)


@pytest.mark.parametrize("settings", [{}, SAMPLE, {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.5}])
def test_with_all_ids_it_is_the_draft_model_of_the_same_weights(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = four_layers()
    save_draft(tmp_path, pruned(model, [1, 2]), card(), torch.arange(V))
    loaded = target_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    monkeypatch.setattr("specpipe.proposers.draft.hf", lambda **asked: loaded)
    other = DraftModel(model="same", dtype="float32")
    other.bind(target_of(model))
    prompts, lengths = [TEXT, [4, 4], [9, 8, 7, 6]], [4, 0, 3]
    one, two = (
        each.propose([asked_for(prompt, **settings) for prompt in prompts], lengths)
        for each in (bound(tmp_path, target_of(model)), other)
    )
    assert one.lengths == two.lengths == lengths
    assert torch.equal(one.tokens, two.tokens)
    assert (one.probs is None) == (settings == {})
    assert one.probs is None or torch.equal(one.probs, two.probs)  # type: ignore[arg-type]


def test_a_request_that_bans_all_kept_ids_gets_no_draft(folder: Path) -> None:
    made = bound(folder, target_of(four_layers()))
    assert made.propose([asked_for(TEXT, **SAMPLE, banned_token_ids=IDS)], [3]).lengths == [0]


def test_its_layers_but_not_its_head_can_be_kept_in_eight_bits(folder: Path) -> None:
    target = target_of(copy.deepcopy(four_layers()).to(torch.bfloat16))
    made = bound(folder, target, "bfloat16", quantize="int8")
    kinds = [type(part).__name__ for part in made._reader.model.modules()]
    assert kinds.count("Int8Linear") == 8  # two layers of four products
    assert type(made._reader.model.get_output_embeddings()).__name__ != "Int8Linear"
    exact = law(bound(folder, target, "bfloat16"), TEXT)
    assert 0 < (law(made, TEXT) - exact).abs().sum() < 0.2


# ---- refusals ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": 3},
        {"dtype": "int8"},
        {"draw": "best"},
        {"min_confidence": 2},
        {"quantize": "int4"},
        {"quantize": "int8", "dtype": "float32"},
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}: "):
        DistilledDraft(**{"path": str(folder)} | wrong)


def test_eight_bits_are_refused_on_another_device(folder: Path) -> None:
    target: Any = SimpleNamespace(model=torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(UserError, match=r"^quantize: int8 weights work on a CPU, and the target is on meta"):
        DistilledDraft(path=str(folder), quantize="int8").bind(target)


def test_a_folder_without_a_draft_is_named_with_the_way_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"^path: there is no trained draft .*nowhere'; `python -m train student=dist"):
        DistilledDraft(path=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"^path: there is no trained draft .*it has no draft.json"):
        DistilledDraft(path=str(tmp_path))
    monkeypatch.setattr(distilled, "SHIPPED", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"^path: there is no trained draft .*nowhere'; `python -m train student=dist"):
        DistilledDraft()


def test_another_kind_of_draft_is_refused(tmp_path: Path) -> None:
    save_card(tmp_path, card(kind="mlp"), torch.tensor(IDS))
    with pytest.raises(UserError, match=r"^path: .* holds a mlp draft, not distilled"):
        DistilledDraft(path=str(tmp_path))


FIX = r"`python -m train student=distilled target=...` trains one for it\.$"


def test_another_vocabulary_is_refused(folder: Path) -> None:
    """Other tokens, though as many; and more rows of the embedding for the same tokens."""
    larger = four_layers(vocab_size=64)
    for target in (target_of(four_layers(), Tokenizer("b")), target_of(larger)):
        with pytest.raises(UserError, match=r"^path: .* was trained for toy, and toy has another vocabulary; " + FIX):
            bound(folder, target)


def test_another_hidden_size_is_refused_where_the_targets_embedding_is_needed(folder: Path, parts: Path) -> None:
    wide = four_layers(hidden_size=64)
    with pytest.raises(UserError, match=r"another hidden size \(64, not 32\); " + FIX):
        bound(parts, target_of(wide))
    assert torch.allclose(law(bound(folder, target_of(wide)), TEXT), kept_law(folder, IDS), atol=1e-5)


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def torn_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def of_nothing(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "none"}')


def fewer_layers(folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"num_hidden_layers": 1}))


def more_layers(folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"num_hidden_layers": 3}))


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(5)}, folder / "model.safetensors", {"format": "pt"})


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])


def ids_beyond(folder: Path) -> None:
    save_card(folder, card(), torch.tensor([0, V]))


def ids_twice(folder: Path) -> None:
    save_card(folder, card(), torch.tensor([3, 3]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_config, "is damaged: it has no config.json"),
        (torn_config, "is damaged: config.json: "),
        (of_nothing, "is damaged: config.json: "),
        (fewer_layers, r"is damaged: 9 of its weights are not those of its config.json, model.layers.1"),
        (more_layers, r"is damaged: 9 of its weights are not those of its config.json, model.layers.2"),
        (other_shapes, "is damaged: "),
        (no_weights, "cannot be read: "),
        (torn_weights, "cannot be read: "),
        (ids_beyond, "is damaged: it keeps id 61, and its ids end at 60"),
        (ids_twice, "is damaged: its kept ids are not ascending"),
    ],
)
@pytest.mark.parametrize("form", ["folder", "parts"])
def test_a_damaged_folder_is_named_in_one_line(
    form: str, damage: Callable[[Path], None], said: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The directory that stands by itself and the trained parts."""
    shutil.copytree(request.getfixturevalue(form), tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(UserError, match=rf"^path: .*{said}") as caught:
        bound(tmp_path, target_of(four_layers()))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
