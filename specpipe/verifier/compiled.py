"""The verifier whose layers run as one compiled program (ahead of time, by torch's Inductor), on a CPU.

What a pass over a few tokens of a small model loses between its operations, a program without Python saves: it holds
all layers, their small operations joined, and calls back only for the products with packed weights and for attention,
which reads and fills the cache. One program serves a single row, one all other numbers of rows; longer passes, which
read prompts, run as they are. Programs are kept as files, so that a model is compiled once on a machine.
"""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import one_line
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier import fused
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.fused import FusedLayer, norm
from specpipe.verifier.reader import Reader
from specpipe.verifier.smollm2 import cache_root
from specpipe.verifier.support import ROUNDING, difference
from specpipe.verifier.targets import Target

MOST = 64  # rows of a pass that is compiled
TRIED = (1, 2, 1, 3)  # widths of the passes that are compared before the first request
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of a layer
CONFIG = {"emulate_precision_casts": True}  # round where the modules round
Program = Callable[..., Tensor]  # states [R, H], cos and signed sin [R, 1, D] to states [R, H]


class CompiledVerifier(EagerVerifier):
    """The target behind one call, compiled; as `EagerVerifier`, with one warning, where it cannot be.

    Compiling takes a minute or two, once for a model on a machine, and a C++ compiler.

    Args:
        target: the model whose law is kept.

    Raises:
        UserError: if the target's layers cannot be rolled back.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        reason = self._why_not() or self._compile()
        if reason is not None:
            warnings.warn(f"verifier=compiled runs {target.name} uncompiled: {reason}", stacklevel=2)

    def _why_not(self) -> str | None:
        if not self.prepared.fused:
            return f"{type(self.target.model).__name__} is of no kind that it knows"
        return None if self.device.type == "cpu" else f"it is on {self.device.type}, and only CPUs are supported"

    def _compile(self) -> str | None:
        """Let the reader run compiled layers, or say why it does not."""
        try:
            compiled = CompiledModel(self.target.model)
            off = max(_differences(self.target.model, compiled))
        except Exception as error:  # no compiler, or one that fails: whatever it raises
            return one_line(error)
        if not off <= ROUNDING[_dtype(self.target.model)]:  # NaN is no match either
            return f"its logits are off by {off:.0%}"
        self.reader = Reader(compiled)
        return None


class CompiledModel:
    """Stands for a fused model where a `Reader` calls it.

    Args:
        model: whose layers are `FusedLayer`s.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        body = model.model
        self._layers = list(body.layers)
        self._linears = [getattr(layer, name) for layer in self._layers for name in LINEARS]
        self._kinds = getattr(model.config, "layer_types", None)
        self._one_row, self._rows = programs(body, model.config)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.model.parameters())

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor],
        position_ids: Tensor,
        cache: Any,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        """An object with `logits` [B, kept columns, V], as the model's own."""
        if input_ids.numel() > MOST:
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "logits_to_keep": logits_to_keep}
            return self.model(input_ids=input_ids, cache=cache, **given, **others)
        body = self.model.model
        embedded = body.embed_tokens(input_ids)
        angles = body.rotary_emb(embedded, position_ids=position_ids)
        run = self._one_row if input_ids.numel() == 1 else self._rows
        _passes.append(_Pass(self._layers, self._linears, attention_mask, self._kinds, cache, input_ids.shape[1]))
        try:
            states = run(embedded.flatten(0, 1), *(_of_rows(angle, input_ids) for angle in angles))
        finally:
            _passes.pop()
        states = states.unflatten(0, input_ids.shape)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self.model.lm_head(states[:, kept]))

    __call__ = forward


def _of_rows(angle: Tensor, ids: Tensor) -> Tensor:
    """[R, 1, D] of the rows of [B, W] ids, from [B or 1, W, 1, D]."""
    return angle.expand(len(ids), -1, -1, -1).flatten(0, 1)


class Stack(nn.Module):
    """All layers and the last norm, over rows of whatever texts; what is compiled.

    Args:
        body: of the model.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_calling_back(layer, i) for i, layer in enumerate(body.layers)])
        self.norm = body.norm

    def forward(self, states: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
        """[R, H] to [R, H]; cos, signed: [R, 1, D], as `FusedAngles` gives them."""
        layer: Any
        for i, layer in enumerate(self.layers):
            seen = torch.ops.specpipe.attend(*layer.project(states, cos, signed), i)
            states = layer.finish(states, seen)
        return norm(self.norm, states)


class _Called(nn.Module):
    """Stands for a linear layer, the `number`-th of the pass that runs."""

    def __init__(self, number: int, outputs: int) -> None:
        super().__init__()
        self._number, self._outputs = number, outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.specpipe.linear(x, self._number, self._outputs)
        return y


def _calling_back(layer: FusedLayer, i: int) -> FusedLayer:
    """The layer, which stays as it is, with other modules in the place of its linear ones."""
    twin = copy.copy(layer)
    twin._modules = dict(layer._modules)
    for j, name in enumerate(LINEARS):
        setattr(twin, name, _Called(len(LINEARS) * i + j, getattr(layer, name).out_features))
    return twin


class _Pass:
    """What a program calls back for: linear layers and attention, with the cache and the masks of this pass."""

    def __init__(
        self, layers: list[FusedLayer], linears: list[Any], mask: Any, kinds: list[str] | None, cache: Any, width: int
    ) -> None:
        self._layers, self._linears, self._mask, self._kinds = layers, linears, mask, kinds
        self._cache, self._width = cache, width

    def linear(self, x: Tensor, number: int) -> Tensor:
        y: Tensor = self._linears[number](x)
        return y

    def attend(self, turned: Tensor, values: Tensor, i: int) -> Tensor:
        """Rows [R, N + G, D] and [R, G, D] to [R, N D]."""
        mask = self._mask[self._kinds[i]] if self._kinds and isinstance(self._mask, dict) else self._mask
        by_text = [each.unflatten(0, (-1, self._width)) for each in (turned, values)]
        return self._layers[i].attend(by_text[0], by_text[1], mask, self._cache).flatten(0, 1)


_passes: list[_Pass] = []  # that run; a program calls back into the last


def _attend_shape(turned: Tensor, values: Tensor, layer: int) -> Tensor:
    rows, heads, size = turned.shape
    return turned.new_empty(rows, (heads - values.shape[1]) * size)


def _linear_shape(x: Tensor, number: int, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


_library = torch.library.Library("specpipe", "DEF")
_library.define("attend(Tensor turned, Tensor values, int layer) -> Tensor")
_library.impl("attend", lambda turned, values, layer: _passes[-1].attend(turned, values, layer), "CPU")
_library.impl("attend", _attend_shape, "Meta")
_library.define("linear(Tensor x, int number, int outputs) -> Tensor")
_library.impl("linear", lambda x, number, outputs: _passes[-1].linear(x, number), "CPU")
_library.impl("linear", _linear_shape, "Meta")


def programs(body: Any, config: Any) -> tuple[Program, Program]:
    """The layers of a model compiled for a single row, and for 2 .. MOST rows; from their files if there are any."""
    stack = Stack(body)
    key = _fingerprint(stack, config)
    return _program(stack, config, 1, f"{key}-row"), _program(stack, config, 4, f"{key}-rows")


def _program(stack: Stack, config: Any, rows: int, name: str) -> Program:
    file = cache_root() / "compiled" / f"{name}.pt2"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        if sys.stderr.isatty():
            print("specpipe: compiling the target, once on this machine ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as made:
            part = _compile(stack, config, rows, Path(made) / file.name)
            os.replace(part, file)
    program: Program = torch._inductor.aoti_load_package(str(file))
    return program


def _compile(stack: Stack, config: Any, rows: int, file: Path) -> Path:
    weight = stack.norm.weight
    size = stack.layers[0].head_dim
    given = tuple(weight.new_zeros(rows, *shape) for shape in ((len(weight),), (1, size), (1, size)))
    many = {0: torch.export.Dim("rows", min=2, max=MOST)} if rows > 1 else None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of torch
        traced = torch.export.export(stack, given, dynamic_shapes=(many, many, many), strict=False)
        torch._inductor.aoti_compile_and_package(traced, package_path=str(file), inductor_configs=CONFIG)
    return file


def _fingerprint(stack: Stack, config: Any) -> str:
    """Of everything that a program is made of, and of the machine it is made for."""
    machine = [torch.__version__, platform.platform(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    parts = [*machine, config.to_json_string(use_diff=False), _dtype(stack), MOST]
    sources = [Path(module).read_bytes() for module in (__file__, fused.__file__)]
    weights = [weight.detach().float().numpy().tobytes() for weight in stack.parameters()]
    return hashlib.sha256(b"".join([repr(parts).encode(), *sources, *weights])).hexdigest()[:16]


def _differences(model: Any, compiled: CompiledModel) -> Iterator[float]:
    """How far the logits of both are apart in passes of the widths TRIED, over one text."""
    size = model.config.get_text_config().vocab_size
    readers = [Reader(model), Reader(compiled)]
    texts = [Sequence([3 % size, 10 % size], GenerationSettings(max_new_tokens=64), chance=Chance(0)) for _ in readers]
    for width in TRIED:
        draft = Draft.of([[(7 * i + 1) % size for i in range(width - 1)]], readers[0].device)
        for text in texts:
            text.commit([width % size], 0, [])
        (plain,), (ours,) = (reader.read([text], draft) for reader, text in zip(readers, texts, strict=True))
        yield max(difference(a, b) for a, b in zip(ours, plain, strict=True))


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype
