"""Loading targets: directories, the hub offline, what is refused, what is remembered."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from specpipe.errors import UserError
from specpipe.text import TextCodec
from specpipe.verifier.targets import hf, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    target = tiny(device="cpu")
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


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
    with pytest.raises(UserError, match="auto, cpu, cuda"):
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
