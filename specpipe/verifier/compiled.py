"""The verifier whose layers run as one compiled program on a CPU, and on a GPU as recorded passes (`graphs.py`).

What a pass over a few tokens of a small model loses between its operations, a program without Python saves; and what
remains is little more than reading the weights, once for all tokens of a pass. The program (`layers.cpp`) makes every
token's numbers by the same operations in the same order whatever stands beside it: plain and speculative decoding see
the same logits to the last bit, in bfloat16 too. It is compiled once on a machine, in some seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from ctypes import byref, c_int32, c_void_p, cast
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specpipe.errors import UserError, flag, one_line, ran_out_of_memory
from specpipe.verifier import kernels
from specpipe.verifier.cache import RowCache
from specpipe.verifier.eager import FREE, EagerVerifier
from specpipe.verifier.fused import FusedLayer
from specpipe.verifier.graphs import GraphedModel, unrecorded
from specpipe.verifier.kernels import PanelLinear, program
from specpipe.verifier.linear import plain_bias, plain_weight
from specpipe.verifier.reader import Reader
from specpipe.verifier.support import rehearse, same_bits
from specpipe.verifier.targets import Target
from specpipe.verifier.windows import SLIDING, layer_kinds, window

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of a layer
TYPES = (torch.bfloat16, torch.float32)
LANES = 8  # numbers of a vector: sizes are multiples
TOGETHER = 2048  # tokens of one call: what it needs beside the weights grows with them
UNHEARD = 10**10  # multiply-adds of one call, in which no Ctrl-C is heard: a fraction of a second
TOKENS = 10  # drafted by which it is seen that a token's numbers are its own


class CompiledVerifier(EagerVerifier):
    """The target behind one call, compiled; where it cannot be, as an `EagerVerifier`, packed.

    Compiling takes some seconds, once on a machine, and a C++ compiler. On a GPU passes are recorded when they first
    come. `engine` says what runs: `compiled` or `graphs`, else as of an `EagerVerifier`.

    Args:
        target: the model whose law is kept.
        warn: say so, once, if there is no program for such a target; that there is no compiler is said in any case.
        width: as of an `EagerVerifier`. The compiled program needs no `fixed` width to give the same logits in any.

    Raises:
        UserError: if the target's layers cannot be rolled back.
    """

    def __init__(self, target: Target, *, warn: bool = True, width: str = FREE) -> None:
        super().__init__(target, prepack=False, width=width)
        recordable = unrecorded(target.model) is None
        unknown = None if recordable else unfit(target.model)
        reason = unknown or (self._record() if recordable else self._compile())
        if reason is None:
            return
        self._prepare()
        if flag("warn", warn) or unknown is None:
            warnings.warn(f"{target.name} is not compiled, which would be faster: {reason}", stacklevel=2)

    def _compile(self) -> str | None:
        """Let the reader run the program, or say why it does not, with the model as it was."""
        try:
            compiled = CompiledModel(self.target.model)
            reason = self._wrong(compiled)
        except kernels.NoCompiler as error:
            reason = one_line(error)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            reason = "there is no memory for it"
        if reason is None:
            self.reader, self.engine = Reader(compiled), "compiled"
        else:
            take_back(self.target.model)
        return reason

    def expect(self, longest: int) -> None:
        if self.engine != "compiled":
            super().expect(longest)

    def _record(self) -> str | None:
        """Let the reader record its passes, or say why it does not."""
        recorded = GraphedModel(self.target.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                rehearse(recorded, self._expected)
            except UserError as error:
                return error.message
        if recorded.given_up:
            return recorded.given_up
        self.reader, self.engine = Reader(GraphedModel(self.target.model)), "graphs"
        return None

    def _wrong(self, compiled: CompiledModel) -> str | None:
        try:
            rehearse(compiled, self._expected)
        except UserError as error:
            return error.message
        return (
            None if same_bits(Reader(compiled), TOKENS) else "on this machine its numbers depend on what shares a pass"
        )


def unfit(model: Any) -> str | None:
    """Why there is no program for a model of `transformers`, whatever was done to it so far; None if there is."""
    layers = getattr(getattr(model, "model", None), "layers", ())
    if not layers or not all(isinstance(layer, FusedLayer) for layer in layers):
        return f"{type(model).__name__} is of no kind that it knows"
    if model.device.type != "cpu":
        return f"it is on {model.device.type}, and only CPUs are supported"
    if model.dtype not in TYPES:
        return f"its weights are {model.dtype}"
    if any(type(layer.act_fn).__name__ not in ("SiLU", "SiLUActivation") for layer in layers):
        return f"its activation is {type(layers[0].act_fn).__name__}"
    linears = [getattr(layer, name) for layer in layers for name in LINEARS]
    other = [each for each in (*linears, model.lm_head) if not (type(each) is nn.Linear or hasattr(each, "unpacked"))]
    if other:
        return f"it has layers of the kind {type(other[0]).__name__}"
    sizes = (model.config.hidden_size, model.config.intermediate_size, layers[0].head_dim)
    if any(size % LANES for size in sizes):
        return f"its sizes {sizes} are no multiples of {LANES}"
    return None if all(_as_described(layer, layers[0]) for layer in layers) else "its layers are not as its config says"


def _as_described(layer: FusedLayer, first: FusedLayer) -> bool:
    """Whether a layer's sizes are those of the config, and of all layers: the program takes their word for it."""
    config = layer.config
    hidden, inner, size = config.hidden_size, config.intermediate_size, first.head_dim
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    sizes = [(hidden, (heads + 2 * shared) * size), (heads * size, hidden), (hidden, 2 * inner), (inner, hidden)]
    linears = [getattr(layer, name) for name in LINEARS]
    alike = (layer.head_dim, layer.scaling, layer.num_key_value_groups) == (size, first.scaling, heads // shared)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        alike
        and [(each.in_features, each.out_features) for each in linears] == sizes
        and all(norm.weight.shape == (hidden,) for norm in norms)
    )


def compiled_like(verifier: Any, model: Any) -> Any:
    """What drafts for a compiled or recorded target, done so too if that can be; else the model itself."""
    engine = getattr(verifier, "engine", None)
    if engine == "compiled" and unfit(model) is None:
        return CompiledModel(model)
    return GraphedModel(model) if engine == "graphs" and unrecorded(model) is None else model


def take_back(model: Any) -> None:
    """Give a model's layers and head, in place, what they had before a `CompiledModel` was made of it."""
    for layer in model.model.layers:
        for name in LINEARS:
            setattr(layer, name, _plain(getattr(layer, name)))
    model.lm_head = _plain(model.lm_head)


class CompiledModel:
    """Stands for a fused model where a `Reader` calls it.

    The model's own modules use the same weights from then on, so that they are in memory once; see `take_back`.

    Args:
        model: for which `unfit` has no reason.

    Raises:
        NoCompiler: see `kernels.program`.
    """

    takes_masks = False  # what a token sees follows from its place in the cache

    def __init__(self, model: Any) -> None:
        self._program = program()
        self.model, self.config = model, model.config
        self._layers: list[FusedLayer] = list(model.model.layers)
        for layer in self._layers:
            for name in LINEARS:  # one by one: twice the weights would not fit everywhere
                setattr(layer, name, _panels(getattr(layer, name)))
        self._linears = [[getattr(layer, name) for name in LINEARS] for layer in self._layers]
        self._head = model.lm_head = _panels(model.lm_head, wide=True)
        norms = [norm for layer in self._layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._norms = [norm.weight.detach().float().contiguous() for norm in (*norms, model.model.norm)]
        self._rounds, self._kinds = model.dtype == torch.bfloat16, layer_kinds(self.config)
        self._struct = self._described()

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.model.parameters())

    def get_output_embeddings(self) -> nn.Module:
        return self._head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: RowCache,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        """An object with `logits`, [B, kept columns, V], the model's own in float32.

        Args:
            input_ids: [B, W] of the rows that were announced to the cache; position_ids: [B or 1, W].
            logits_to_keep: how many last columns have logits, 0 for all, or which, [n].
            others: what a model of `transformers` is told besides; it has no meaning here.
        """
        body = self.model.model
        embedded = body.embed_tokens(input_ids)
        cos, sin = body.rotary_emb(embedded, position_ids=position_ids)
        states = embedded.float().contiguous()
        self._run(states, cos, sin, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self._head(states[:, kept]))

    __call__ = forward

    def _run(self, states: Tensor, cos: Tensor, sin: Tensor, cache: RowCache) -> None:
        """Through all layers, in place. states: [B, W, H] float32; cos, sin: [B or 1, W, 1, D] as `FusedAngles`."""
        texts, width, _ = states.shape
        first = self._layers[0]
        like = states.new_empty(0, self._struct.shared, 0, first.head_dim, dtype=self.model.dtype)
        held = cache.room(like, [layer.layer_idx for layer in self._layers])
        reach = window(self.config) or 0
        windows = [reach if kind == SLIDING else 0 for kind in self._kinds]
        keys, values = map(kernels.pointers, zip(*held, strict=True))
        capacity = held[0][0].shape[2]
        threads, rows = torch.get_num_threads(), max(1, TOGETHER // width)
        angles = [angle.expand(texts, -1, -1, -1).float() for angle in (cos, sin)]
        scratch = torch.empty(
            self._program.scratch_for(byref(self._struct), capacity, min(rows, texts) * width, threads)
        )
        for start in range(0, texts, rows):  # a part of the texts at a time, all of them if it is not much
            part = slice(start, start + rows)
            given = [each[part].contiguous() for each in (states, *angles, cache.positions)]
            seats = cache.rows[part]
            arrays = [(c_int32 * len(seats))(*seats), keys, values, (c_int32 * len(windows))(*windows)]
            asked = kernels.Pass(
                *(each.data_ptr() for each in given),
                *(cast(array, c_void_p) for array in arrays),
                scratch.data_ptr(),
                capacity,
                len(seats),
                width,
                threads,
            )
            self._through(asked, len(seats) * width)

    def _through(self, asked: kernels.Pass, tokens: int) -> None:
        """In one call, or where that would take long in several, between which Ctrl-C is heard."""
        each = tokens * sum(linear.in_features * linear.out_features for linear in self._linears[0])
        count = len(self._layers)
        step = max(1, min(count, UNHEARD // each))
        for asked.begin in range(0, count, step):
            asked.end = min(asked.begin + step, count)
            self._program.run_layers(byref(self._struct), byref(asked))

    def _described(self) -> kernels.Model:
        """What the program is told of the model; holds addresses of tensors that `self` keeps."""
        first, norms = self._layers[0], [each.data_ptr() for each in self._norms]
        layers = [
            kernels.Layer(norms[2 * i], norms[2 * i + 1], *(linear.struct for linear in linears))
            for i, linears in enumerate(self._linears)
        ]
        shared = self.config.num_key_value_heads
        return kernels.Model(
            (kernels.Layer * len(layers))(*layers),
            norms[-1],
            len(layers),
            self.config.hidden_size,
            shared * first.num_key_value_groups,
            shared,
            first.head_dim,
            self.config.intermediate_size,
            self._rounds,
            self.config.rms_norm_eps,
            first.scaling,
        )


def _plain(linear: Any) -> Any:
    """As a module of torch, if it was made a `PanelLinear`."""
    if not isinstance(linear, PanelLinear):
        return linear
    weight, bias = linear.unpacked()
    with torch.device("meta"):
        made = nn.Linear(linear.in_features, linear.out_features, bias=bias is not None)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
    return made


def _panels(linear: Any, wide: bool = False) -> PanelLinear:
    """A linear layer as the program takes it; itself if it is one already, as in a model that shares layers."""
    if isinstance(linear, PanelLinear):
        return linear
    return PanelLinear(plain_weight(linear), plain_bias(linear), wide=wide)
