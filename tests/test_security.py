"""What must not happen: code run that nobody chose, files outside the run folder, secrets in what is kept.

Downloads are checked by hash in test_smollm2.py; that pages hold data as text alone is shown in the tests of pages.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from specpipe import cli
from specpipe.errors import UserError
from specpipe.verifier.targets import hf
from tests.command_line import Run
from tests.stand_ins import saved_tiny

ROOT = Path(cli.__file__).resolve().parent.parent
SOURCES = sorted(file for folder in ("specpipe", "train", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
TINY = ["target=tiny", "target.device=cpu", "generation.max_new_tokens=3"]

# ---- nothing that is read runs ----

UNPICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_IT = {"torch.hub.load", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load", "eval", "exec"}


def faults(code: str) -> Iterator[str]:
    """Where some code would run what it reads: pickles, YAML with constructors, source text, a model's own modules."""
    for node in ast.walk(ast.parse(code)):
        names = [each.name for each in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (f"imports {name}" for name in names if name.partition(".")[0] in UNPICKLING)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called in RUNS_IT:
            yield f"calls {called}"
        if called == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            yield "np.load with allow_pickle"
        if called.endswith(".fit") and "ckpt_path" in given and given.get("weights_only") != "True":
            yield "a checkpoint is resumed without weights_only=True"
        if given.get("trust_remote_code", "False") != "False":
            yield "trust_remote_code"


def test_no_file_of_ours_runs_what_it_reads() -> None:
    assert len(SOURCES) > 80
    assert {str(file): found for file in SOURCES if (found := list(faults(file.read_text("utf-8"))))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "trainer.fit(module, ckpt_path=last)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=asked)",
    ],
)
def test_each_way_to_run_what_is_read_would_be_found(code: str) -> None:
    assert list(faults(code))


OWN = "from pathlib import Path\nPath({!r}).touch()\nclass Own: pass\n"


def with_code_of_its_own(folder: Path, file: str, **told: object) -> Path:
    """The target `tiny` with a module that leaves `ran` beside the folder, and what names it in one of its files."""
    saved_tiny(folder)
    (folder / "own.py").write_text(OWN.format(str(folder.parent / "ran")))
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | told))
    return folder


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (
            "config.json",
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}},
        ),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}),
    ],
)
def test_a_model_that_needs_code_of_its_own_is_refused_and_asks_nothing(
    file: str, told: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a terminal, where the library would ask whether to run it."""
    folder = with_code_of_its_own(tmp_path / "model", file, **told)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    with pytest.raises(UserError, match=r"^model: (the tokenizer of )?'.*' needs code of its own, which is not run\.$"):
        hf(model=str(folder), dtype="float32", device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_model_of_a_known_kind_is_loaded_without_the_code_that_it_brings(tmp_path: Path) -> None:
    folder = with_code_of_its_own(tmp_path / "model", "config.json", auto_map={"AutoModelForCausalLM": "own.Own"})
    assert type(hf(model=str(folder), dtype="float32", device="cpu").model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


# ---- nothing is written elsewhere ----


def files_below(folder: Path, but: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if not file.is_relative_to(but)}


@pytest.mark.parametrize("wandb", ["none", "offline"])
def test_names_in_a_data_file_do_not_lead_out_of_the_run_folder(
    wandb: str, specpipe: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "start").mkdir()
    os.chdir(tmp_path / "start")
    outside = ["../../escaped", str(tmp_path / "escaped"), "a/../../../escaped", "..", "\x00/escaped", "~/escaped"]
    rows = [{"prompt": f"p {name}", "category": name, "name": name, "id": name} for name in outside]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = files_below(tmp_path, tmp_path / "start" / "run")
    words = [*TINY, f"wandb={wandb}", "prompts=jsonl", "prompts.path=rows.jsonl", "hydra.run.dir=run"]
    assert specpipe("decode", *words, "trace=true").code == 0
    if wandb == "none":
        assert specpipe("bench", *words, "proposers=[ngram]", "repeats=1").code == 0
    assert files_below(tmp_path, tmp_path / "start" / "run") == before
    assert not any("escaped" in file.name for file in tmp_path.rglob("*"))


# ---- no secret is kept ----

SECRETS = {
    "WANDB_API_KEY": "5e" * 20,
    "HF_TOKEN": "hf_thisMustNotBeKept",
    "HUGGING_FACE_HUB_TOKEN": "hf_norThis",
    "AWS_SECRET_ACCESS_KEY": "norThisOne",
    "HTTPS_PROXY": "http://me:myPassword@proxy.invalid:1",
}


def test_secrets_of_the_environment_are_in_no_file_and_on_no_screen(
    specpipe: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    words = [*TINY, "prompt=hello", "trace=true", "wandb=offline", "hydra.run.dir=run", "hydra.verbose=true"]
    ran = specpipe("decode", *words)
    assert ran.code == 0
    kept = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert any(b"hello" in content for content in kept)
    for secret in (*SECRETS.values(), "myPassword"):
        assert not any(secret.encode() in content for content in [*kept, ran.out.encode(), ran.err.encode()]), secret
