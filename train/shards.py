"""Training text on disk: what the target wrote, as flat memory-mapped arrays, and the manifest that says what it is.

    <folder>/manifest.json
    <folder>/train-00000/{ids,mask,state,logz,docs}.bin      <folder>/val-00000/...

| file | type, shape | |
|---|---|---|
| ids | uint16 or uint32 [N] | prompt and answer of each document |
| mask | uint8 [N] | 1 = written by the target |
| state | bfloat16 [G, H], kept as uint16 | the final hidden state that each written token was drawn from |
| logz | float32 [G] | logsumexp over the whole vocabulary at that state |
| docs | int64 [D, 4] | offset in ids, length, offset in state, 1000 x temperature |

A shard is written beside its place and moved there when it is whole, so a run that dies leaves none that is not. Knows
arrays and files; knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specpipe.errors import UserError, one_line

MANIFEST = "manifest.json"
FORMAT, VERSION = "specpipe training text", 1
WIDEST_UINT16 = 65_536


@dataclass(frozen=True)
class Document:
    """A prompt and what the target wrote behind it.

    ids: [T] int64, prompt and answer. prompt: tokens of the prompt. states: [n, H] bfloat16, states[k] is the final
    hidden state that answer token k was drawn from. logz: [n] float32 logsumexp of all logits there. temperature: of
    the draws.
    """

    ids: Tensor
    prompt: int
    states: Tensor
    logz: Tensor
    temperature: float

    @property
    def answer(self) -> Tensor:
        """[n] ids that the target wrote."""
        return self.ids[self.prompt :]


def write_shard(folder: Path, documents: Iterable[Document], vocabulary: int) -> dict[str, Any]:
    """Write one shard at `folder`, which must not exist; what the manifest says of it."""
    documents = list(documents)
    half = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    rows, at_ids, at_state = [], 0, 0
    for document in documents:
        rows.append([at_ids, len(document.ids), at_state, round(1000 * document.temperature)])
        at_ids, at_state = at_ids + len(document.ids), at_state + len(document.states)
    arrays = {
        "ids": np.concatenate([document.ids.numpy() for document in documents]).astype(_ids_type(vocabulary)),
        "mask": np.concatenate([_mask(document) for document in documents]),
        "state": torch.cat([document.states for document in documents]).to(torch.bfloat16).view(torch.uint16).numpy(),
        "logz": torch.cat([document.logz for document in documents]).float().numpy(),
        "docs": np.array(rows, dtype=np.int64),
    }
    for name, array in arrays.items():
        array.tofile(half / f"{name}.bin")
    os.replace(half, folder)
    return describe(folder)


def describe(folder: Path) -> dict[str, Any]:
    """Sizes and checksum of a shard, for the manifest."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.bin")):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            while part := opened.read(1 << 24):
                digest.update(part)
    docs = np.fromfile(folder / "docs.bin", dtype=np.int64).reshape(-1, 4)
    written = int(np.fromfile(folder / "mask.bin", dtype=np.uint8).sum())
    return {
        "documents": len(docs),
        "tokens": int(docs[:, 1].sum()),
        "generated": written,
        "sha256": digest.hexdigest(),
    }


def written_tokens(folder: Path) -> int:
    """How many tokens of a shard the target wrote."""
    return (folder / "logz.bin").stat().st_size // np.dtype(np.float32).itemsize


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write `manifest.json` as a whole."""
    half = folder / f".{MANIFEST}.{os.getpid()}"
    content = {"format": FORMAT, "version": VERSION, **manifest}
    half.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(half, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, None if there is none.

    Raises:
        UserError: if it is of another format.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        form, version = content.get("format"), content.get("version")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{str(file)!r} is damaged: {one_line(error)}.", key="data.folder") from error
    if (form, version) != (FORMAT, VERSION):
        raise UserError(f"{str(file)!r} is a {form} of version {version}, not {FORMAT} {VERSION}.", key="data.folder")
    return content


class Text(Dataset[Document]):
    """The documents of one split, read from disk as they are asked for.

    Args:
        folders: of the split's shards.
        vocabulary: ids of the target; hidden: H of its states.

    Raises:
        UserError: for shards whose parts do not fit each other or the target.
    """

    def __init__(self, folders: Iterable[Path], *, vocabulary: int, hidden: int) -> None:
        self._shards = [_Shard(each, vocabulary, hidden) for each in folders]
        self._places = [(s, d) for s, shard in enumerate(self._shards) for d in range(len(shard.docs))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Document:
        shard, row = self._places[index]
        return self._shards[shard].document(row)

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document, prompt included."""
        return [int(self._shards[shard].docs[row, 1]) for shard, row in self._places]

    @property
    def generated(self) -> int:
        """Tokens that the target wrote."""
        return sum(len(shard.logz) for shard in self._shards)

    def generated_ids(self) -> np.ndarray:
        """All ids that the target wrote, [G]."""
        return np.concatenate([shard.ids[shard.mask.astype(bool)] for shard in self._shards]).astype(np.int64)


class _Shard:
    """One folder of arrays, mapped into memory."""

    def __init__(self, folder: Path, vocabulary: int, hidden: int) -> None:
        try:
            self.ids = np.memmap(folder / "ids.bin", dtype=_ids_type(vocabulary), mode="r")
            self.mask = np.memmap(folder / "mask.bin", dtype=np.uint8, mode="r")
            self._state = np.memmap(folder / "state.bin", dtype=np.uint16, mode="r").reshape(-1, hidden)
            self.logz = np.memmap(folder / "logz.bin", dtype=np.float32, mode="r")
            self.docs = np.fromfile(folder / "docs.bin", dtype=np.int64).reshape(-1, 4)
        except (OSError, ValueError) as error:
            raise UserError(f"{str(folder)!r} cannot be read: {one_line(error)}.", key="data.folder") from error
        if fault := self._fault(vocabulary):
            raise UserError(f"{str(folder)!r} is damaged: {fault}.", key="data.folder")

    def _fault(self, vocabulary: int) -> str | None:
        written = int(self.mask.sum())
        if not written == len(self.logz) == len(self._state):
            return f"{written} tokens are marked as written, with {len(self._state)} states, {len(self.logz)} logz"
        if len(self.mask) != len(self.ids):
            return f"it has {len(self.mask)} marks for {len(self.ids)} ids"
        begins = np.concatenate([[0], self.docs[:, 1].cumsum()])
        if (self.docs[:, 0] != begins[:-1]).any() or (self.docs[:, 1] < 1).any() or begins[-1] != len(self.ids):
            return "its documents do not cover its ids"
        before = np.concatenate([[0], self.mask.cumsum(dtype=np.int64)])
        if (self.docs[:, 2] != before[self.docs[:, 0]]).any():
            return "its documents do not cover its states"
        if int(self.ids.max()) >= vocabulary:
            return f"it holds id {int(self.ids.max())}, but the target's end at {vocabulary - 1}"
        return None

    def document(self, row: int) -> Document:
        at, length, state, temperature = (int(number) for number in self.docs[row])
        prompt = int((self.mask[at : at + length] == 0).sum())
        rows = slice(state, state + length - prompt)
        return Document(
            torch.from_numpy(self.ids[at : at + length].astype(np.int64)),
            prompt,
            torch.from_numpy(self._state[rows].copy()).view(torch.bfloat16),
            torch.from_numpy(self.logz[rows].copy()),
            temperature / 1000,
        )


def _ids_type(vocabulary: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocabulary <= WIDEST_UINT16 else np.uint32


def _mask(document: Document) -> np.ndarray:
    mask = np.ones(len(document.ids), dtype=np.uint8)
    mask[: document.prompt] = 0
    return mask
