"""What a person can get wrong, in one table: each mistake is one line that names the key or the file, exit code 2, no
traceback, and nothing that was there is written over.

The commands' own tests hold more of the kind, beside what they explain: test_cli.py (words and quoting),
test_prompts.py (rows of files), test_plan.py, test_report_command.py, test_bench.py, test_audit_command.py,
test_training_run.py.
"""

from __future__ import annotations

import gzip
import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.command_line import Run
from tests.stand_ins import saved_tiny, small

TINY = ["target=tiny", "target.device=cpu", "wandb=none", "generation.max_new_tokens=3"]
USUAL = {"decode": TINY, "bench": TINY, "audit": TINY, "train": [*TINY[:3], "trainer.precision=32-true"]}

FILES: dict[str, bytes] = {
    "rows.jsonl": b'{"prompt": "abcabc"}\n{"prompt": "xyzxyz"}\n',
    "turns.jsonl": b'{"turns": ["abc", "def"]}\n',
    "broken.jsonl": b'{"prompt": "fine"}\n{"prompt": \n',
    "both.jsonl": b'{"prompt": "a", "turns": ["b"]}\n',
    "surrogate.jsonl": rb'{"prompt": "half \ud83d of one"}' + b"\n",
    "latin.jsonl": '{"prompt": "Grüße"}\n'.encode("latin-1"),
    "no_prompt.jsonl": b'{"prompt": "fine"}\n{"prompt": ""}\n',
    "cut.jsonl.gz": gzip.compress(b'{"prompt": "abc"}\n' * 99)[:-9],
    "huge.txt": b"one more word " * 400,
    "blank.txt": b" \n\n\t\n",
    "outputs.jsonl": b'{"prompt_ids": [1, 2], "output_ids": [3]}\n{"prompt_ids": [1, 2]}\n',
    "foreign_ids.jsonl": b'{"prompt_ids": [1, 2], "output_ids": [3, 4000]}\n',
    "table.safetensors": b"\x40\x00\x00\x00\x00\x00\x00\x00{",
    "heads/draft.json": b'{"format": "specpipe draft", "version": 1, "kind": ',
    "other_heads/draft.json": b'{"format": "another", "version": 7}',
    "earlier/result.json": b'{"command": "bench", "requests": ',
    "no_config/result.json": b'{"command": "bench"}',
    "no_config/steps.jsonl": b"",
    "damaged/result.json": b'{"command": "audit"}',
    "nothing/README": b"",
    "my/proposer/open.yaml": b"_target_: [\n",
    "my/proposer/latin.yaml": "# größer\n_target_: specpipe.proposers.none.NoProposer\n".encode("latin-1"),
    "my/proposer/mute.yaml": b"_target_: builtins.dict\n",
}
# What this run would write: kept as it is.
KEPT = {f"run/{name}": b"mine" for name in ("result.json", "report.html", "trace.jsonl", "trace.html", "outputs.jsonl")}

# Command and what is typed -> what the line must hold

REFUSED: dict[str, list[str]] = {
    # flags
    "decode --foo": ["no flag '--foo'", "--hydra-help"],
    "decode --multirum seed=1,2": ["no flag '--multirum'", "Did you mean '--multirun'?"],
    "decode --cfg nothing": ["--cfg", "'nothing'", "job"],
    "plan -x": ["no flag '-x'"],
    "decode --experimental-rerun run/config.pickle": ["--experimental-rerun", "pickle"],
    # types and ranges at the top level
    "decode trace=2": ["trace: 2 is not true or false."],
    "decode trace=on": ["trace: 'on' is not true or false."],
    "decode profile=1": ["profile: 1 is not true or false."],
    "decode num_speculative_tokens=1001": ["num_speculative_tokens: 1001 is not a whole number from 0 to 1000."],
    "decode seed=4294967296": ["seed: 4294967296 is not a whole number from 0 to 4294967295."],
    "decode batch_size=0": ["batch_size: 0 is not a whole number from 1 up."],
    "decode batch_size=[1,2]": ["batch_size: [1, 2] is not a whole number."],
    "decode target.seed=4294967296": ["target.seed: 4294967296 is not a whole number from 0 to 4294967295."],
    "decode target.device=cuda:99": ["target.device: 'cuda:99' is not a device of this machine"],
    # generation
    "decode generation.top_k=-1": ["generation.top_k: -1 is not a whole number from 0 up."],
    "decode generation.min_p=1.5": ["generation.min_p: 1.5 is not a number from 0 to 1."],
    "decode generation.temperature=1e-40": ["generation.temperature:", "1e-30"],
    "decode generation.repetition_penalty=0": ["generation.repetition_penalty: 0 is not a number"],
    "decode generation.logit_bias=[7]": ["generation.logit_bias: [7] is not a mapping"],
    "decode generation.logit_bias={99999:1}": ["generation.logit_bias: the target has no id 99999"],
    "decode generation.stop_token_ids=[999]": ["generation.stop_token_ids: the target has no id 999"],
    "decode \"generation.stop=['']\"": ["generation.stop: [''] is not a text or a list of texts"],
    "decode generation.min_new_tokens=9": ["generation.min_new_tokens: 9 is above max_new_tokens (3)."],
    "decode generation.logprobs=-1": ["generation.logprobs: -1 is not a whole number from 0 up."],
    "decode generation.ignore_eos=1": ["generation.ignore_eos: 1 is not true or false."],
    # proposers, samplers and lengths
    "decode sampler.strict=true": ["sampler.strict: no such key; sampler has none."],
    "decode draft_length=adaptive draft_length.probe_every=1": ["draft_length.probe_every: 1 is not"],
    "decode proposer.min_ngram=5": ["proposer.min_ngram: 5 is above max_ngram (3)."],
    "decode proposer=suffix proposer.min_probability=2": ["proposer.min_probability: 2 is not a number from 0 to 1."],
    "decode proposer=table proposer.draw=maybe": ["proposer.draw: 'maybe' is not one of sample, argmax."],
    "decode proposer=table proposer.path=table.safetensors": ["proposer.path: ", "table.safetensors", "cannot be read"],
    "decode proposer=mlp proposer.path=heads": ["proposer.path: ", "draft.json", "damaged"],
    "decode proposer=mlp proposer.path=other_heads": ["proposer.path: ", "is a another of version 7"],
    "decode proposer=layer_skip proposer.layers=9": ["proposer.layers: the target has no layer 8"],
    "decode proposer=draft proposer.model=x proposer.quantize=int8 proposer.dtype=float32": [
        "proposer.quantize: int8 weights need dtype bfloat16, not float32."
    ],
    "decode proposer=cascade proposer.members=[ngram,ngram]": ["proposer.members:", "names one proposer twice."],
    # a user's own option
    "decode --config-dir my proposer=open": ["open.yaml, line 2", "not YAML"],
    "decode --config-dir my proposer=latin": ["'my/proposer/latin.yaml' is not UTF-8 text."],
    "decode --config-dir my proposer=mute": ["proposer: dict has no method 'propose'"],
    # targets that do not fit
    "decode target=hf target.model=7": ["target.model: 7 is neither a directory nor a hub id"],
    "decode target=hf target.model=nothing": ["target.model: ", "could not be loaded"],
    "decode target=hf target.model=MODELS/cut": ["target.model: ", "could not be loaded"],
    "decode target=hf target.model=MODELS/own_code": ["target.model: ", "needs code of its own, which is not run."],
    "decode target=hf target.model=MODELS/few_ids prompt=hello": ["prompt: holds the id 71, but", "ids end at 60."],
    "decode proposer=table": ["proposer.path: ", "another vocabulary"],
    "decode proposer=mlp": ["proposer.path: ", "were trained for"],
    "decode proposer=distilled": ["proposer.path: ", "was trained for"],
    "decode proposer=draft proposer.model=MODELS/foreign": ["proposer.model: ", "has another tokenizer", "too few"],
    "decode prompts.chat=true prompt=hello": ["prompts.chat: the target's tokenizer has no chat template"],
    # prompts
    "decode prompts=text prompts.path=huge.txt prompts.split=file": [
        "prompt: ",
        "do not fit the target's context of 512.",
    ],
    "decode prompts=text prompts.path=blank.txt": ["prompts.path: 'blank.txt' holds no prompts."],
    "decode prompts=jsonl prompts.path=no_prompt.jsonl": ["prompt: number 2: the prompt has no tokens"],
    "decode prompts=jsonl prompts.path=broken.jsonl": ["prompts.path: broken.jsonl, line 2: not JSON"],
    "decode prompts=jsonl prompts.path=both.jsonl": ["prompts.path: both.jsonl, line 1: has both 'prompt' and 'turns'"],
    "decode prompts=jsonl prompts.path=surrogate.jsonl": [r"prompts.path: surrogate.jsonl, line 1: holds '\ud83d'"],
    "decode prompts=jsonl prompts.path=latin.jsonl": ["prompts.path: 'latin.jsonl' is not UTF-8 text."],
    "decode prompts=jsonl prompts.path=cut.jsonl.gz": ["prompts.path: 'cut.jsonl.gz' cannot be read: "],
    "decode prompts=jsonl prompts.path=rows.jsonl prompts.per_category=1": [
        "prompts.per_category: rows.jsonl has rows"
    ],
    "decode prompts=text prompts.path=rows.jsonl prompts.turns=all": ["prompts.turns: ", "prompts has "],
    "decode prompts=spec_bench prompts.path=rows.jsonl": ["prompts.path: rows.jsonl, line 1: has no 'category'."],
    "decode prompts=jsonl prompts.path=rows.jsonl prompt=hello": ["prompt: given beside prompts=jsonl"],
    "decode prompt=-": ["prompt: standard input is not UTF-8 text."],
    "decode prompt=caf\udce9": ["prompt: ", r"\udce9"],
    # wandb
    "decode wandb=online wandb.project=a/b": ["wandb.project: 'a/b' is not a text"],
    "decode wandb=offline wandb.tags=x": ["wandb.tags: 'x' is not a list of words"],
    # bench
    "bench predict=2": ["predict: 2 is not true or false."],
    "bench repeats=1001": ["repeats: 1001 is not a whole number from 1 to 1000."],
    "bench sweep.num_speculative_tokens=[2000]": ["sweep.num_speculative_tokens: 2000 is not a whole number from 1 to"],
    "bench proposers=[{ngram:{max_ngram:0}}]": ["proposers[ngram(max_ngram=0)].max_ngram: 0 is not"],
    "bench resume=rows.jsonl": ["resume: 'rows.jsonl' has no result.json that can be read: Not a directory."],
    "bench resume=earlier": ["resume: result.json in 'earlier' is not JSON."],
    "bench resume=no_config": ["resume: 'no_config' is not the folder of a bench."],
    "bench resume=run": ["resume: 'run' is where this run writes to"],
    # audit
    "audit file=nowhere.jsonl": ["file: 'nowhere.jsonl' cannot be read: No such file or directory."],
    "audit file=latin.jsonl": ["file: 'latin.jsonl' is not UTF-8 text."],
    "audit file=outputs.jsonl": ["file: outputs.jsonl, line 2: needs lists of token ids"],
    "audit file=foreign_ids.jsonl": ["file: foreign_ids.jsonl, line 1: output_ids holds 4000"],
    "audit file=-": ["file: standard input is not UTF-8 text."],
    "audit file=": ["file: is empty; it needs the path of a file."],
    "audit prompts=jsonl prompts.path=turns.jsonl prompts.turns=all": ["prompts.turns: ", "takes prompts.turns=first."],
    # plan
    "plan alpha=0.8": ["cost_ratio: has no value, and needs one"],
    "plan alpha=0.8 cost_ratio=x": ["cost_ratio: 'x' is not a number from 0 up."],
    "plan alpha=0.8 cost_ratio=0.1 max_gamma=1001": ["max_gamma: 1001 is not a whole number from 1 to 1000."],
    "plan alpha=0.8 cost_ratio=0.1 target=tiny": ["target: no such key"],
    "plan from=earlier": ["from: result.json in 'earlier' is not JSON."],
    "plan from=run": ["from: 'run' is where this run writes to"],
    # report
    "report rows.jsonl": ["folders: 'rows.jsonl' has no result.json that can be read: Not a directory."],
    "report nothing": ["folders: 'nothing' has no result.json that can be read: No such file or directory."],
    "report damaged": ["folders: 'damaged' is a run of audit; there is something to compare in runs of"],
    "report run": ["folders: 'run' is where this run writes to"],
    # train
    "train seed=-1": ["seed: -1 is not a whole number from 0 to 4294967295."],
    "train proposer=ngram": ["proposer: "],
    "train student=tabel": ["student: no option 'tabel'", "Did you mean 'table'?"],
    "train student=table loss=kl": ["loss: says how weights are trained, and student=table has none."],
    "train student=table optimizer.lr=1": ["optimizer.lr: says how weights are trained, and student=table has none."],
    "train data.prompts=broken.jsonl": ["data.prompts: broken.jsonl, line 2: not JSON"],
    "train data.prompts=7": ["data.prompts: "],
    "train resume=nothing": ["resume: there is no checkpoints/last.ckpt in "],
    "train num_speculative_tokens=1001": ["num_speculative_tokens: 1001 is not a whole number from 1 to 1000."],
    # dashboard
    "dashboard projekt=x": ["projekt: no such key.", "Did you mean 'project'?"],
    "dashboard name=null": ["name: None is not a text."],
    "dashboard entity=[1]": ["entity: [1] is not a text."],
}


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of `transformers` with something wrong in each."""
    folder = tmp_path_factory.mktemp("models")
    weights = saved_tiny(folder / "cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    saved_tiny(folder / "few_ids")
    small("Llama").float().save_pretrained(folder / "few_ids")
    small("Llama").float().save_pretrained(folder / "foreign")
    letters = {chr(0x430 + n): n for n in range(60)} | {"<|end|>": 60}
    foreign = Tokenizer(models.WordLevel(letters, unk_token="<|end|>"))
    PreTrainedTokenizerFast(tokenizer_object=foreign, eos_token="<|end|>").save_pretrained(folder / "foreign")
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "own_code").mkdir()
    (folder / "own_code" / "config.json").write_text(json.dumps(own))
    (folder / "own_code" / "code.py").write_text("raise SystemExit('this ran')\n")
    return folder


@pytest.fixture
def files(tmp_path: Path) -> dict[Path, bytes]:
    """FILES and KEPT, where the commands are typed."""
    written = {tmp_path / name: content for name, content in (FILES | KEPT).items()}
    for file, content in written.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return written


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_one_line_with_code_2_and_nothing_is_written_over(
    line: str, specpipe: Run, files: dict[Path, bytes], models_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    command, *typed = shlex.split(line.replace("MODELS", str(models_folder)))
    given = {word.partition("=")[0] for word in typed}
    usual = [word for word in USUAL.get(command, []) if word.partition("=")[0] not in given]
    ran = specpipe(command, *usual, "hydra.run.dir=run", *typed)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("specpipe: ")
    for part in REFUSED[line]:
        assert part in ran.err
    assert {file: file.read_bytes() for file in files} == files


def test_the_table_covers_every_command_and_is_long_enough() -> None:
    assert len(REFUSED) >= 60
    assert {line.split()[0] for line in REFUSED} == {"decode", "bench", "audit", "plan", "report", "train", "dashboard"}


def test_a_run_that_is_in_order_writes_over_what_the_table_keeps(specpipe: Run, files: dict[Path, bytes]) -> None:
    """So the table would see it."""
    assert specpipe("decode", *TINY, "prompt=abcabc", "trace=true", "hydra.run.dir=run").code == 0
    written = {file.name for file, content in files.items() if file.read_bytes() != content}
    assert written == {"result.json", "trace.jsonl", "trace.html"}
