"""Loading targets: directories, the hub offline, what is refused, what is remembered."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers.none import NoProposer
from specpipe.samplers.rejection import Rejection
from specpipe.settings import GenerationSettings
from specpipe.text import TextCodec
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import hf, tiny
from tests.stand_ins import saved_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tiny(tmp_path_factory.mktemp("model"))


def test_a_directory_loads_without_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    target = hf(model=str(folder), dtype="float32", device="cpu")
    wanted = tiny(device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(target.model.parameters(), wanted.model.parameters(), strict=True))
    assert target.describe() == {
        "model": folder.name,
        "path": str(folder),
        "dtype": "float32",
        "parameters": sum(p.numel() for p in wanted.model.parameters()),
        "device": "cpu",
    }
    assert target.eos_ids == wanted.eos_ids
    assert target.context == 512


def test_parameters_are_those_of_the_model_also_when_packed(folder: Path) -> None:
    target = hf(model=str(folder), device="cpu")
    before = target.describe()["parameters"]
    EagerVerifier(target)
    assert target.describe()["parameters"] == before == sum(p.numel() for p in tiny(device="cpu").model.parameters())


def test_dtype_is_bf16_unless_asked_otherwise(folder: Path) -> None:
    assert hf(model=str(folder), device="cpu").describe()["dtype"] == "bfloat16"


def test_several_end_of_text_ids_are_all_known(folder: Path, tmp_path: Path) -> None:
    """C25."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [7, 9]}))
    assert hf(model=str(tmp_path), dtype="float32").eos_ids == (7, 9)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere"])
def test_a_missing_directory_is_one_line(model: str) -> None:
    with pytest.raises(UserError, match="there is no directory"):
        hf(model=model)


def test_a_directory_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be loaded") as error:
        hf(model=str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_hub_id_offline_uses_local_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    with pytest.raises(UserError, match="not in the local cache"):
        hf(model="nobody/nothing-of-this-name")


def test_wrong_types_and_devices_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(UserError, match="bfloat16"):
        tiny(dtype="bf16")
    with pytest.raises(UserError, match="not a device of this machine"):
        tiny(device="abacus")


def test_tiny_is_the_same_for_the_same_seed_and_leaves_the_global_one_alone() -> None:
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    a, b = tiny(seed=3, device="cpu"), tiny(seed=3, device="cpu")
    assert torch.equal(a.model.lm_head.weight, b.model.lm_head.weight)
    assert torch.equal(torch.rand(1), before)
    assert not torch.equal(a.model.lm_head.weight, tiny(seed=4, device="cpu").model.lm_head.weight)


def test_the_chat_template_is_applied_once_and_only_if_there_is_one() -> None:
    """C20's kin: the template brings its own special tokens; none are added again."""
    tokenizer = tiny(device="cpu").tokenizer
    assert not TextCodec(tokenizer).chat
    with pytest.raises(UserError, match="chat"):
        TextCodec(tokenizer, chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    assert TextCodec(tokenizer).decode(TextCodec(tokenizer).encode("hi")) == "<hi>:"
    assert TextCodec(tokenizer, chat=False).decode(TextCodec(tokenizer, chat=False).encode("hi")) == "hi"


# ---- directories that are not as they should be: one line each, never a wrong answer ----


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model directory, to be broken."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        EagerVerifier(hf(model=str(path), dtype="float32", device="cpu"))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_weights_are_refused_not_made_up(broken: Path) -> None:
    """The library would draw them at random and go on."""
    weights = load_file(broken / "model.safetensors")
    gone = [name for name in weights if "q_proj" in name]
    save_file({k: v for k, v in weights.items() if k not in gone}, broken / "model.safetensors", {"format": "pt"})
    assert f"lacks weights: {gone[0]} and {len(gone) - 1} more" in refused(broken)


def test_damaged_weights_are_one_line(broken: Path) -> None:
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:1000])
    assert "could not be loaded" in refused(broken)


def test_weights_of_another_size_are_one_line(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    assert "could not be loaded" in refused(broken)


def test_weights_that_are_not_numbers_are_refused(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    weights = {name: value * float("nan") for name, value in weights.items()}
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    assert "its weights are broken" in refused(broken)


def test_a_chat_template_that_fails_is_one_line(broken: Path) -> None:
    for template in ("{% for %}", "{{ raise_exception('no users here') }}"):
        (broken / "chat_template.jinja").write_text(template)
        target = hf(model=str(broken), dtype="float32", device="cpu")
        with pytest.raises(UserError, match=r"prompts\.chat: .*template fails"):
            TextCodec(target.tokenizer).encode("hi")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_where_it_matters() -> None:
    target = tiny(device="cpu")
    target.model.resize_token_embeddings(100)
    settings = GenerationSettings(max_new_tokens=2)
    parts = {"proposer": NoProposer(), "sampler": Rejection(), "settings": settings}
    pipeline = Pipeline(verifier=EagerVerifier(target), **parts)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="ids end at 99"):
        pipeline.generate([[150]])


@pytest.mark.parametrize("wrong", [5, None, [5], ["a", 5], [[1, "b"]]])
def test_prompts_of_another_kind_are_one_line(wrong: Any) -> None:
    parts = {"proposer": NoProposer(), "sampler": Rejection(), "settings": GenerationSettings(max_new_tokens=1)}
    pipeline = Pipeline(verifier=EagerVerifier(tiny(device="cpu")), **parts)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="neither a text nor a list"):
        pipeline.generate(wrong)


def test_values_of_another_kind_are_refused_by_name() -> None:
    for call, key in (
        (lambda: hf(model=5), "model"),  # type: ignore[arg-type]
        (lambda: tiny(seed="abc"), "seed"),  # type: ignore[arg-type]
        (lambda: tiny(device="meta"), "device"),
        (lambda: GenerationSettings(temperature=1e-40), "temperature"),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert error.value.key == key
