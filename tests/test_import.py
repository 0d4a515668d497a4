"""Heads made elsewhere: names and formulas of each layout, the law with them, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from specpipe.errors import UserError
from specpipe.export import texts
from specpipe.export.heads import MedusaExport, MlpSpeculatorExport
from specpipe.formats import load_heads
from specpipe.prompts import Prompts
from specpipe.proposers.bound_heads import TrainedHeads
from specpipe.proposers.mlp import HeadsProposer
from specpipe.proposers.none import NoProposer
from specpipe.samplers.block import Block
from specpipe.samplers.rejection import Rejection
from specpipe.verifier.targets import Target, tiny
from tests.command_line import Run
from tests.stand_ins import TableModel, random_heads, saved_heads
from tests.test_mlp import RULE, OffByOne, law_error, pipeline_of, request, target_of

V, H = 11, 8  # ids and size of states, where the two may differ
CPU = torch.device("cpu")


class Layout(NamedTuple):
    """Files of two heads: config.json, tensors, and by hand both logits behind a state [H] and the tokens y_0, y_1."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    logits: Callable[[Tensor, list[int]], list[Tensor]]


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random tensors in float64, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}


def block(x: Tensor, *layers: tuple[Tensor, Tensor | float]) -> Tensor:
    """x + SiLU(W x + b) for each layer (W, b)."""
    for w, b in layers:
        y = w @ x + b
        x = x + y * y.sigmoid()
    return x


VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 2, "num_hidden_layers": 1}


def vllms_medusa(v: int, h: int) -> Layout:
    """One output for all heads, no biases: what `export` writes."""
    w = drawn({"blocks.0.layers.0.weight": (h, h), "blocks.1.layers.0.weight": (h, h), "lm_heads.0.weight": (v, h)})
    config = VLLM | {"hidden_size": h, "vocab_size": v, "truncated_vocab_size": v, "original_lm_head": True}
    return Layout(
        config | {"medusa_fc_bias": False},
        w,
        lambda s, _: [w["lm_heads.0.weight"] @ block(s, (w[f"blocks.{i}.layers.0.weight"], 0.0)) for i in range(2)],
    )


def vllms_medusa_with_all_there_is(v: int, h: int) -> Layout:
    """Two layers, biases, an output for each head, the longer names of the config, a prefix."""
    layers = [f"medusa_heads.blocks.{i}.layers.{j}" for i in range(2) for j in range(2)]
    w = drawn({f"{layer}.weight": (h, h) for layer in layers} | {f"{layer}.bias": (h,) for layer in layers})
    w |= drawn({"medusa_heads.lm_heads.0.weight": (v, h), "medusa_heads.lm_heads.1.weight": (v, h)})

    def logits(s: Tensor, _: list[int]) -> list[Tensor]:
        pairs = [(w[f"{layer}.weight"], w[f"{layer}.bias"]) for layer in layers]
        return [w[f"medusa_heads.lm_heads.{i}.weight"] @ block(s, *pairs[2 * i : 2 * i + 2]) for i in range(2)]

    config = {"model_type": "medusa", "medusa_num_heads": 2, "medusa_num_layers": 2, "medusa_fc_bias": True}
    return Layout(config | {"hidden_size": h, "vocab_size": v}, w, logits)


def vllms_medusa_of_some_ids(v: int, h: int) -> Layout:
    """`token_map` lists the ids, not offsets; the outputs have their rows."""
    ids = [v - 1, 0]
    w = drawn({"blocks.0.layers.0.weight": (h, h), "blocks.1.layers.0.weight": (h, h), "lm_heads.0.weight": (2, h)})
    config = VLLM | {"hidden_size": h, "vocab_size": v, "truncated_vocab_size": 2, "original_lm_head": True}

    def logits(s: Tensor, _: list[int]) -> list[Tensor]:
        found = [w["lm_heads.0.weight"] @ block(s, (w[f"blocks.{i}.layers.0.weight"], 0.0)) for i in range(2)]
        return [torch.full((v,), -torch.inf, dtype=s.dtype).index_copy(0, torch.tensor(ids), each) for each in found]

    return Layout(config, w | {"token_map": torch.tensor(ids)}, logits)


def medusas_own(v: int, h: int) -> Layout:
    """As Medusa's training writes them, converted from a pickle; the config of the model they are for beside theirs."""
    w = drawn({f"{i}.0.linear.{part}": (h, h) if part == "weight" else (h,) for i in range(2) for part in PARTS})
    w |= drawn({"0.1.weight": (v, h), "1.1.weight": (v, h)})
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "model_type": "llama", "num_hidden_layers": 32}
    return Layout(
        config,
        w,
        lambda s, _: [
            w[f"{i}.1.weight"] @ block(s, (w[f"{i}.0.linear.weight"], w[f"{i}.0.linear.bias"])) for i in range(2)
        ],
    )


PARTS = ("weight", "bias")


def medusas_without_blocks(v: int, h: int) -> Layout:
    """An output for each head and nothing else."""
    w = drawn({"0.0.weight": (v, h), "1.0.weight": (v, h)})
    config = {"medusa_num_heads": 2, "medusa_num_layers": 0}
    return Layout(config, w, lambda s, _: [w["0.0.weight"] @ s, w["1.0.weight"] @ s])


def medusas_second(v: int, h: int) -> Layout:
    """The target's own head, here the identity; two layers that are one, which the file holds once."""
    w = drawn({f"{i}.0.linear.{part}": (h, h) if part == "weight" else (h,) for i in range(2) for part in PARTS})
    pairs = [(w[f"{i}.0.linear.weight"], w[f"{i}.0.linear.bias"]) for i in range(2)]
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "version": "2"}
    return Layout(config, w, lambda s, _: [block(s, pair, pair) for pair in pairs])


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()


def speculated(w: dict[str, Tensor], names: tuple[str, str], s: Tensor, ids: list[int], scaled: bool) -> list[Tensor]:
    """The formula of arXiv 2404.19124 for two heads, whose tensors have these endings."""
    a = 0.5 ** (0.5 / 2)
    logits, s = [], rms(s) / math.sqrt(2) if scaled else s
    for i, name in enumerate(names):
        d = len(w[f"ln.{name}.bias"])
        b = math.sqrt((1 - a * a) * d / 2)
        x = w[f"proj.{i}.weight"] @ s + (b / a) * w[f"emb.{name}.weight"][ids[i]]
        s = F.gelu(rms(x) * w[f"ln.{name}.weight"] + w[f"ln.{name}.bias"])
        logits.append(w[f"head.{name}.weight"] @ s)
    return logits


def speculator(v: int, h: int) -> Layout:
    """Tied, all copies in the file: what `export` writes, and ArcticInference and TGI load."""
    own = drawn(
        {"emb.0.weight": (v, h), "proj.0.weight": (h, h), "proj.1.weight": (h, h), "head.0.weight": (v, h)}
        | {"ln.0.weight": (h,), "ln.0.bias": (h,)}
    )
    copies = {f"{part}.1.{end}": own[f"{part}.0.{end}"] for part, end in TIED}
    config = {
        "architectures": ["ArcticMLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": v,
        "emb_dim": h,
        "inner_dim": h,
        "n_predict": 2,
        "top_k_tokens_per_head": [1, 1],
        "n_candidates": 2,
        "tie_weights": True,
        "scale_input": True,
        "base_model_name_or_path": "some/target",
        "base_model_archs": ["LlamaForCausalLM"],
        "torch_dtype": "float32",
    }
    tensors = {f"speculator.{name}": tensor for name, tensor in (own | copies).items()}
    return Layout(config, tensors, lambda s, ids: speculated(own, ("0", "0"), s, ids, scaled=True))


TIED = (("emb", "weight"), ("head", "weight"), ("ln", "weight"), ("ln", "bias"))


def speculator_held_once(v: int, h: int) -> Layout:
    """Tied weights once, without a prefix, `inner_dim` left to be that of the states."""
    config, tensors, logits = speculator(v, h)
    named = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    kept = {name: named[name] for name in named if name.split(".")[1] == "0" or name == "proj.1.weight"}
    return Layout(config | {"architectures": ["MLPSpeculatorPreTrainedModel"], "inner_dim": 0}, kept, logits)


def speculator_untied(v: int, h: int) -> Layout:
    """Tables for each head, narrower than the states, which are not scaled."""
    d = h - 1
    w = drawn({f"{part}.{i}.weight": (v, d) for part in ("emb", "head") for i in range(2)})
    w |= drawn({"proj.0.weight": (d, h), "proj.1.weight": (d, d)})
    w |= drawn({f"ln.{i}.{part}": (d,) for i in range(2) for part in PARTS})
    config = {"model_type": "mlp_speculator", "vocab_size": v, "emb_dim": h, "inner_dim": d, "n_predict": 2}
    return Layout(
        config | {"tie_weights": False, "scale_input": False},
        w,
        lambda s, ids: speculated(w, ("0", "1"), s, ids, scaled=False),
    )


LAYOUTS = (
    vllms_medusa,
    vllms_medusa_with_all_there_is,
    vllms_medusa_of_some_ids,
    medusas_own,
    medusas_without_blocks,
    medusas_second,
    speculator,
    speculator_held_once,
    speculator_untied,
)
GOLDEN: dict[Callable[..., Layout], str] = {
    vllms_medusa: "blocks.0.layers.0.weight blocks.1.layers.0.weight lm_heads.0.weight",
    medusas_own: "0.0.linear.bias 0.0.linear.weight 0.1.weight 1.0.linear.bias 1.0.linear.weight 1.1.weight",
    medusas_second: "0.0.linear.bias 0.0.linear.weight 1.0.linear.bias 1.0.linear.weight",
    speculator: "speculator.emb.0.weight speculator.emb.1.weight speculator.head.0.weight speculator.head.1.weight "
    "speculator.ln.0.bias speculator.ln.0.weight speculator.ln.1.bias speculator.ln.1.weight "
    "speculator.proj.0.weight speculator.proj.1.weight",
    speculator_held_once: "emb.0.weight head.0.weight ln.0.bias ln.0.weight proj.0.weight proj.1.weight",
}


def saved(folder: Path, layout: Layout, file: str = "model.safetensors", **config: Any) -> Path:
    """The layout as a folder, its config changed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(layout.config | config))
    save_file({name: tensor.clone() for name, tensor in layout.tensors.items()}, folder / file)
    return folder


def proposer_for(folder: Path, target: Target, **asked: Any) -> HeadsProposer:
    made = HeadsProposer(path=str(folder), **asked)
    made.bind(target)
    return made


# ---- names and formulas ----


@pytest.mark.parametrize("layout", GOLDEN)
def test_the_names_are_those_that_others_write(layout: Callable[..., Layout]) -> None:
    assert sorted(layout(V, H).tensors) == GOLDEN[layout].split()


def read_logits(folder: Path, made: Layout) -> tuple[Tensor, Tensor]:
    """[2, V] by the heads of a folder, for a target whose head is the identity, and by hand."""
    state = torch.linspace(-1, 2, H, dtype=torch.float64)
    tokens = torch.tensor([3, 7])
    heads = load_heads(folder).to(CPU, torch.float64)
    carry, found = state[None], []
    for i in range(2):
        carry, features = heads.step(i, carry, tokens[i : i + 1])
        rows = heads.rows(i)
        logits = features if rows is None else features @ rows.T
        if heads.ids is not None:
            logits = logits.new_full((1, V), -torch.inf).index_copy(1, heads.ids, logits)
        found.append(logits[0])
    return torch.stack(found), torch.stack(made.logits(state, tokens.tolist()))


@pytest.mark.parametrize("file", ["model.safetensors", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_computes_its_formula(layout: Callable[..., Layout], file: str, tmp_path: Path) -> None:
    made = layout(V, H)
    found, by_hand = read_logits(saved(tmp_path, made, file), made)
    assert torch.allclose(found, by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        (medusas_second, {"medusa_num_layers": 1}),
        (speculator, {"scale_input": False}),
        (speculator_untied, {"scale_input": True}),
    ],
)
def test_another_formula_would_be_seen(layout: Callable[..., Layout], wrong: dict[str, Any], tmp_path: Path) -> None:
    made = layout(V, H)
    found, by_hand = read_logits(saved(tmp_path, made, **wrong), made)
    assert (found - by_hand).abs().max() > 1e-3


def test_a_file_cut_in_several_is_read_as_one(tmp_path: Path) -> None:
    made = speculator(V, H)
    saved(tmp_path, made)
    names = sorted(made.tensors)
    for i, some in enumerate((names[:4], names[4:])):
        save_file({name: made.tensors[name].clone() for name in some}, tmp_path / f"model-0000{i}.safetensors")
    with pytest.raises(UserError, match=r"has speculator\.emb\.0\.weight in model\.safetensors and in another file"):
        load_heads(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found, by_hand = read_logits(tmp_path, made)
    assert torch.allclose(found, by_hand, rtol=0, atol=1e-12)


def test_one_output_for_all_heads_is_in_memory_once(tmp_path: Path) -> None:
    for name, layout, shared in (("a", vllms_medusa, True), ("b", speculator, True), ("c", medusas_own, False)):
        heads = load_heads(saved(tmp_path / name, layout(V, H))).to(CPU, torch.float32)
        assert (heads.rows(0) is heads.rows(1)) == shared


# ---- drafting ----

SAMPLE: dict[str, Any] = {"temperature": 1.0}
SIZE = len("abc")  # of the tables of `law_error`, whose states are as wide


@pytest.mark.parametrize(("layout", "sampler"), [(speculator_untied, Rejection), (vllms_medusa_of_some_ids, Block)])
def test_the_output_has_exactly_the_targets_law(layout: Callable[..., Layout], sampler: type, tmp_path: Path) -> None:
    """Whatever the file says: q is what drafts are drawn from, for these and the other layouts alike."""
    proposer = HeadsProposer(path=str(saved(tmp_path, layout(SIZE, SIZE))))
    assert law_error(proposer, table_target(), sampler(), **SAMPLE) <= 1e-12


def table_target() -> Target:
    return target_of(TableModel(RULE, SIZE, 64))


def test_a_law_of_the_next_head_would_be_seen(tmp_path: Path) -> None:
    proposer = OffByOne(path=str(saved(tmp_path, vllms_medusa_of_some_ids(SIZE, SIZE))))
    assert law_error(proposer, table_target(), Rejection(), **SAMPLE) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_q_is_the_softmax_of_the_files_logits(layout: Callable[..., Layout], tmp_path: Path) -> None:
    """From the newest token and the state it was drawn from; exactly zero for ids that the heads cannot say."""
    target, made = table_target(), layout(SIZE, SIZE)
    x, q = proposer_for(saved(tmp_path, made), target).propose([request([1, 0, 2], **SAMPLE)], [5]).row(0)
    by_hand = torch.stack(made.logits(RULE([1, 0]), [2, x[0]])).softmax(-1)
    assert len(x) == 2
    assert q is not None
    assert torch.allclose(q.double(), by_hand, atol=1e-6)
    assert torch.equal(q == 0, by_hand == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_draft_for_a_target_in_half_precision(layout: Callable[..., Layout], tmp_path: Path) -> None:
    target = tiny(device="cpu", dtype="bfloat16")
    proposer = proposer_for(saved(tmp_path, layout(target.vocabulary, 64)), target)
    x, q = proposer.propose([request([5, 6, 7], **SAMPLE)], [3]).row(0)
    assert len(x) == 2
    assert q is not None
    assert q.dtype == torch.float32


# ---- what `export` wrote ----


@pytest.mark.parametrize(("kind", "ids"), [("medusa", None), ("mlp", None), ("mlp", list(range(0, 257, 2)))])
def test_exported_heads_are_imported_as_they_were(
    kind: str, ids: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same law, and no probability for ids that they were not trained to say; same text, same drafts accepted."""
    monkeypatch.setattr(texts, "demo", lambda: Prompts(["Name a river.", "x = 1"]))
    target = tiny(device="cpu")
    heads = saved_heads(tmp_path / "heads", random_heads(kind, 64), target, ids)
    made = tmp_path / "made"
    made.mkdir()
    trained = TrainedHeads(heads)
    medusa = kind == "medusa"
    export = MedusaExport(trained, target, None) if medusa else speculator_export(trained, target)
    export.write(made)
    before, after = (proposer_for(folder, target) for folder in (heads, made))
    (x, q), (y, r) = (each.propose([request([5, 6, 7], **SAMPLE)], [3]).row(0) for each in (before, after))
    assert x == y
    assert q is not None
    assert r is not None
    assert torch.allclose(q, r, atol=1e-4)
    assert ids is None or {*r.nonzero()[:, 1].tolist()} <= {*ids}
    plain, one, two = (
        pipeline_of(proposer, target, max_new_tokens=24).generate([[7, 8, 9, 9]])[0]
        for proposer in (NoProposer(), before, after)
    )
    assert plain.token_ids == one.token_ids == two.token_ids
    assert one.spec_decode == two.spec_decode


def speculator_export(trained: TrainedHeads, target: Target) -> MlpSpeculatorExport:
    return MlpSpeculatorExport(trained, target, None, flavour="tgi", base="some/target")


# ---- refusals ----


def without(layout: Layout, name: str) -> Layout:
    return layout._replace(tensors={key: tensor for key, tensor in layout.tensors.items() if key != name})


def having(layout: Layout, **tensors: Tensor) -> Layout:
    return layout._replace(tensors=layout.tensors | tensors)


def mapped(ids: list[int]) -> Layout:
    return having(vllms_medusa_of_some_ids(V, H), token_map=torch.tensor(ids))


REFUSED: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "a causal LM": (speculator(V, H), {"model_type": "llama"}, "'llama'. A causal LM is for proposer=draft."),
    "an LSTM": (speculator(V, H), {"method": "sum_lstm"}, "is an LSTM speculator, which is not supported."),
    "more heads": (vllms_medusa(V, H), {"num_heads": 3}, "lacks 1 of its tensors, blocks.2.layers.0.weight among them"),
    "no number": (speculator(V, H), {"n_predict": "2"}, "config.json: n_predict: '2' is not a whole number from 1 up."),
    "no heads": (vllms_medusa(V, H), {"num_heads": None}, "config.json: num_heads: None is not a whole number"),
    "biases that are not announced": (
        vllms_medusa_with_all_there_is(V, H),
        {"medusa_fc_bias": False},
        "blocks.0.layers.0.bias is one of 4 tensors that config.json does not speak of",
    ),
    "a head without a bias": (without(medusas_own(V, H), "1.0.linear.bias"), {}, "lacks 1 of its tensors, 1.0.lin"),
    "no map": (without(vllms_medusa_of_some_ids(V, H), "token_map"), {}, "lacks 1 of its tensors, token_map am"),
    "offsets": (mapped([0, 0]), {}, f"its token_map is not one of different ids below {V}."),
    "ids beyond": (mapped([0, V]), {}, f"its token_map is not one of different ids below {V}."),
    "rows and ids": (mapped([0, 1, 2]), {}, "its heads have 2 rows, and its token_map 3 ids."),
    "another shape": (
        having(vllms_medusa(V, H), **{"blocks.1.layers.0.weight": torch.zeros(H, H + 1)}),
        {},
        f"blocks.1.layers.0.weight is [{H}, {H + 1}], not [{H}, {H}].",
    ),
    "another size": (speculator(V, H), {"vocab_size": V + 1}, f"emb.0.weight is [{V}, {H}], not [{V + 1}, {H}]."),
    "another inner size": (speculator_untied(V, H), {"inner_dim": 0}, f"weight is [{V}, {H - 1}], not [{V}, {H}]."),
    "copies that differ": (
        having(speculator(V, H), **{"speculator.ln.1.bias": torch.zeros(H, dtype=torch.float64)}),
        {},
        "ln.1.bias is not ln.0.bias, though its weights are tied.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_together_are_named_in_one_line(case: str, tmp_path: Path) -> None:
    layout, config, said = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        HeadsProposer(path=str(saved(tmp_path / "theirs", layout, **config)))
    assert caught.value.key == "path"
    assert "theirs" in str(caught.value)
    assert "\n" not in str(caught.value)


def torn(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:300])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (torn, "config.json' cannot be read: "),
        (no_object, "config.json' is not an object."),
        (no_weights, "has no tensors in files of safetensors."),
        (torn_weights, "model.safetensors' cannot be read: "),
    ],
)
def test_a_damaged_folder_is_named_in_one_line(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    damage(saved(tmp_path, vllms_medusa(V, H)))
    with pytest.raises(UserError, match=rf"^path: .*{re.escape(said)}") as caught:
        HeadsProposer(path=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_pickle_is_refused_with_a_line_that_converts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that holds a tensor twice, which safetensors would refuse."""
    made = medusas_own(V, H)
    saved(tmp_path, made)
    (tmp_path / "model.safetensors").unlink()
    held = made.tensors | {"1.1.weight": made.tensors["0.1.weight"]}
    torch.save(held, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"^path: medusa_lm_head\.pt in .* is a pickle, which can run code") as caught:
        HeadsProposer(path=str(tmp_path))
    python, flag, line = shlex.split(str(caught.value).partition("in that folder: ")[2])
    assert (python, flag) == ("python", "-c")
    monkeypatch.chdir(tmp_path)
    exec(line, {})
    heads = load_heads(tmp_path)
    assert torch.equal(heads.rows(1), made.tensors["0.1.weight"])  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_of_other_sizes_are_refused_with_the_remedy(layout: Callable[..., Layout], tmp_path: Path) -> None:
    target, remedy = table_target(), r"; `python -m train student=mlp target=\.\.\.` trains some for it\.$"
    known = r"^path: the heads in {} are for a "
    saved(tmp_path / "wide", layout(SIZE, SIZE + 1))
    with pytest.raises(UserError, match=known.format("wide") + "hidden size of 4, and target has 3" + remedy):
        proposer_for(tmp_path / "wide", target)
    saved(tmp_path / "many", layout(SIZE + 1, SIZE))
    if layout is medusas_second:  # nothing in its files depends on the vocabulary
        return
    with pytest.raises(UserError, match=known.format("many") + "vocabulary of 4 ids, and target has 3" + remedy):
        proposer_for(tmp_path / "many", target)


def test_heads_of_other_sizes_are_one_line_on_the_command_line(specpipe: Run) -> None:
    saved(Path("theirs"), vllms_medusa(V, 64))
    words = ("target=tiny", "target.device=cpu", "wandb=none", "prompt=hello")
    ran = specpipe("decode", *words, "proposer=mlp", "proposer.path=theirs")
    assert ran.code == 2
    [line] = [each for each in ran.err.splitlines() if each.startswith("specpipe: ")]
    assert line.startswith("specpipe: proposer.path: the heads in theirs are for a vocabulary of 11 ids, and tiny has ")
