"""What the formats of heads have in common: a folder of files, and tensors that must fit together."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specpipe.errors import UserError, integer, one_line

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth")
CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "s.save_file({{k: t.clone() for k, t in torch.load('{old}', weights_only=True).items()}}, '{new}')\""
)


class HeadsCheckpoint:
    """Heads that guess tokens from the target's state, as files hold them. Whoever computes with them calls `to` first.

    Args:
        heads: n.
        hidden: H, size of the states that they start from.
        vocabulary: V, ids of the target that they are for; None if nothing in the files depends on it.
        matrices: what states are multiplied with, by names of the subclass.
        tables: what has a row for each id, likewise.
        ids: [D] int64, the target's id of each row of an output; None: row x is id x.
    """

    def __init__(
        self,
        *,
        heads: int,
        hidden: int,
        vocabulary: int | None,
        matrices: Mapping[str, Tensor],
        tables: Mapping[str, Tensor],
        ids: Tensor | None = None,
    ) -> None:
        self.heads, self.hidden, self.vocabulary, self.ids = heads, hidden, vocabulary, ids
        self._matrices, self._tables = matrices, tables

    @staticmethod
    def recognises(config: Mapping[str, Any]) -> bool:
        """Whether a config.json is one of this format."""
        raise NotImplementedError

    def step(self, i: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Head i: from its carry and the token before its guess to the next carry and what its output is given.

        Args:
            i: 0 .. n-1, in this order.
            carry: [R, H] the target's state for head 0, else what head i - 1 gave; of the matrices' type.
            tokens: [R] y_i, y_0 being the newest committed token and y_i the i-th draft.
        """
        raise NotImplementedError

    def rows(self, i: int) -> Tensor | None:
        """[D, d] the output of head i, the same object where heads share it; None: it is the target's own head."""
        raise NotImplementedError

    def to(self, device: torch.device, dtype: torch.dtype) -> HeadsCheckpoint:
        """Move everything to a device, in place, and the matrices to a type; tables are large and stay in theirs."""
        self._matrices = {name: matrix.to(device, dtype) for name, matrix in self._matrices.items()}
        self._tables = {name: table.to(device) for name, table in self._tables.items()}
        self.ids = None if self.ids is None else self.ids.to(device)
        return self

    def logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Of all n heads, if they have outputs of their own: [N, n, D], from states [N, H] and y_0 .. y_n-1 [N, n].

        All of the matrices' type.
        """
        found, carry = [], states
        for i in range(self.heads):
            carry, features = self.step(i, carry, tokens[:, i])
            rows = self.rows(i)
            assert rows is not None
            found.append(features @ rows.to(features.dtype).T)
        return torch.stack(found, 1)


# ---- files ----


def load_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config, and the tensors of all safetensors files by their names.

    Raises:
        UserError: for a folder that lacks them, with the way to make them from a pickle, and for damaged ones.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder / CONFIG)!r} cannot be read: {one_line(error)}.", key="path") from error
    if not isinstance(config, dict):
        raise UserError(f"{str(folder / CONFIG)!r} is not an object.", key="path")
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held = load_tensors(file)
        if twice := sorted(held.keys() & tensors.keys()):
            raise UserError(f"{str(folder)!r} has {twice[0]} in {file.name} and in another file.", key="path")
        tensors |= held
    if not tensors:
        raise _no_weights(folder)
    return config, tensors


def load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by their names. Raises UserError for one that cannot be read."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {one_line(error)}.", key="path") from error


def save_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config and weights; the tensors must not share memory."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _no_weights(folder: Path) -> UserError:
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if not pickled:
        return UserError(f"{str(folder)!r} has no tensors in files of safetensors.", key="path")
    what = f"{pickled[0]} in {str(folder)!r} is a pickle, which can run code when it is loaded: it is not read here"
    line = CONVERT.format(old=pickled[0], new=f"{Path(pickled[0]).stem}.safetensors")
    return UserError(f"{what}. If you trust it, convert it, in that folder: {line}", key="path")


# ---- what must fit together ----


def whole(config: Mapping[str, Any], *names: str, low: int = 1) -> int:
    """The first of these entries of config.json that is there, a whole number from `low` up; else UserError."""
    name = next((name for name in names if name in config), names[-1])
    try:
        return integer(name, config.get(name), low)
    except UserError as error:
        raise UserError(f"{CONFIG}: {error}", key="path") from error


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same by their names without a prefix that some files have."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def fitted(
    tensors: Mapping[str, Tensor], layout: Mapping[str, str], optional: Collection[str] = (), **known: int
) -> dict[str, int]:
    """The size behind each letter of a layout.

    Args:
        tensors: by their names.
        layout: the shape of each in letters, "VH" being [V, H].
        optional: names of the layout that may be missing.
        known: sizes that the config tells.

    Raises:
        UserError: unless the tensors are those of the layout and no others, and each letter is one size.
    """
    if missing := sorted(layout.keys() - set(optional) - tensors.keys()):
        raise UserError(f"it lacks {len(missing)} of its tensors, {missing[0]} among them.", key="path")
    if surplus := sorted(tensors.keys() - layout.keys()):
        what = f"{surplus[0]} is one of {len(surplus)} tensors that {CONFIG} does not speak of"
        raise UserError(f"{what}: without them it would be another model.", key="path")
    sizes = dict(known)
    for name in [name for name in layout if name in tensors]:
        letters, shape = layout[name], list(tensors[name].shape)
        if len(shape) == len(letters):
            sizes = {**dict(zip(letters, shape, strict=True)), **sizes}
        wanted = [sizes.get(letter, letter) for letter in letters]
        if shape != wanted:
            raise UserError(f"{name} is {shape}, not [{', '.join(map(str, wanted))}].", key="path")
    return sizes
