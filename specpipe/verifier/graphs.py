"""Passes over a few tokens recorded once and played back, on a GPU.

There a pass over a few tokens of a model takes less time than Python needs to ask for its hundreds of kernels. A CUDA
graph asks for all of them at once. It plays the same kernels over the same memory, so a pass has one of a handful of
widths, what it is given is copied to a fixed place, and attention reaches over a round number of the cache's places and
looks at those that count. The kernels are the model's own: same sums, same logits up to what another width rounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specpipe.errors import one_line
from specpipe.verifier.cache import Place, RowCache
from specpipe.verifier.reader import Call, columns_of
from specpipe.verifier.states import head_inputs
from specpipe.verifier.windows import LookBack

WIDTHS = (1, 2, 4, 8, 16)  # of recorded passes; wider ones read prompts, where asking is not what takes time
Outputs = tuple[Tensor, Tensor | None]  # logits [B, .., V] and what the head was given, [B, .., H]

MOST = 12  # recordings of a model; each has memory for its logits


class GraphedModel:
    """Stands for a model of `transformers` where a `Reader` calls it.

    Recordings are of one cache's memory: they are made anew when that moves, as when it grows. If one cannot be made,
    all passes are the model's own from then on, and `given_up` says why.

    Args:
        model: on a CUDA device.
    """

    takes_masks = False  # it makes its own: those of recorded passes are part of the recording

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.given_up = model, model.config, ""
        self._door = nn.Identity()  # through which goes what the head is given, for whoever watches it
        self._call = Call(model)
        self._has_head = getattr(model, "get_output_embeddings", lambda: None)() is not None
        self._made: dict[tuple[tuple[int, ...], int, int], Recording] = {}  # by rows, width and places
        self._memory: tuple[Any, ...] = ()  # that they are of
        self._record = Recorder()

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.model.parameters())

    def get_output_embeddings(self) -> nn.Module | None:
        return self._door if self._has_head else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cache: RowCache, logits_to_keep: int | Tensor = 0, **others: Any
    ) -> Any:
        """An object with `logits`, [B, kept columns, V].

        Args:
            input_ids: [B, W] of the rows that were announced to the cache; position_ids: [B, W].
            logits_to_keep: how many last columns have logits, 0 for all, or which, [n].
            others: what a model of `transformers` is told besides; it has no meaning here.
        """
        width = input_ids.shape[1]
        wide = next((each for each in WIDTHS if each >= width), None)
        recording = None
        if wide is not None and not self.given_up:
            if cache.reserve() is None:  # a pass that allocates
                self._own(input_ids, position_ids, cache, logits_to_keep)
            recording = self._recording(cache, width, wide)
        if recording is None:
            logits, states = self._own(input_ids, position_ids, cache, logits_to_keep)
        else:
            kept = columns_of(logits_to_keep)
            logits, states = recording.play(input_ids, position_ids)
            logits = logits[:, :width][:, kept].clone()  # the next pass writes over what this one plays
            states = None if states is None else states[:, :width][:, kept].clone()
        if states is not None:
            self._door(states)
        return SimpleNamespace(logits=logits)

    __call__ = forward

    def _own(self, ids: Tensor, position_ids: Tensor, cache: RowCache, keep: int | Tensor) -> Outputs:
        """The model's pass as it comes: logits of the kept columns, and what the head was given for them or for all."""
        masks = LookBack(self.model).masks(cache, cache.positions)
        with head_inputs(self.model) as given:
            logits = self._call(ids, masks, position_ids, cache, keep)
        return logits, given[0] if len(given) == 1 and given[0].dim() == 3 else None

    def forget(self) -> None:
        """Let go of the recordings and of their memory."""
        self._made.clear()

    def _recording(self, cache: RowCache, width: int, wide: int) -> Recording | None:
        """Of a pass `wide` enough for `width` tokens in the rows that were announced; None if there is none."""
        device, least = cache.positions.device, cache.end
        positions = cache.place(wide, device, cache.rows, least)
        end = cache.reserve()
        if end is not None:
            if cache.memory() != self._memory:
                self._made.clear()
                self._memory = cache.memory()
            key = tuple(cache.rows), wide, end
            try:
                recording = self._made.pop(key, None) or self._recorded(cache, positions, end)
                self._made[key] = recording  # the last one used is the last to go
                if len(self._made) > MOST:
                    del self._made[next(iter(self._made))]
                recording.positions.copy_(positions)
                return recording
            except Exception as error:  # a model may do what cannot be recorded, such as look at a number
                self._give_up(one_line(error))
        cache.place(width, device, cache.rows, least)
        return None

    def _recorded(self, cache: RowCache, positions: Tensor, end: int) -> Recording:
        """A recording; to make it, zeros are read at `positions`, where its first playing writes anew."""
        positions, ids, position_ids = positions.clone(), torch.zeros_like(positions), torch.zeros_like(positions)
        place = cache.place_within(positions, end)

        def run() -> Outputs:
            cache.announce(place)
            return self._own(ids, position_ids, cache, 0)

        play, (logits, states) = self._record(run, positions.device)
        return Recording(ids, positions, position_ids, logits, states, play, place)

    def _give_up(self, reason: str) -> None:
        self._made.clear()
        self.given_up = reason
        warnings.warn(f"passes are not recorded in CUDA graphs, which would be faster: {reason}", stacklevel=2)


@dataclass
class Recording:
    """Fixed places in memory: ids, positions and position ids [B, W] in; logits [B, W, V] and head inputs out."""

    ids: Tensor
    positions: Tensor
    position_ids: Tensor
    logits: Tensor
    states: Tensor | None
    replay: Callable[[], None]
    place: Place  # whose tensors it reads

    def play(self, ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """With ids and position ids [B, W or fewer]; what stands behind them in the recording is read too."""
        width = ids.shape[1]
        self.ids[:, :width] = ids
        self.position_ids[:] = position_ids[:, -1:]  # stays inside the context
        self.position_ids[:, :width] = position_ids
        self.replay()
        return self.logits, self.states


class Recorder:
    """Records on one device; what is recorded has its temporary memory in common, so that one is played at a time."""

    def __init__(self) -> None:
        self._aside: Any = None
        self._pool: Any = None

    def __call__(self, run: Callable[[], Outputs], device: torch.device) -> tuple[Callable[[], None], Outputs]:
        """What plays the kernels of `run` again, and the tensors that it writes then.

        Raises:
            RuntimeError: if `run` waits for the device, as what looks at a number does.
        """
        with torch.cuda.device(device):
            if self._aside is None:
                self._aside, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            before, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
            self._aside.wait_stream(before)
            try:
                with torch.cuda.stream(self._aside):
                    run()  # libraries choose and set up kernels in the first pass
                    torch.cuda.set_sync_debug_mode("error")  # to wait is an error now; in a capture it breaks more
                    run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                before.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, self._pool, self._aside, capture_error_mode="thread_local"):
                    outputs = run()
            finally:
                torch.cuda.set_stream(before)
        return graph.replay, outputs


def unrecorded(model: Any) -> str | None:
    """Why passes of a model are not recorded; None if they are."""
    if isinstance(model, GraphedModel):
        return "they are already"
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1:
        return f"it is on {len(devices)} devices"
    kind = devices.pop().type
    return None if kind == "cuda" else f"it is on {kind}"
