"""The C++ program in `layers.cpp`: compiled once on a machine, and what it takes, laid out as it is there.

Knows memory, not models: see `compiled.py` for what is handed over.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specpipe.errors import one_line
from specpipe.verifier.smollm2 import cache_root

SOURCE = Path(__file__).with_name("layers.cpp")
COMPILERS = ("c++", "g++", "clang++")  # tried in turn where CXX names none
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
PANEL = 16  # outputs that stand together


class NoCompiler(RuntimeError):
    """There is no program, for the reason given."""


class Linear(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("in_", c_int32),
        ("out", c_int32),
        ("wide", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        ("before_attention", c_void_p),
        ("before_mlp", c_void_p),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("last_norm", c_void_p),
        *((name, c_int32) for name in ("count", "hidden", "heads", "shared", "size", "inner", "rounds")),
        ("epsilon", c_float),
        ("scaling", c_float),
    )


class Heads(Structure):
    _fields_ = (
        *((name, Linear) for name in ("first", "later", "inner", "outer", "words")),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("token_weight", c_float),
        ("epsilon", c_float),
        ("hidden", c_int32),
        ("rounds", c_int32),
    )


class Pass(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("states", "cos", "sin", "positions", "seats", "keys", "values", "windows")),
        ("scratch", c_void_p),
        ("capacity", c_int64),
        *((name, c_int32) for name in ("texts", "width", "threads", "begin", "end")),
    )


@cache
def program() -> ctypes.CDLL:
    """The compiled functions, from their file if there is one.

    Raises:
        NoCompiler: if there is none, or it fails.
    """
    reasons: list[NoCompiler] = []
    for compiler in _compilers():
        try:
            loaded = _loaded(compiler)
        except NoCompiler as reason:
            reasons.append(reason)
        except OSError as error:  # a cache that takes nothing, a file that is not for this machine
            reasons.append(NoCompiler(one_line(error)))
        else:
            loaded.scratch_for.argtypes = (c_void_p, c_int64, c_int32, c_int32)
            loaded.scratch_for.restype = c_int64
            return loaded
    named = os.environ.get("CXX", "").strip()
    raise reasons[0] if reasons else NoCompiler("there is no C++ compiler" + (f" {named!r} (CXX)" if named else ""))


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    parts = [SOURCE.read_bytes(), repr((FLAGS, _run([*compiler, "--version"]), platform.platform(), _cpu())).encode()]
    name = f"layers-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    folder = cache_root() / (f"compiled-{os.getuid()}" if hasattr(os, "getuid") else "compiled")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not _own(folder):
        with tempfile.TemporaryDirectory() as folder_of_ours:
            return ctypes.CDLL(str(_compile(compiler, Path(folder_of_ours) / name)))
    file = folder / name
    with contextlib.suppress(OSError):  # a file that was cut short is made anew
        if file.is_file() and _own(file):
            return ctypes.CDLL(str(file))
    return ctypes.CDLL(str(_compile(compiler, file)))


def _own(place: Path) -> bool:
    """Whether nobody else can have put code there: what is loaded runs."""
    if not hasattr(os, "geteuid"):
        return True
    found = place.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def _compile(compiler: list[str], file: Path) -> Path:
    """The file, which is there whole or not at all."""
    if sys.stderr.isatty():
        print("specpipe: compiling, once on this machine ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as made:
        part = Path(made) / file.name
        _run([*compiler, *FLAGS, str(SOURCE), "-o", str(part)])
        part.chmod(0o755)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, file)
    return file


def _compilers() -> list[list[str]]:
    """Their commands: the one that CXX names, or those that there are."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NoCompiler(f"CXX: {error}") from error
    if named:
        return [[path, *named[1:]]] if (path := shutil.which(named[0])) else []
    return [[path] for path in map(shutil.which, COMPILERS) if path]


def _run(words: list[str]) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True, errors="replace").stdout
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())[:300] or f"exit code {error.returncode}"
        raise NoCompiler(f"{Path(words[0]).name} failed: {said}") from error
    except OSError as error:
        raise NoCompiler(f"{words[0]}: {error.strerror}") from error


def _cpu() -> str:
    """Its name and abilities, for which `-march=native` compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(line for line in lines[:30] if line.startswith(("model name", "flags", "Features")))


class PanelLinear(nn.Module):
    """Stands for `linear` in inference: bfloat16 numbers in two bytes each, others as float32; sums in float32.

    A row's result does not depend on the rows beside it, to the last bit.

    Args:
        weight: [out, in], bfloat16 or float32.
        bias: [out], or None.
        wide: give float32 results, for who would widen them; rounded to the layer's type all the same.

    Raises:
        NoCompiler: see `program`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._dtype, self._given = weight.dtype, torch.float32 if wide else weight.dtype
        narrow = weight.to(torch.bfloat16)
        self._wide = not torch.equal(narrow.to(weight.dtype), weight)
        self._panels = PAGES.place(_panels(weight.float() if self._wide else narrow))
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._program = program()

    @property
    def struct(self) -> Linear:
        """As the program takes it; good as long as the module lives."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return Linear(self._panels.data_ptr(), bias, self.in_features, self.out_features, self._wide)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = x.reshape(-1, self.in_features).float().contiguous()
        y = torch.empty(len(rows), self.out_features)
        rounds, threads = self._dtype == torch.bfloat16, torch.get_num_threads()
        pointers = (c_void_p(each.data_ptr()) for each in (rows, y))
        self._program.run_linear(ctypes.byref(self.struct), *pointers, len(rows), rounds, threads)
        return y.to(self._given).view(*x.shape[:-1], self.out_features)

    def unpacked(self) -> tuple[Tensor, Tensor | None]:
        """[out, in] the weight, laid out anew as a plain matrix, and [out] the bias."""
        panels = self._panels if self._wide else self._panels.transpose(2, 3).flatten(1, 2)  # [panels, in, 16]
        whole = panels.transpose(1, 2).flatten(0, 1)[: self.out_features, : self.in_features]
        return whole.to(self._dtype), self._bias


class Pages:
    """Memory for weights in pages of 2 MB, where the system has them: small ones cost a third of a pass.

    Linux gives them to who asks. Weights are placed one behind the other; a chunk is free when none of its weights
    live.
    """

    CHUNK, PAGE, LINE = 64 << 20, 2 << 20, 64  # bytes

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, weight: Tensor) -> Tensor:
        """A contiguous copy in such pages; the same where there are none."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return weight.contiguous()
        size = weight.nbytes + -weight.nbytes % self.LINE
        if size > len(self._free):
            self._free = self._chunk(max(size, self.CHUNK))
        place, self._free = self._free[: weight.nbytes], self._free[size:]
        return place.view(weight.dtype).view(weight.shape).copy_(weight)

    def _chunk(self, size: int) -> Tensor:
        try:
            chunk = mmap.mmap(-1, size + self.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"there are no {size} bytes for weights") from error
        with contextlib.suppress(OSError):  # a kernel without them
            chunk.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(chunk, dtype=torch.uint8)
        return whole[-whole.data_ptr() % self.PAGE :][:size]


PAGES = Pages()


def _panels(weight: Tensor) -> Tensor:
    """[panels, in, 16] of [out, in]; in bfloat16 [panels, in / 2, 16, 2]."""
    padded = nn.functional.pad(weight.detach(), (0, 0, 0, -len(weight) % PANEL))
    panels = padded.unflatten(0, (-1, PANEL)).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        panels = panels.unflatten(1, (-1, 2)).transpose(2, 3)
    return panels


def pointers(tensors: Sequence[Tensor]) -> Any:
    """An array of the addresses."""
    return (c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))
