"""Artefacts: their names and tensors, that they are the proposer they were made from, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specpipe.errors import UserError
from specpipe.export import causal_lm, heads, texts
from specpipe.export.card import Subject
from specpipe.export.causal_lm import CausalLmExport, export_distilled, export_draft
from specpipe.export.check import NotTheSame, compare
from specpipe.export.heads import HeadsExport, MedusaExport, MlpSpeculatorExport
from specpipe.export.texts import read, texts_of
from specpipe.export.trimming import FLOOR, of_kept_ids, penalty_row, settled_head, tokenizer_of_kept_ids, with_rows
from specpipe.formats import load_heads
from specpipe.formats.checkpoint import save_files
from specpipe.prompts import Prompts
from specpipe.proposers.artifact import Card
from specpipe.proposers.counts import vocabulary_hash
from specpipe.proposers.distilled import DistilledDraft, pruned, save_draft, save_model
from specpipe.proposers.draft import DraftModel
from specpipe.proposers.mlp import HeadsProposer
from specpipe.verifier.targets import Target, tiny
from tests.command_line import Run
from tests.stand_ins import random_heads, saved_heads, saved_tiny, small, uncached

V, H, END = 257, 64, 256  # of the target `tiny`: ids, size of states, end-of-text id
IDS = [*range(3, 200, 2), END]
TEXT = [5, 9, 101, 9, 5, 3, 17, 8, 1, 7]
PROMPTS = Prompts(["Name a river.", "and one more", "x = 1", "What is it?"])
TRAINING = {
    "command": "python -m train student=distilled",
    "git": "abc123",
    "figures": {"alpha": 0.25, "tau": 1.5, "tau_T1": 1.375},
    "data": {"temperatures": [0.0, 1.0], "train_generated": 1234},
}
LAYER = ("input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LAYER = (*LAYER, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LLAMA = {f"model.layers.0.{name}.weight" for name in LAYER} | {"model.embed_tokens.weight", "model.norm.weight"}


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "demo", lambda: PROMPTS)


def saved_draft(folder: Path, ids: list[int] = IDS, *, scattered: bool = False) -> Path:
    """A draft of the first layer of `tiny`; its states have much in common, unless they are scattered."""
    target = tiny(device="cpu")
    model = copy.deepcopy(target.model)
    shared = torch.full((V, 1), 20.0 if scattered else 1.0)
    shared[::2] *= -1 if scattered else 1
    model.get_input_embeddings().weight.data += shared
    card = Card("distilled", "tiny", vocabulary_hash(target.tokenizer), H, training=TRAINING)
    save_draft(folder, pruned(model, [0]), card, torch.tensor(ids))
    return folder


def distilled(folder: Path, form: str = "vllm", head: str | None = None, draw: str = "sample") -> CausalLmExport:
    made = DistilledDraft(path=str(folder), dtype="float32")
    return export_distilled(made, tiny(device="cpu"), form, head=head, draw=draw)


def trained(kind: str, folder: Path, ids: list[int] | None = None) -> HeadsProposer:
    return HeadsProposer(path=str(saved_heads(folder, random_heads(kind, H), tiny(device="cpu"), ids)))


def heads_export(kind: str, folder: Path, ids: list[int] | None = None, head: str | None = None) -> HeadsExport:
    proposer, target = trained(kind, folder / "heads", ids), tiny(device="cpu")
    if kind == "medusa":
        return MedusaExport(proposer.heads, target, head)
    return MlpSpeculatorExport(proposer.heads, target, head, flavour="arctic", base="some/target")


def written(export: Any, folder: Path) -> Path:
    folder.mkdir()
    export.write(folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Write the weights of a folder anew, otherwise."""
    held = tensors(folder)
    change(held)
    save_file({name: tensor.clone() for name, tensor in held.items()}, folder / "model.safetensors", {"format": "pt"})


# ---- a draft model whose head was trimmed ----


def own_law(folder: Path) -> Tensor:
    """[V] of the trained draft behind TEXT: its softmax over the kept ids alone."""
    kept = uncached(AutoModelForCausalLM.from_pretrained(folder), TEXT)[-1][IDS]
    return torch.zeros(V).scatter(0, torch.tensor(IDS), kept.softmax(-1))


def test_penalty_rows_give_the_trained_law_and_exactly_nothing_elsewhere(tmp_path: Path) -> None:
    draft = saved_draft(tmp_path / "draft")
    export = distilled(draft)
    made = written(export, tmp_path / "made")
    law = uncached(AutoModelForCausalLM.from_pretrained(made), TEXT)[-1].softmax(-1)
    assert torch.allclose(law, own_law(draft), atol=1e-6)
    assert law.count_nonzero() == len(IDS)
    check = export.check(made)
    check.demand()
    assert (check.outside, check.strays, check.same_law) == (0.0, 0, True)
    assert check.difference < 1e-5
    assert check.places == 2 * (texts.ANSWER + 1)


def test_a_penalised_draft_has_these_names_and_this_config(tmp_path: Path) -> None:
    made = written(distilled(saved_draft(tmp_path / "draft")), tmp_path / "made")
    held = tensors(made)
    assert set(held) == LLAMA | {"lm_head.weight"}
    assert held["lm_head.weight"].shape == held["model.embed_tokens.weight"].shape == (V, H)
    told = config(made)
    assert told["architectures"] == ["LlamaForCausalLM"]
    assert (told["vocab_size"], told["num_hidden_layers"], told["tie_word_embeddings"]) == (V, 1, False)
    assert told["dtype"] == told["torch_dtype"] == "float32"
    assert told["rope_theta"] == told["rope_parameters"]["rope_theta"]
    assert {file.name for file in made.iterdir()} >= {"model.safetensors", "tokenizer.json", "generation_config.json"}
    assert json.loads((made / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(made).get_vocab() == tiny(device="cpu").tokenizer.get_vocab()


@pytest.mark.parametrize("kind", ["Llama", "Phi"])
def test_a_tied_head_and_a_bias_become_rows_of_their_own(kind: str) -> None:
    model = small(kind, **({"tie_word_embeddings": True} if kind == "Llama" else {})).float()
    ids, row = torch.tensor([0, 3, 60]), torch.full((32,), -9.0)
    made = with_rows(model, ids, row)
    head, before = made.get_output_embeddings(), model.get_output_embeddings()
    assert not made.config.tie_word_embeddings
    assert torch.equal(head.weight[ids], before.weight[ids])
    assert torch.equal(made.get_input_embeddings().weight, model.get_input_embeddings().weight)
    others = torch.ones(61, dtype=torch.bool).index_fill(0, ids, False)
    assert (head.weight[others] == -9.0).all()
    if kind == "Phi":
        assert head.bias[others].count_nonzero() == 0
        assert torch.equal(head.bias[ids], before.bias[ids])


def test_the_penalty_row_puts_all_states_at_the_floor_or_below() -> None:
    torch.manual_seed(0)
    states = torch.randn(50, 8) + 3
    logits = states @ penalty_row(states)
    assert logits.max().item() == pytest.approx(-FLOOR, rel=1e-5)
    with pytest.raises(UserError, match=r"^head: penalty needs a direction .* zero keeps greedy drafts\.$"):
        penalty_row(torch.cat([states, -states[:1]]))


def test_zero_rows_keep_greedy_drafts_and_say_so(tmp_path: Path) -> None:
    export = distilled(saved_draft(tmp_path / "draft"), head="zero")
    made = written(export, tmp_path / "made")
    rows = tensors(made)["lm_head.weight"]
    assert rows.abs().sum(1).count_nonzero() == len(IDS)
    check = export.check(made)
    check.demand()
    assert (check.strays, check.same_law) == (0, False)
    assert check.outside > 0
    assert export.serving.keys["draft_sample_method"] == "greedy"
    assert any("greedy drafts only" in line for line in export.loaded_by)


def test_zero_rows_where_the_law_is_promised_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "penalty_row", lambda states: torch.zeros(H))
    export = distilled(saved_draft(tmp_path / "draft"))
    with pytest.raises(NotTheSame, match="drafts ids that the proposer cannot say"):
        export.check(written(export, tmp_path / "made")).demand()


@pytest.mark.parametrize("wrong", ["full", "shifted", "missing"])
def test_other_rows_are_found_out(wrong: str, tmp_path: Path) -> None:
    export = distilled(saved_draft(tmp_path / "draft"))
    made = written(export, tmp_path / "made")

    def change(held: dict[str, Tensor]) -> None:
        if wrong == "full":
            held["lm_head.weight"] = tiny(device="cpu").head_weight
        elif wrong == "shifted":
            held["lm_head.weight"] = held["lm_head.weight"].roll(1, 0)
        else:
            del held["model.norm.weight"]

    changed(made, change)
    with pytest.raises(NotTheSame):
        export.check(made).demand()


def test_a_small_draft_knows_its_ids_alone_by_numbers_of_its_own(tmp_path: Path) -> None:
    draft = saved_draft(tmp_path / "draft")
    export = distilled(draft, head="small")
    made = written(export, tmp_path / "made")
    export.check(made).demand()
    held = tensors(made)
    assert set(held) == LLAMA | {"lm_head.weight"}
    assert held["model.embed_tokens.weight"].shape == (len(IDS), H)
    told = config(made)
    assert (told["vocab_size"], told["eos_token_id"]) == (len(IDS), IDS.index(END))
    assert export.serving.keys["use_heterogeneous_vocab"] is True
    assert export.serving.keys["draft_sample_method"] == "greedy"
    theirs, ours = AutoTokenizer.from_pretrained(made), tiny(device="cpu").tokenizer
    assert theirs.convert_ids_to_tokens(range(len(IDS))) == ours.convert_ids_to_tokens(IDS)
    assert theirs.eos_token == ours.eos_token
    assert "added_tokens_decoder" not in json.loads((made / "tokenizer_config.json").read_text())
    readable = [id_ for id_ in TEXT if id_ in IDS]
    small_logits = uncached(AutoModelForCausalLM.from_pretrained(made), [IDS.index(i) for i in readable])
    assert torch.allclose(small_logits, uncached(AutoModelForCausalLM.from_pretrained(draft), readable)[:, IDS])


def test_a_tied_model_stays_tied_when_it_is_cut() -> None:
    model = small("Llama", tie_word_embeddings=True).float()
    made = of_kept_ids(model, torch.tensor([1, 2, 40]))
    assert made.get_input_embeddings().weight is made.get_output_embeddings().weight
    assert (made.config.bos_token_id, made.config.eos_token_id, made.config.pad_token_id) == (0, 1, None)


def test_merges_survive_with_their_parts_and_result() -> None:
    tokenizer = merging_tokenizer()
    size = len(tokenizer)
    named = tokenizer.get_vocab()
    kept = torch.tensor([i for i in range(size) if i != named["abc"]])
    cut = tokenizer_of_kept_ids(tokenizer, kept)
    assert cut.tokenize("abcab") == ["ab", "c", "ab"]
    without_part = torch.tensor([i for i in range(size) if i != named["ab"]])
    assert tokenizer_of_kept_ids(tokenizer, without_part).tokenize("abcab") == ["a", "b", "c", "a", "b"]
    assert cut("a")["input_ids"] == [cut.get_vocab()["<s>"], cut.get_vocab()["a"]]
    with pytest.raises(UserError, match="head: small: the tokenizer puts '<s>' into every text"):
        tokenizer_of_kept_ids(tokenizer, torch.tensor([i for i in range(size) if i != named["<s>"]]))


def merging_tokenizer() -> Any:
    """Of three letters and two merges; it puts <s> in front."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: i for i, piece in enumerate(["<s>", "z", "a", "b", "c", "ab", "abc"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")]))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def test_a_small_draft_must_be_able_to_read_what_stands_for_the_rest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"head: small has engines read .* cannot say that one \(256\)"):
        distilled(saved_draft(tmp_path / "draft", IDS[:-1]), head="small")


def test_a_draft_of_all_ids_is_written_as_it_is(tmp_path: Path) -> None:
    draft = saved_draft(tmp_path / "draft", list(range(V)))
    export = distilled(draft)
    made = written(export, tmp_path / "made")
    export.check(made).demand()
    assert export.head is None
    assert export.serving.keys == {"method": "draft_model", "draft_sample_method": "probabilistic"}
    before, after = tensors(draft), tensors(made)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert distilled(draft, head="full", draw="argmax").serving.keys["draft_sample_method"] == "greedy"


@pytest.mark.parametrize(
    ("asked", "trimmed", "message"),
    [
        ("full", True, r"head: full makes another draft .* there is penalty, zero\."),
        ("small", True, r"head: small does not go with this draft and format; there is penalty, zero\."),
        ("penalty", False, r"head: penalty is for a draft that says some ids alone"),
        ("penalti", True, r"head: 'penalti' is not one of .* Did you mean 'penalty'\?"),
    ],
)
def test_heads_that_the_draft_cannot_have_are_refused(asked: str, trimmed: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settled_head(asked, trimmed=trimmed, able=("penalty", "zero"))
    assert settled_head(None, trimmed=True, able=("penalty", "zero")) == "penalty"


def test_a_comparison_finds_each_kind_of_fault() -> None:
    own, ids = torch.tensor([[2.0, 1.0], [0.5, 3.0]]), torch.tensor([0, 2])
    right = torch.tensor([[2.0, -300.0, 1.0], [0.5, -300.0, 3.0]])
    compare(own, right, ids, allowed=1e-6, same_law=True).demand()
    leaking = right.clone()
    leaking[0, 1] = -50.0
    compare(own, leaking, ids, allowed=1e-6, same_law=False).demand()
    stray, broken = right.clone(), right.clone()
    stray[1, 1], broken[1, 0] = 4.0, torch.nan
    for wrong, same_law in (
        (leaking, True),
        (right + 0.1, False),
        (right.flip(1), False),
        (stray, False),
        (broken, False),
    ):
        with pytest.raises(NotTheSame):
            compare(own, wrong, ids, allowed=1e-6, same_law=same_law).demand()


# ---- any draft model ----


def drafted(folder: Path, form: str = "vllm", target: Target | None = None, **keys: Any) -> CausalLmExport:
    made = DraftModel(model=str(folder), dtype="float32")
    return export_draft(made, target or tiny(device="cpu"), form, **{"head": None, "draw": "sample", **keys})


@pytest.mark.parametrize("form", ["hf", "vllm"])
def test_a_draft_model_is_copied(form: str, tmp_path: Path) -> None:
    source = saved_tiny(tmp_path / "source")
    export = drafted(source, form)
    made = written(export, tmp_path / "made")
    check = export.check(made)
    check.demand()
    assert check.difference == 0.0
    before, after = tensors(source), tensors(made)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert str(tmp_path) not in "".join(file.read_text() for file in made.glob("*.json"))
    with pytest.raises(UserError, match="head: penalty is for a draft that says some ids alone"):
        drafted(source, form, head="penalty")


def test_both_spellings_of_rope_and_dtype_are_written(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    model = small("Llama", rope_parameters=rope).float()
    save_model(tmp_path, model)
    told = config(tmp_path)
    assert told["rope_parameters"] == rope
    assert told["rope_theta"] == 5000.0
    assert told["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert told["dtype"] == told["torch_dtype"] == "float32"
    assert torch.equal(uncached(AutoModelForCausalLM.from_pretrained(tmp_path), TEXT[:2]), uncached(model, TEXT[:2]))


def test_a_draft_of_other_tokens_is_served_through_translation(tmp_path: Path) -> None:
    source = saved_tiny(tmp_path / "source")
    names = json.loads((source / "tokenizer.json").read_text())
    for piece, other in (("a", "b"), ("b", "a")):
        names["model"]["vocab"][piece] = tiny(device="cpu").tokenizer.get_vocab()[other]
    (source / "tokenizer.json").write_text(json.dumps(names))
    with pytest.warns(UserWarning, match="another tokenizer"):
        export = drafted(source)
    assert export.serving.keys["use_heterogeneous_vocab"] is True
    assert export.serving.keys["draft_sample_method"] == "greedy"


def test_a_draft_of_more_ids_is_for_transformers_alone(tmp_path: Path) -> None:
    source = saved_tiny(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(V + 7)
    model.save_pretrained(source)
    with pytest.raises(UserError, match=r"format: vLLM wants a draft of the target's 257 ids, and source has 264"):
        drafted(source)
    export = drafted(source, "hf")
    export.check(written(export, tmp_path / "made")).demand()
    assert export.serving.keys is None


# ---- heads ----

MEDUSA = {
    "model_type": "medusa",
    "architectures": ["MedusaModel"],
    "hidden_size": H,
    "vocab_size": V,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "original_lm_head": True,
    "medusa_fc_bias": False,
    "truncated_vocab_size": V,
}
SPECULATOR = {
    "architectures": ["ArcticMLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "vocab_size": V,
    "emb_dim": H,
    "inner_dim": H,
    "n_predict": 3,
    "top_k_tokens_per_head": [1, 1, 1],
    "n_candidates": 3,
    "tie_weights": True,
    "scale_input": True,
    "base_model_name_or_path": "some/target",
    "base_model_archs": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
}
SPECULATOR_SHAPES = {"emb": (V, H), "proj": (H, H), "head": (V, H), "ln": (H,)}


def test_medusa_heads_have_these_names_and_this_config(tmp_path: Path) -> None:
    made = written(heads_export("medusa", tmp_path), tmp_path / "made")
    held = tensors(made)
    assert set(held) == {f"blocks.{i}.layers.0.weight" for i in range(3)} | {"lm_heads.0.weight"}
    assert held["blocks.2.layers.0.weight"].shape == (H, H)
    assert torch.equal(held["lm_heads.0.weight"], tiny(device="cpu").head_weight)
    assert config(made) == MEDUSA


def test_an_mlp_speculator_has_these_names_and_this_config(tmp_path: Path) -> None:
    made = written(heads_export("mlp", tmp_path), tmp_path / "made")
    held = tensors(made)
    names = [f"speculator.{part}.{i}.weight" for part in SPECULATOR_SHAPES for i in range(3)]
    assert set(held) == {*names, *(f"speculator.ln.{i}.bias" for i in range(3))}
    assert all(tuple(held[name].shape) == SPECULATOR_SHAPES[name.split(".")[1]] for name in names)
    for part in ("emb", "head", "ln"):
        assert torch.equal(held[f"speculator.{part}.0.weight"], held[f"speculator.{part}.2.weight"])
    assert torch.equal(held["speculator.proj.1.weight"], held["speculator.proj.2.weight"])
    assert not torch.equal(held["speculator.proj.0.weight"], held["speculator.proj.1.weight"])
    assert config(made) == SPECULATOR


@pytest.mark.parametrize("kind", ["medusa", "mlp"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_heads_loaded_back_guess_as_the_proposer_does(kind: str, ids: list[int] | None, tmp_path: Path) -> None:
    """Zero rows where the states of a random target have no direction in common."""
    head = None if ids is None else "penalty" if kind == "mlp" else "zero"
    export = heads_export(kind, tmp_path, ids, head)
    made = written(export, tmp_path / "made")
    check = export.check(made)
    assert check.difference < 1e-5
    assert check.places == 2 * 3 * (texts.ANSWER + 1)
    if head != "zero":
        check.demand()
        assert check.outside == 0.0
    assert export.serving.gamma(9) == export.serving.gamma(None) == 3


def test_the_formulas_of_a_file_are_the_proposers_drafts(tmp_path: Path) -> None:
    """Greedy drafts of the proposer itself, from the states that it finds for itself."""
    from specpipe.chance import Chance
    from specpipe.sequence import Sequence
    from specpipe.settings import GenerationSettings

    for kind in ("medusa", "mlp"):
        made = written(heads_export(kind, tmp_path / kind), tmp_path / kind / "made")
        proposer, target = trained(kind, tmp_path / kind / "again"), tiny(device="cpu")
        proposer.bind(target)
        drafts, _ = proposer.propose([Sequence(TEXT, GenerationSettings(), chance=Chance(0))], [3]).row(0)
        states, _ = read(target.model, texts.Text(TEXT, len(TEXT) - 2))
        tokens = torch.tensor([[TEXT[-1], *drafts[:2]]])
        again = load_heads(made).to(torch.device("cpu"), torch.float32)
        assert again.logits(states[:1], tokens)[0].argmax(-1).tolist() == drafts


def scaled(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        for each in held:
            if name in each:
                held[each] = held[each] * factor

    return change


def swapped(a: str, *b: str) -> Callable[[dict[str, Tensor]], None]:
    """`a` in the place of each of `b`, which are the same, and that in its place."""

    def change(held: dict[str, Tensor]) -> None:
        held.update({a: held[b[0]]} | dict.fromkeys(b, held[a]))

    return change


WRONG_HEADS = {
    "a head's block in another's place": ("medusa", swapped("blocks.0.layers.0.weight", "blocks.1.layers.0.weight")),
    "rows that are shifted": (
        "medusa",
        lambda held: held.update({"lm_heads.0.weight": held["lm_heads.0.weight"].roll(1, 0)}),
    ),
    "a and b left out": ("mlp", scaled("emb.", 0.5 ** (0.5 / 3) / (0.5 * (1 - 0.5 ** (1 / 3)) * H) ** 0.5)),
    "the projection of the first head later": ("mlp", swapped(*(f"speculator.proj.{i}.weight" for i in range(3)))),
    "a norm without its bias": ("mlp", scaled("bias", 0.0)),
}


@pytest.mark.parametrize("wrong", WRONG_HEADS)
def test_wrong_heads_are_found_out(wrong: str, tmp_path: Path) -> None:
    kind, change = WRONG_HEADS[wrong]
    export = heads_export(kind, tmp_path)
    made = written(export, tmp_path / "made")
    export.check(made).demand()
    changed(made, change)
    with pytest.raises(NotTheSame, match="its logits are off by"):
        export.check(made).demand()


def test_a_copy_that_differs_is_found_out(tmp_path: Path) -> None:
    export = heads_export("mlp", tmp_path)
    made = written(export, tmp_path / "made")
    changed(made, scaled("head.2.", 0.5))
    with pytest.raises(NotTheSame, match=r"cannot be loaded back: .*head\.2\.weight is not head\.0\.weight, though"):
        export.check(made)


def test_texts_are_the_same_each_time_and_fit_the_context() -> None:
    (fitting, checking), again = texts_of(tiny(device="cpu")), texts_of(tiny(device="cpu"))
    assert (fitting, checking) == again
    assert [len(text.answer) for text in (*fitting, *checking)] == [texts.ANSWER] * 4
    target = tiny(device="cpu")
    target.context = texts.ANSWER + 3
    assert max(len(text.ids) for half in texts_of(target) for text in half) == texts.ANSWER + 3


# ---- the command ----

TINY = ("target=tiny", "target.device=cpu", "hydra.run.dir=run")
DISTILLED = ("proposer=distilled", "proposer.path=draft", "proposer.dtype=float32")


def result() -> dict[str, Any]:
    return json.loads(Path("run", "result.json").read_text())


def test_a_draft_comes_with_its_card_its_config_and_its_command(specpipe: Run) -> None:
    saved_draft(Path("draft"))
    ran = specpipe("export", *TINY, *DISTILLED, "proposer.copy_bias=[2.0]", "format=vllm", "out=made")
    assert ran.code == 0, ran.err
    assert "note: copy_bias=[2.0] is not in it" in ran.err
    told = {
        "method": "draft_model",
        "model": "made",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert json.loads(Path("made", "speculative_config.json").read_text()) == told
    assert shlex.split(ran.out) == ["vllm", "serve", "tiny", "--speculative-config", json.dumps(told)]
    page = Path("made", "README.md").read_text()
    for part in (
        ran.out.strip(),
        json.dumps(told),
        "python -m train student=distilled",
        "| alpha, at temperature 1 | 0.250 |",
        "| tokens per target pass, greedy | 1.500 |",
        "| train_generated | 1234 |",
        "specpipe export target=tiny",
        "licence of the target: not known here",
        "head: penalty.",
        "- copy_bias=[2.0] is not in it: ",
        "vLLM: `draft_model`",
    ):
        assert part in page, part
    found = result()
    assert (found["command"], found["format"], found["head"], found["proposer"]) == (
        "export",
        "vllm",
        "penalty",
        "distilled",
    )
    assert found["artifact"] == str(Path("made").resolve())
    assert found["speculative_config"] == told
    assert found["check"]["outside"] == 0.0
    assert found["summary"]["files"] == len(found["files"]) == len(list(Path("made").iterdir()))
    for file in found["files"]:
        content = Path("made", file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_transformers_gets_its_lines_of_code(specpipe: Run) -> None:
    saved_draft(Path("draft"))
    ran = specpipe("export", *TINY, *DISTILLED, "format=hf", "out=a/b/made")
    assert ran.code == 0, ran.err
    page = Path("a/b/made/README.md").read_text()
    assert "AutoModelForCausalLM.from_pretrained('a/b/made')" in page
    assert "generate(**tokens, assistant_model=draft)" in page


@pytest.mark.parametrize(
    ("kind", "words", "line"),
    [
        ("medusa", ["format=medusa"], '"method": "medusa", "model": "made", "num_speculative_tokens": 3'),
        ("mlp", ["format=mlp_speculator", "flavour=arctic"], '"method": "arctic", "model": "made"'),
        ("mlp", ["format=mlp_speculator", "flavour=tgi"], "text-generation-launcher --model-id made --speculate 3"),
    ],
)
def test_heads_come_with_the_command_of_their_engine(specpipe: Run, kind: str, words: list[str], line: str) -> None:
    trained(kind, Path("heads"))
    ran = specpipe("export", *TINY, "proposer=mlp", "proposer.path=heads", *words, "out=made")
    assert ran.code == 0, ran.err
    assert line in ran.out
    assert line in Path("made", "README.md").read_text()
    assert Path("made", "speculative_config.json").exists() == ("tgi" not in words[-1])
    names = {"flavour=arctic": "ArcticMLPSpeculatorPreTrainedModel", "flavour=tgi": "MLPSpeculatorPreTrainedModel"}
    assert config(Path("made"))["architectures"] == [names.get(words[-1], "MedusaModel")]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["proposer=ngram", "proposer.max_ngram=4"],
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        ),
        (
            ["proposer=suffix"],
            {
                "method": "suffix",
                "num_speculative_tokens": 24,
                "suffix_decoding_max_tree_depth": 24,
                "suffix_decoding_max_cached_requests": 10000,
                "suffix_decoding_max_spec_factor": 1.0,
                "suffix_decoding_min_token_prob": 0.1,
            },
        ),
    ],
)
def test_vllms_own_methods_need_a_config_and_no_target(specpipe: Run, words: list[str], told: dict[str, Any]) -> None:
    ran = specpipe(
        "export", "hydra.run.dir=run", "target=hf", "target.model=some/model", *words, "format=vllm", "out=made"
    )
    assert ran.code == 0, ran.err
    assert json.loads(Path("made", "speculative_config.json").read_text()) == told
    assert {file.name for file in Path("made").iterdir()} == {"README.md", "speculative_config.json"}
    assert ran.out.startswith("vllm serve some/model ")
    assert result()["check"] is None


def test_without_a_place_it_lies_in_the_run_folder(specpipe: Run) -> None:
    ran = specpipe("export", *TINY, "proposer=suffix", "proposer.max_cached_tokens=0", "format=vllm")
    assert ran.code == 0, ran.err
    told = json.loads(Path("run", "artifact", "speculative_config.json").read_text())
    assert told["suffix_decoding_max_cached_requests"] == 0


REFUSED = {
    "format=null": "format: has no value, and needs one: hf, vllm, medusa, mlp_speculator.",
    "format=vlm": "format: 'vlm' is not one of hf, vllm, medusa, mlp_speculator. Did you mean 'vllm'?",
    "format=medusa": "format: DistilledDraft does not go into medusa: it is a causal language model; there is hf, vll",
    "format=vllm proposer=mlp": "format: HeadsProposer does not go into vllm: they are heads that see the drafted tok",
    "format=medusa proposer=mlp": "there is mlp_speculator.",
    "format=medusa proposer=mlp proposer.path=foreign": "format: HeadsProposer does not go into medusa: its heads we",
    "format=hf proposer=ngram": "format: NgramProposer does not go into hf: it has no weights",
    "format=vllm proposer=none": "format: NoProposer does not go into vllm: it drafts nothing.",
    "format=vllm proposer=table": "format: CountsProposer does not go into vllm: no engine reads its counts.",
    "format=vllm proposer=layer_skip": "format: LayerSkip does not go into vllm: its layers are the target's own",
    "format=vllm proposer=cascade": "format: Cascade does not go into vllm: it is several proposers",
    "format=vllm flavour=tgi": "flavour: 'tgi' is for format=mlp_speculator; leave it out.",
    "format=mlp_speculator proposer=mlp": "flavour: has no value, and needs one: arctic, tgi.",
    "format=mlp_speculator proposer=mlp flavour=tig": "flavour: 'tig' is not one of arctic, tgi. Did you mean 'tgi'?",
    "format=vllm proposer.min_confidence=0.3": "proposer.min_confidence: 0.3 is nothing that an artefact can hold",
    "format=vllm proposer.quantize=int8": "proposer.quantize: 'int8' is nothing that an artefact can hold",
    "format=vllm proposer=ngram head=zero": "head: 'zero' is for a trained draft",
    "format=vllm head=full proposer.path=draft": "head: full makes another draft",
    "format=hf head=small proposer.path=draft": "head: small does not go with this draft and format",
    "format=vllm out=draft": "out: 'draft' is there already, and is written over by nothing",
    "format=vllm out=draft/config.json": "out: 'draft/config.json' is there already",
    "format=vllm out=draft/config.json/x proposer.path=draft": "out: ",
    "format=vllm proposer.path=scattered": "head: penalty needs a direction",
    "format=vllm proposer=draft proposer.model=./nowhere": "proposer.model: there is no directory",
    "format=vllm target=hf target.model=other proposer.path=draft": "proposer.path: 'draft' was trained for tiny",
    "format=vllm bench=nowhere": "bench: 'nowhere' has no result.json",
    "format=vllm bench=decoded": "bench: 'decoded' is a run of decode, not of bench.",
    "format=vllm bench=elsewhere": "bench: the bench in 'elsewhere' is of another target, SomeLM.",
    "format=vllm bench=benched proposer=ngram": "bench: the bench in 'benched' has no speedup of ngram; it measured ",
    "format=vllm foo=1": "foo: no such key",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the refusals speak of, read and never written."""
    folder = tmp_path_factory.mktemp("sources")
    saved_draft(folder / "draft")
    saved_draft(folder / "scattered", scattered=True)
    (folder / "foreign").mkdir()
    blocks = {f"blocks.{i}.layers.0.weight": torch.zeros(H, H) for i in range(3)}
    save_files(folder / "foreign", MEDUSA, blocks | {"lm_heads.0.weight": torch.zeros(V, H)})
    saved_tiny(folder / "other")
    tokenizer = json.loads((folder / "other" / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<|stop|>"
    (folder / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    bench(folder / "benched", ("distilled", 0.0, 1, 3, 1.5))
    bench(folder / "elsewhere", ("distilled", 0.0, 1, 3, 1.5), _target_="specpipe.verifier.targets.hf", model="SomeLM")
    bench(folder / "decoded", command="decode")
    return folder


def bench(folder: Path, *cells: tuple[str, float, int, int, float], command: str = "bench", **target: str) -> None:
    """A run that measured (proposer, temperature, batch size, tokens a step, speedup)."""
    folder.mkdir()
    rows = [
        {
            "proposer": proposer,
            "peer": False,
            "sampler": "rejection",
            "temperature": temperature,
            "batch_size": size,
            "num_speculative_tokens": gamma,
            "summary": {
                "speedup": {"mean": speedup, "low": speedup - 0.1, "high": speedup + 0.1},
                "alpha": {"mean": 0.4},
                "break_even_alpha": 0.2,
                "tokens_per_s": 9.0,
            },
        }
        for proposer, temperature, size, gamma, speedup in cells
    ]
    of = {"_target_": "specpipe.verifier.targets.tiny"} | target
    content = {
        "command": command,
        "target": {"model": of.get("model", "tiny")},
        "config": {"target": of},
        "cells": rows,
    }
    (folder / "result.json").write_text(json.dumps(content))


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_is_one_line_and_nothing_is_written(
    specpipe: Run, sources: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sources)
    before = sorted(sources.rglob("*"))
    given = words.split()
    usual = {"target": "target=tiny", "proposer": "proposer=distilled", "out": "out=made"}
    usual = [word for key, word in usual.items() if not any(each.startswith(f"{key}=") for each in given)]
    ran = specpipe("export", *usual, *given, "hydra.run.dir=../run")
    assert ran.code == 2, ran.err
    [line] = [each for each in ran.err.splitlines() if each]
    assert REFUSED[words] in line
    assert line.startswith("specpipe: ")
    assert sorted(sources.rglob("*")) == before


def test_an_empty_folder_is_taken_and_a_full_disk_leaves_nothing(
    specpipe: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("made").mkdir()
    words = ("export", *TINY, "proposer=suffix", "format=vllm", "out=made")

    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("specpipe.commands.export.card", full)
        ran = specpipe(*words)
    assert ran.code == 2
    assert (
        ran.err.splitlines()[-1]
        == f"specpipe: out: '{Path('made').resolve()}' cannot be written: No space left on device."
    )
    assert not list(Path("made").iterdir())
    assert {path.name for path in Path().iterdir()} == {"made", "run"}
    assert specpipe(*words).code == 0
    assert Path("made", "README.md").exists()


def test_an_artefact_that_is_not_the_proposer_is_not_kept(specpipe: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained("medusa", Path("heads"))
    tensors_of = heads.MedusaExport._tensors

    def shifted(self: Any, head: Tensor) -> dict[str, Tensor]:
        return tensors_of(self, head.roll(1, 0))

    monkeypatch.setattr(heads.MedusaExport, "_tensors", shifted)
    ran = specpipe("export", *TINY, "proposer=mlp", "proposer.path=heads", "format=medusa", "out=in/this/made")
    assert ran.code == 1
    assert ran.out == ""
    assert not Path("in").exists()
    [line, *_] = [each for each in ran.err.splitlines() if each.startswith("specpipe: ")]
    assert "the artefact is not the proposer: its logits are off by" in line
    assert line.endswith("made was not kept")
    assert {path.name for path in Path().iterdir()} == {"heads", "run"}
    assert result()["check"]["difference"] > result()["check"]["allowed"]


def test_the_best_of_a_bench_is_served_as_far_as_there_are_heads(specpipe: Run) -> None:
    cells = [("distilled", 0.0, 1, gamma, speedup) for gamma, speedup in ((2, 1.1), (6, 1.4), (8, 1.2))]
    cells += [("mlp", 0.0, 1, 6, 1.9), ("distilled", 1.0, 1, 3, 0.9)]
    bench(Path("benched"), *cells)
    saved_draft(Path("draft"))
    trained("mlp", Path("heads"))
    ran = specpipe("export", *TINY, *DISTILLED, "format=vllm", "out=made", "bench=benched")
    assert ran.code == 0, ran.err
    assert json.loads(Path("made", "speculative_config.json").read_text())["num_speculative_tokens"] == 6
    page = Path("made", "README.md").read_text()
    assert "| 0 | 1 | 6 | 1.40x [1.30, 1.50] | 0.400 |" in page
    assert "| 1 | 1 | 3 | 0.90x [0.80, 1.00] | 0.400 |" in page
    words = ("proposer=mlp", "proposer.path=heads", "format=mlp_speculator", "flavour=arctic")
    ran = specpipe("export", *TINY, *words, "out=speculator", "bench=benched")
    assert ran.code == 0, ran.err
    assert json.loads(Path("speculator", "speculative_config.json").read_text())["num_speculative_tokens"] == 3


def test_the_licence_is_what_the_targets_own_card_says(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\nlicense: no\n")
    assert Subject.of({"model": "some/model"}, "model", str(tmp_path)) == Subject("model", "some/model", "mit")
    (tmp_path / "README.md").write_text("license: mit\n")
    assert Subject.of({}, "model", str(tmp_path)) == Subject("model", str(tmp_path), None)
    assert Subject.of({}, "smollm2", None).licence == "apache-2.0"
