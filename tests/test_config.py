"""Composing, checking and building; and every file under conf/."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import OmegaConf

from specpipe import load
from specpipe.config import CONF, SCHEMAS, build, compose, plain
from specpipe.errors import UserError, choice, flag, integer, nearest, number
from specpipe.paths import from_start

FILES = sorted(Path(CONF).rglob("*.yaml"))
NO_COMPONENT = {"experiment"}
OPTIONS = [file for file in FILES if file.parent != Path(CONF) and file.parent.name not in NO_COMPONENT]
GIVEN_BY_CODE = {"verifier": {"target"}}


def named(file: Path) -> str:
    return str(file.relative_to(CONF))


class Part:
    def __init__(self, *, size: int, name: str = "x") -> None:
        self.size = integer("size", size, 1)


@pytest.mark.parametrize("file", OPTIONS, ids=named)
def test_option_binds_to_what_it_calls(file: Path) -> None:
    """Each key is a parameter, and each parameter without default has its key (`???` where only the user knows)."""
    values = dict(OmegaConf.to_container(OmegaConf.load(file)))  # type: ignore[arg-type]
    module, _, name = values.pop("_target_").rpartition(".")
    parameters = inspect.signature(getattr(__import__(module, fromlist=[name]), name)).parameters
    given = GIVEN_BY_CODE.get(file.parent.name, set())
    assert set(values) <= set(parameters)
    assert {key for key, p in parameters.items() if p.default is p.empty} <= set(values) | given


@pytest.mark.parametrize("file", FILES, ids=named)
def test_every_choice_has_a_comment(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("#")
    if file.name != "run.yaml":
        for line in text.splitlines():
            if re.match(r"[a-z]\w*: *\S", line) or (re.match(r"  [a-z]\w*: *\S", line) and "experiment" in str(file)):
                assert " # " in line, f"{named(file)}: {line!r} has no comment"


@pytest.mark.parametrize("file", OPTIONS, ids=named)
def test_option_composes_with_every_command_that_has_its_group(file: Path) -> None:
    group = file.parent.name
    needed = {"hf": ["target.model=x"], "draft": ["proposer.model=x"]}.get(file.stem, [])
    if group == "prompts" and file.stem != "demo":
        needed = ["prompts.path=x"]
    for command, schema in SCHEMAS.items():
        if group in [each.name for each in dataclasses.fields(schema)]:
            assert "_target_" in compose(command, [f"{group}={file.stem}", *needed])[group]


EXPERIMENTS = sorted(Path(CONF, "experiment").glob("*.yaml"))
TRAINING = [file for file in EXPERIMENTS if "\ntrainer:" in file.read_text()]
BENCHES = [file for file in EXPERIMENTS if "\nproposers:" in file.read_text()]


@pytest.mark.parametrize("file", TRAINING, ids=named)
def test_training_experiment_only_overrides_and_gives_way_to_the_command_line(file: Path) -> None:
    assert file.read_text().startswith("# @package _global_\n")
    words = [f"experiment={file.stem}", "data.prompts=x.jsonl"]
    assert compose("train", words).trainer.max_steps != compose("train", []).trainer.max_steps
    told = compose("train", [*words, "trainer.max_steps=3", "student=distilled"])
    assert (told.trainer.max_steps, "layers" in told.student) == (3, True)


@pytest.mark.parametrize("file", BENCHES, ids=named)
def test_bench_experiment_only_overrides_and_gives_way_to_the_command_line(file: Path) -> None:
    assert file.read_text().startswith("# @package _global_\n")
    words = [f"experiment={file.stem}", "prompts.path=x.jsonl"]
    assert compose("bench", words).proposers != compose("bench", []).proposers
    told = compose("bench", [*words, "proposers=[table]", "prompts.per_category=7", "sweep.temperature=null"])
    assert (told.proposers, told.prompts.per_category, told.sweep.temperature) == (["table"], 7, None)


@pytest.mark.parametrize("file", [file for file in EXPERIMENTS if file not in (*TRAINING, *BENCHES)], ids=named)
def test_experiment_only_overrides_and_gives_way_to_the_command_line(file: Path) -> None:
    assert file.read_text().startswith("# @package _global_\n")
    config = compose("decode", [f"experiment={file.stem}"])
    assert config.target.dtype == "float32"
    told = compose("decode", [f"experiment={file.stem}", "target.dtype=bfloat16", "proposer=none", "trace=false"])
    assert (told.target.dtype, told.trace) == ("bfloat16", False)
    assert told.proposer._target_.endswith("NoProposer")


def test_plain_gives_nested_values_resolved() -> None:
    """D7."""
    config = OmegaConf.create({"a": {"b": 3, "c": "${a.b}"}, "list": (1, "${a}"), "none": None})
    assert plain(config) == {"a": {"b": 3, "c": 3}, "list": [1, {"b": 3, "c": 3}], "none": None}


@pytest.mark.parametrize("value", ["???", "${nowhere}", "${no.where}"])
def test_plain_names_the_key_without_a_value(value: str) -> None:
    """D7: a missing `???` -> error naming the key."""
    with pytest.raises(UserError) as caught:
        plain(OmegaConf.create({"a": {"b": value}}))
    assert caught.value.key == "a.b"


def test_build_calls_the_target_and_places_its_refusals() -> None:
    node = OmegaConf.create({"_target_": f"{__name__}.Part", "size": 2})
    assert build(node, "part").size == 2
    with pytest.raises(UserError, match=re.escape("part.size: 0 is not a whole number from 1 up.")):
        build(OmegaConf.merge(node, {"size": 0}), "part")
    with pytest.raises(UserError, match=r"part.siez: no such key; part has size, name. Did you mean 'size'"):
        build(OmegaConf.merge(node, {"siez": 0}), "part")
    with pytest.raises(UserError, match=r"part.size: has no value"):
        build(OmegaConf.create({"_target_": f"{__name__}.Part"}), "part")
    assert build(OmegaConf.create({"_target_": f"{__name__}.Part"}), "part", size=4).size == 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.Thing", "No module named 'nowhere'"),
        (f"{__name__}.Pert", "has no 'Pert'. Did you mean 'Part'?"),
        (f"{__name__}.CONF", "is a str, which cannot be called"),
        ("", "cannot be imported"),
    ],
)
def test_a_target_that_cannot_be_called_is_named(target: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        build(OmegaConf.create({"_target_": target}), "part")
    assert message in str(caught.value)
    assert caught.value.key == "part._target_"


def test_a_node_without_target_is_not_a_component() -> None:
    with pytest.raises(UserError, match="part: is not a component"):
        build(OmegaConf.create({"size": 2}), "part")


def test_the_first_error_of_a_users_module_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brokenpkg.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="No module named 'not_installed_anywhere'"):
        build(OmegaConf.create({"_target_": "brokenpkg.Mine"}), "proposer")


def test_composing_changes_nothing_that_is_shared() -> None:
    """C45: the first config is not changed by the second one."""
    first = compose("decode", ["num_speculative_tokens=2"])
    second = compose("decode", ["num_speculative_tokens=5"])
    assert (first.num_speculative_tokens, second.num_speculative_tokens) == (2, 5)


def test_load_works_inside_a_hydra_application_and_leaves_it_alone() -> None:
    with initialize_config_dir(config_dir=CONF, job_name="theirs", version_base="1.2"):
        theirs = GlobalHydra.instance().hydra
        for _ in range(2):
            assert load("proposer=ngram", "target=tiny").gamma == 5
        with pytest.raises(UserError, match="Did you mean 'ngram'"):
            load("proposer=ngrm")
        with pytest.raises(UserError, match="Did you mean 'seed'"):
            load("sead=3")
        assert GlobalHydra.instance().hydra is theirs
        assert str(VersionBase.instance().getbase()) == "1.2"
        assert JobRuntime.instance().get("name") == "theirs"
        assert hydra_compose("decode").seed == 0
    assert not GlobalHydra.instance().is_initialized()
    assert load("target=tiny").gamma == 5


def test_a_path_is_meant_from_where_the_command_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_start("a/b") == tmp_path / "a" / "b"
    assert from_start("/a/b") == Path("/a/b")
    assert from_start("~/a") == Path.home() / "a"


def test_the_nearest_match_knows_slips_and_last_parts() -> None:
    keys = ["generation.temperature", "proposer.max_ngram", "seed"]
    assert nearest("temperature", keys) == " Did you mean 'generation.temperature'?"
    assert nearest("max_ngrm", keys) == " Did you mean 'proposer.max_ngram'?"
    assert nearest("sede", keys) == " Did you mean 'seed'?"
    assert nearest("zzz", keys) == ""


@pytest.mark.parametrize("value", [True, 2.0, "2", None, 0, 10])
def test_integer_refuses(value: object) -> None:
    with pytest.raises(UserError, match=r"key: .* is not a whole number from 1 to 9"):
        integer("key", value, 1, 9)


@pytest.mark.parametrize("value", [True, "x", None, -1, float("nan"), float("inf"), 0])
def test_number_refuses(value: object) -> None:
    """C17: T = -1 or NaN -> error that names the option."""
    with pytest.raises(UserError, match=r"key: .* is not a number above 0 to 1"):
        number("key", value, 0, 1, above=True)


def test_values_that_fit_pass() -> None:
    """C17: "0.0" from the command line is 0."""
    assert number("key", "0.0", 0) == 0.0
    assert integer("key", 3, 1, 9) == 3
    assert flag("key", False) is False
    assert choice("key", "a", ["a", "b"]) == "a"
    with pytest.raises(UserError, match=r"key: 'bf16' is not one of float32, bfloat16. Did you mean 'bfloat16'"):
        choice("key", "bf16", ["float32", "bfloat16"])
    with pytest.raises(UserError, match="key: 1 is not true or false"):
        flag("key", 1)
