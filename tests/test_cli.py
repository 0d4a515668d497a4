"""The command line: what is typed, what comes back, and the exit code."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from specpipe import cli
from specpipe.commands import decode

ROOT = Path(cli.__file__).resolve().parent.parent
TINY = ["target=tiny", "wandb=none", "generation.max_new_tokens=3"]
ROWS = '{"prompt": "abcabc"}\n{"prompt": "xyzxyz"}\n'


@pytest.fixture
def seen(monkeypatch):
    """Configs that reached the command; nothing is decoded."""
    configs: list = []
    monkeypatch.setattr(decode, "run", lambda config: configs.append(config) or 0)
    return configs


def result_in(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


# What is wrong -> what the line must hold

REFUSED = {
    "proposer=ngrm": ["proposer:", "'ngrm'", "ngram, none", "Did you mean 'ngram'?"],
    "num_speculative_tokes=3": ["num_speculative_tokes:", "Did you mean 'num_speculative_tokens'?"],
    "proposer.max_ngrm=3": ["proposer.max_ngrm:", "max_ngram, min_ngram", "Did you mean 'proposer.max_ngram'?"],
    "generation.temprature=0": ["generation.temprature:", "Did you mean 'generation.temperature'?"],
    "temperature=0": ["temperature:", "Did you mean 'generation.temperature'?"],
    "proposer=none proposer.max_ngram=3": ["proposer.max_ngram:", "proposer has none."],
    "verifier=packed verifier.prepak=true": ["verifier.prepak:", "Did you mean 'verifier.prepack'?"],
    "hydra.foo=3": ["hydra.foo: no such key"],
    "hydra.job.chdr=true": ["hydra.job.chdr:", "Did you mean 'hydra.job.chdir'?"],
    "hydra/launcher=basik": ["hydra/launcher:", "Did you mean 'basic'?"],
    "seed=abc": ["seed: 'abc' is not a whole number."],
    "seed=null": ["seed: None is not a whole number."],
    "num_speculative_tokens=2.5": ["num_speculative_tokens: 2.5 is not a whole number."],
    "trace=maybe": ["trace: 'maybe' is not true or false."],
    "prompt=[1,2]": ["prompt: [1, 2] is not a text."],
    "proposer.max_ngram=x": ["proposer.max_ngram: 'x' is not a whole number from 1 to 1000."],
    "generation.temperature=-1": ["generation.temperature: -1 is not a number from 0 up."],
    "generation.temperature=nan": ["generation.temperature: nan is not a number"],
    "generation.top_p=0": ["generation.top_p: 0 is not a number above 0 to 1."],
    "generation.max_new_tokens=-3": ["generation.max_new_tokens: -3 is not"],
    "generation.stop_token_ids=5": ["generation.stop_token_ids: 5 is not a list of token ids"],
    "num_speculative_tokens=-1": ["num_speculative_tokens: -1 is not a whole number from 0 to 1000."],
    "seed=-1": ["seed: -1 is not a whole number from 0 to 4294967295."],
    "target.dtype=bf16": ["target.dtype: 'bf16'", "Did you mean 'bfloat16'?"],
    "target.device=tpu": ["target.device: 'tpu' is not a device of this machine"],
    "target=hf": ["target.model: has no value, and needs one"],
    "prompts=jsonl": ["prompts.path: has no value, and needs one"],
    "prompts=jsonl prompts.path=nowhere.jsonl": ["prompts.path: 'nowhere.jsonl' cannot be read: No such file"],
    "prompts=jsonl prompts.path=.": ["prompts.path: '.' cannot be read: Is a directory"],
    "prompts.limit=0": ["prompts.limit: 0 is not a whole number from 1 up."],
    "prompts.chat=maybe prompt=hi": ["prompts.chat: 'maybe' is not true or false."],
    "prompt=": ["prompt: "],
    "~proposer": [
        "proposer: is needed; there are cascade, distilled, draft, layer_skip, mlp, ngram, none, suffix, table."
    ],
    "~seed": ["seed: was removed, and is needed."],
    "+foo=3": ["foo: no such key."],
    "+proposer.foo=3": ["proposer.foo: no such key; proposer has max_ngram, min_ngram."],
    "+seed=3": ["seed: is there already; leave out the +."],
    "seed=1 seed=2": ["seed: given twice: seed=1 and seed=2."],
    "proposer=none proposer=ngram": ["proposer: given twice"],
    "proposer=null": [
        "proposer: None is not one of cascade, distilled, draft, layer_skip, mlp, ngram, none, suffix, table."
    ],
    "proposer=none,ngram": ["proposer: 'none,ngram'", "-m"],
    "proposer._target_=nowhere.Mine": ["proposer._target_: 'nowhere.Mine' cannot be imported"],
    "proposer._target_=os.sep": ["proposer._target_: 'os.sep' is a str, which cannot be called."],
    "experiment=foo": ["experiment: no option 'foo'; there are bench_batches"],
    "--config-dir nowhere": ["nowhere' not found"],
    "--config-name foo": ["'foo'"],
    "--resolve": ["--resolve"],
    "hydra.run.dir=/dev/null/x": ["/dev/null"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_input_is_one_line_and_code_2(specpipe, words: str) -> None:
    """D2 and DESIGN section 2: key, value, what is allowed, nearest match; no traceback."""
    typed = shlex.split(words)
    defaults = [word for word in TINY if word.split("=")[0] not in {each.split("=")[0] for each in typed}]
    ran = specpipe("decode", *defaults, *typed)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("specpipe: ")
    for part in REFUSED[words]:
        assert part in ran.err


NGRAM = "_target_: specpipe.proposers.ngram.NgramProposer"
UNQUOTED = ["a=b", "a, b", "{a", "it's", "a=b, {c} #1 @x: 50%", '"open', "out/epoch=0-step=10.ckpt"]


@pytest.mark.parametrize("value", UNQUOTED)
def test_unquoted_special_characters_get_a_hint_at_quoting(specpipe, value: str) -> None:
    """D3, D4."""
    ran = specpipe("decode", *TINY, f"prompt={value}")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "quotes inside quotes" in ran.err


def test_words_that_the_shell_split_get_a_hint_at_quoting(specpipe) -> None:
    """D3."""
    ran = specpipe("decode", *TINY, "prompt=What", "is", "it?")
    assert ran.code == 2
    assert "'is' is not key=value as Hydra reads it; put a value with special characters into quotes" in ran.err


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ('prompt="a=b, {c} #1 @x: 50%"', "a=b, {c} #1 @x: 50%"),
        ('prompt="two\nlines"', "two\nlines"),
        (r'prompt="two\nlines"', r"two\nlines"),
        (r'prompt="\${HOME}"', "${HOME}"),
        ('prompt="say \\"hi\\""', 'say "hi"'),
        ("prompt='it\\'s'", "it's"),
        ("prompt=What is the capital of France?", "What is the capital of France?"),
        ('prompt="out/epoch=0-step=10.ckpt"', "out/epoch=0-step=10.ckpt"),
        ("prompt=7", "7"),
    ],
)
def test_a_prompt_reaches_the_program_unchanged(specpipe, seen, word: str, text: str) -> None:
    """D3, D4. Inside the quotes a newline is a newline; backslash and n stay two characters."""
    assert specpipe("decode", *TINY, word).code == 0
    assert seen[0].prompt == text


def test_an_interpolation_in_a_prompt_says_how_to_escape_it(specpipe) -> None:
    """D3."""
    ran = specpipe("decode", *TINY, 'prompt="${HOME}"')
    assert ran.code == 2
    assert ran.err.startswith("specpipe: prompt: ")
    assert r"\${...}" in ran.err


def test_lists_are_typed_in_brackets(specpipe, seen) -> None:
    """D3."""
    assert specpipe("decode", *TINY, "generation.stop_token_ids=[2,7]").code == 0
    assert list(seen[0].generation.stop_token_ids) == [2, 7]


@pytest.mark.parametrize(
    ("option", "content", "parts"),
    [
        ("experiment/e", "num_speculative_tokes: 3", ["num_speculative_tokens", "In experiment/e.yaml"]),
        ("experiment/e", "seed: abc", ["seed: 'abc' is not a whole number"]),
        ("experiment/e", "proposer: {max_ngrm: 3}", ["proposer.max_ngrm", "Did you mean 'max_ngram'"]),
        ("proposer/p", f"{NGRAM}\nmax_ngrm: 3", ["proposer.max_ngrm", "Did you mean 'max_ngram'"]),
        ("proposer/p", "max_ngram: 3", ["proposer: is not a component"]),
        ("proposer/p", "a: [", ["p.yaml, line 1", "not YAML"]),
    ],
)
def test_the_same_slip_in_a_yaml_file_is_refused_likewise(
    specpipe, tmp_path: Path, option: str, content: str, parts: list[str]
) -> None:
    """D2."""
    file = tmp_path / "my" / f"{option}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{content}" if "experiment" in option else content)
    ran = specpipe("decode", "--config-dir", "my", *TINY, option.replace("/", "="))
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    for part in parts:
        assert part in ran.err


def test_full_error_shows_the_traceback_and_is_left_as_it_was(specpipe, monkeypatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for words in ("proposer=ngrm", "seed=-1"):
        ran = specpipe("decode", *TINY, words)
        assert ran.code == 2
        assert "Traceback" in ran.err
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_a_mistake_of_the_program_keeps_its_traceback(specpipe, monkeypatch) -> None:
    def broken(config: object) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr(decode, "run", broken)
    with pytest.raises(ValueError, match="a bug"):
        specpipe("decode", *TINY)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_is_130(specpipe, monkeypatch, number: int) -> None:
    monkeypatch.setattr(decode, "run", lambda config: signal.raise_signal(number))
    ran = specpipe("decode", *TINY)
    assert (ran.code, ran.err) == (130, "interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_command_sees_the_words_as_typed(specpipe, monkeypatch) -> None:
    words: list[str] = []
    monkeypatch.setattr(decode, "run", lambda config: words.extend(sys.argv) or 0)
    assert specpipe("decode", *TINY, "seed=3").code == 0
    assert words == ["specpipe", "decode", *TINY, "seed=3"]
    assert sys.argv == words


def test_a_sweep_reports_its_worst_job(specpipe, monkeypatch):
    """A bias in one job (1) outweighs wrong input (2) and too little data (3) in others."""
    codes = iter([3, 1, 0])
    monkeypatch.setattr(decode, "run", lambda config: next(codes))
    assert specpipe("decode", "-m", *TINY, "seed=1,2,3", "hydra.sweep.dir=sweep").code == 1


def test_usage_version_and_unknown_command(specpipe) -> None:
    assert specpipe().code == 2
    assert "decode" in specpipe("--help").out
    assert specpipe("--version").out.startswith("specpipe ")
    ran = specpipe("decod")
    there = ", ".join(cli.COMMANDS)
    assert (ran.code, ran.err) == (2, f"specpipe: no command 'decod'; there is {there}. Did you mean 'decode'?\n")


def test_help_shows_groups_options_and_keys(specpipe) -> None:
    for words in (["--help"], ["proposer=none", "-h"], ["--help", "target=tiny"]):
        ran = specpipe("decode", *words)
        assert ran.code == 0
        assert ran.out.startswith("specpipe decode: ")
        proposers = "proposer: cascade, distilled, draft, layer_skip, mlp, ngram, none, suffix, table"
        for part in (proposers, "target: hf, smollm2, tiny", "num_speculative_tokens: 5", "--config-dir"):
            assert part in ran.out


def test_hydras_flags_work(specpipe) -> None:
    assert "max_ngram: 7" in specpipe("decode", "proposer.max_ngram=7", "--cfg", "job").out
    assert "app_name" not in specpipe("decode", "--cfg", "hydra").out
    assert "Defaults Tree" in specpipe("decode", "--info").out
    assert "Hydra" in specpipe("decode", "--hydra-help").out
    resolved = specpipe("decode", r'prompt="\${HOME}"', "--resolve", "--cfg", "job")
    assert "prompt: ${HOME}" in resolved.out
    assert specpipe("decode", "--cfg", "nothing").code == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("specpipe ", set(cli.COMMANDS)),
        ("specpipe a", {"audit"}),
        ("specpipe plan cost", {"cost_ratio="}),
        ("specpipe de", {"decode"}),
        ("specpipe decode proposer=n", {"proposer=ngram", "proposer=none"}),
        ("specpipe decode proposer.m", {"proposer.max_ngram=", "proposer.min_ngram="}),
        ("specpipe nothing pro", set()),
    ],
)
def test_tab_completes_commands_groups_and_keys(specpipe, monkeypatch, line: str, words: set[str]) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    ran = specpipe("-sc", "query=bash")
    assert (ran.code, set(ran.out.split())) == (0, words)


def test_completion_installs_for_the_program(specpipe) -> None:
    for words in (["-sc", "install=bash"], ["decode", "-sc", "install=bash"]):
        assert specpipe(*words).out.rstrip().endswith("hydra_bash_completion specpipe")


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_paths_are_meant_from_the_start_folder_and_outputs_go_to_the_run_folder(
    specpipe, tmp_path: Path, chdir: str
) -> None:
    """D1."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "rows.jsonl").write_text(ROWS)
    os.chdir(tmp_path / "start")
    words = [*TINY, "prompts=jsonl", "prompts.path=rows.jsonl", f"hydra.job.chdir={chdir}", "trace=true"]
    assert specpipe("decode", *words, f"hydra.run.dir={tmp_path / 'run'}").code == 0
    assert files_in(tmp_path / "start") == {"rows.jsonl"}
    assert [request["prompt"] for request in result_in(tmp_path / "run")["requests"]] == ["abcabc", "xyzxyz"]
    assert (tmp_path / "run" / "trace.jsonl").is_file()
    assert specpipe("decode", *words).code == 0
    others = files_in(tmp_path / "start") - {"rows.jsonl"}
    assert others
    assert all(file.startswith("outputs/decode/") for file in others)


def test_a_sweep_has_a_folder_for_each_job(specpipe, tmp_path: Path) -> None:
    """D5 for folders. The flag may stand anywhere."""
    ran = specpipe("decode", *TINY, "prompt=abcabc", "-m", "proposer=none,ngram")
    assert ran.code == 0
    (sweep,) = (tmp_path / "outputs" / "decode").iterdir()
    configs = [OmegaConf.load(sweep / job / ".hydra" / "config.yaml") for job in "01"]
    targets = [config.proposer._target_.split(".")[-1] for config in configs]
    assert targets == ["NoProposer", "NgramProposer"]
    assert all(result_in(sweep / job)["requests"] for job in "01")
    assert "HYDRA" not in ran.out


def test_a_failed_job_is_one_line_and_the_others_go_on(specpipe, seen) -> None:
    ran = specpipe("decode", "-m", *TINY, "seed=3,-1,4")
    assert ran.code == 2
    mistakes = [line for line in ran.err.splitlines() if "[HYDRA]" not in line]
    assert mistakes == ["specpipe: job 1: seed: -1 is not a whole number from 0 to 4294967295."]
    assert [config.seed for config in seen] == [3, 4]


def test_an_option_that_no_job_has_stops_the_sweep(specpipe, seen) -> None:
    ran = specpipe("decode", "-m", *TINY, "proposer=none,ngrm")
    assert ran.code == 2
    assert "Did you mean 'ngram'?" in ran.err
    assert not seen


def test_an_experiment_runs_by_name(specpipe, seen) -> None:
    assert specpipe("decode", "experiment=greedy_float32", "num_speculative_tokens=2").code == 0
    assert (seen[0].target.dtype, seen[0].num_speculative_tokens, seen[0].trace) == ("float32", 2, True)


# In a process of its own

MINE = """\
from specpipe.draft import Draft

class Mine:
    def __init__(self, *, token: int) -> None:
        self.token = token

    def propose(self, sequences, lengths):
        return Draft.of([[self.token] * k for k in lengths])
"""


SHOW_CONFIG = """
import atexit, sys
from specpipe import cli
heavy = {"torch", "transformers", "wandb"}
atexit.register(lambda: print(cli.CONF, sorted(heavy & set(sys.modules)), sep="\\n"))
sys.argv = ["specpipe", "decode", "--cfg", "job"]
sys.exit(cli.main())
"""


def start(command: list[str], folder: Path, installed: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """A proposer of the user's own: the words that choose it."""
    (tmp_path / "myconf" / "proposer").mkdir(parents=True)
    (tmp_path / "myconf" / "proposer" / "mine.yaml").write_text("_target_: mypkg.Mine\ntoken: 7\n")
    (tmp_path / "mypkg.py").write_text(MINE)
    chosen = ["--config-dir", "./myconf", "proposer=mine"]
    return [*chosen, *TINY, "prompt=abc", "hydra.run.dir=run", "hydra.job.chdir=true"]


def test_a_users_own_class_next_to_the_command_is_a_proposer(tmp_path: Path, mine: list[str]) -> None:
    """DESIGN section 3, as a module; also with chdir (D1)."""
    ran = start([sys.executable, "-m", "specpipe", "decode", *mine], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert result_in(tmp_path / "run")["summary"]["spec_decode"]["num_draft_tokens"] > 0


def test_the_console_script_finds_the_users_class_too(specpipe, tmp_path: Path, mine: list[str], monkeypatch) -> None:
    """As an installed script starts: the folder of the script, not the current one, is on the path."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    ran = specpipe("decode", *mine)
    sys.modules.pop("mypkg", None)
    assert ran.code == 0
    assert result_in(tmp_path / "run")["summary"]["spec_decode"]["num_draft_tokens"] > 0


def test_the_wheel_shows_its_config_without_importing_model_code(tmp_path: Path) -> None:
    """The wheel holds conf/ and data and runs from any folder; `--cfg job` needs nothing heavier than Hydra."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        assert {"specpipe/conf/decode.yaml", "specpipe/demo.jsonl", "specpipe/py.typed"} <= set(content.namelist())
        content.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    ran = start([sys.executable, "-c", SHOW_CONFIG], tmp_path / "empty", tmp_path / "installed")
    assert ran.returncode == 0, ran.stderr
    assert "num_speculative_tokens: 5" in ran.stdout
    assert ran.stdout.splitlines()[-2:] == [str(tmp_path / "installed" / "specpipe" / "conf"), "[]"]
    assert not list((tmp_path / "empty").iterdir())
