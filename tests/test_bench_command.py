"""`specpipe bench` from the command line: what it decodes, writes, keeps and says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specpipe import cli
from specpipe.bench import rounds
from specpipe.bench.record import FILE
from specpipe.draft import Draft
from specpipe.verifier.reader import Reader
from tests.stand_ins import saved_tiny

QUICK = ["target=tiny", "target.device=cpu", "target.dtype=float32", "wandb=none", "generation.max_new_tokens=10"]
ROWS = "".join(
    json.dumps({"prompt": prompt, "category": category}) + "\n"
    for prompt, category in (("abcabcabc", "a"), ("xyzxyzx", "b"), ("aaaa bbbb", "a"))
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `specpipe bench` in a folder of its own with three prompts; (exit code, result.json, what was printed)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rows.jsonl").write_text(ROWS)

    def run(*words: str, out: str = "run") -> tuple[int, dict[str, Any], Any]:
        given = ["prompts=jsonl", "prompts.path=rows.jsonl", *QUICK, f"hydra.run.dir={out}", *words]
        monkeypatch.setattr(sys, "argv", ["specpipe", "bench", *given])
        capsys.readouterr()
        code = cli.main()
        file = tmp_path / out / "result.json"
        return code, json.loads(file.read_text()) if file.is_file() else {}, capsys.readouterr()

    return run


def test_cells_hold_what_was_asked_for_and_plain_decoding_beside_it(bench: Any, tmp_path: Path) -> None:
    code, result, said = bench(
        "proposers=[ngram,suffix]", "sweep.num_speculative_tokens=[1,3]", "sweep.temperature=[0,1]", "repeats=2"
    )
    assert code == 0
    names = [(c["temperature"], c["proposer"], c["num_speculative_tokens"]) for c in result["cells"]]
    assert names == [
        (t, proposer, gamma)
        for t in (0.0, 1.0)
        for proposer, gamma in (("none", 0), ("ngram", 1), ("ngram", 3), ("suffix", 1), ("suffix", 3))
    ]
    assert result["rounds"] == {"done": 4, "wanted": 4}
    assert result["prompts"] == {"count": 3, "categories": ["a", "b"], "max_new_tokens": 10}
    for cell in result["cells"]:
        figures = cell["summary"]
        assert cell["repeats"] == 2
        assert set(cell["categories"]) == {"a", "b"}
        assert figures["new_tokens"] == 60  # three prompts, twice
        assert figures["speedup"]["mean"] > 0
        if cell["proposer"] == "none":
            assert figures["speedup"] == {"mean": 1.0, "low": None, "high": None}
            assert "predicted_speedup" not in figures
        else:
            assert figures["speedup"]["low"] <= figures["speedup"]["mean"] <= figures["speedup"]["high"]
            assert figures["predicted_speedup"]["costs"] > 0
            assert cell["temperature"] or figures["identical_texts"] == figures["texts"] == 6
    assert len(result["summary"]["best"]) == 2
    assert result["summary"]["speedup"] == result["summary"]["best"][0]["speedup"]
    assert result["summary"]["answer"] in said.out
    assert (tmp_path / "run" / "report.html").is_file()
    assert {cost["proposer"] for cost in result["costs"]} == {"none", "ngram", "suffix"}


def test_cells_take_turns_in_shuffled_order_and_warm_up_is_not_counted(bench: Any, tmp_path: Path) -> None:
    code, _, _ = bench("proposers=[ngram,suffix]", "repeats=2", "predict=false")
    assert code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    turns = [(line["round"]["repeat"], line["stretch"], line["cell"]["proposer"]) for line in lines if "cell" in line]
    stretches = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(stretches) == 6
    for stretch in stretches:
        assert len({(repeat, number) for repeat, number, _ in stretch}) == 1
        assert {name for *_, name in stretch} == {"none", "ngram", "suffix"}
    assert len({tuple(name for *_, name in stretch) for stretch in stretches}) > 1


class Remembers:
    """Drafts what the request before it put out; wants a new one in every cell and repeat."""

    made: list[Remembers] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}
        self.made.append(self)

    def propose(self, sequences: list[Any], lengths: list[int]) -> Draft:
        self.seen |= {id(sequence): sequence for sequence in sequences}
        return Draft.of([[1] * min(1, k) for k in lengths])


def test_what_remembers_starts_anew_in_each_cell_and_repeat(bench: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own" / "proposer"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"_target_: {__name__}.Remembers\n")
    Remembers.made.clear()
    words = ["proposers=[mine]", "sweep.num_speculative_tokens=[1,2]", "repeats=2", "predict=false"]
    code, _, _ = bench("--config-dir", str(tmp_path / "own"), *words)
    assert code == 0
    used = [len(each.seen) for each in Remembers.made if each.seen]
    assert used == [3, 3, 1, 1, 3, 3]  # all prompts in two cells, twice; before that a prompt to warm up in each


def test_a_batch_is_decoded_together_and_alone_the_texts_are_the_same(bench: Any) -> None:
    code, result, _ = bench("proposers=[ngram]", "sweep.batch_size=[1,2]", "repeats=1")
    assert code == 0
    assert [(c["batch_size"], c["proposer"]) for c in result["cells"]] == [
        (size, name) for size in (1, 2) for name in ("none", "ngram")
    ]
    assert all(c["summary"]["identical_texts"] == 3 for c in result["cells"] if c["proposer"] == "ngram")


def test_all_turns_of_a_conversation_are_one_prompt(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"turns": ["abc", "def"]}\n{"turns": ["xyz"]}\n')
    code, result, _ = bench("proposers=[ngram]", "prompts.turns=all", "repeats=1")
    assert code == 0
    assert result["cells"][0]["summary"]["new_tokens"] == 30


def test_a_killed_bench_goes_on_and_says_what_an_undisturbed_one_says(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["proposers=[ngram]", "sweep.temperature=[0,1]", "repeats=1", "predict=false"]
    _, whole, _ = bench(*words, out="whole")
    real, left = rounds.Decoding.run, [8]

    def killed(self: Any, start: int, stop: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, start, stop)

    monkeypatch.setattr(rounds.Decoding, "run", killed)
    code, cut, _ = bench(*words, out="cut")
    assert code == 130
    assert cut["rounds"] == {"done": 1, "wanted": 2}
    assert [c["temperature"] for c in cut["cells"]] == [0.0, 0.0, 1.0, 1.0]
    assert [c["summary"]["texts"] for c in cut["cells"]] == [None, 3, None, None]
    assert (tmp_path / "cut" / "report.html").is_file()
    monkeypatch.setattr(rounds.Decoding, "run", real)
    code, later, _ = bench("resume=cut", out="later")
    assert code == 0
    tokens = [c["summary"]["new_tokens"] for c in later["cells"]]
    assert tokens == [c["summary"]["new_tokens"] for c in whole["cells"]]
    kept = [line for line in (tmp_path / "cut" / FILE).read_text().splitlines() if '"temperature":0.0' in line]
    assert (tmp_path / "later" / FILE).read_text().splitlines()[: len(kept)] == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=nowhere"], "resume: "),
        (["proposers=[nngram]"], "proposers[0]: no option 'nngram'"),
        (["prompt=abc"], "prompt: given beside prompts=jsonl"),
        (["repeats=0"], "repeats: "),
        (["sweep.gamma=[1]"], "sweep.gamma: no such key"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(bench: Any, words: list[str], message: str, tmp_path: Path) -> None:
    code, result, said = bench(*words)
    assert code == 2
    assert said.err.startswith(f"specpipe: {message}")
    assert said.err.count("\n") == 1
    assert result == {}


def test_another_config_does_not_go_on_with_a_run(bench: Any) -> None:
    assert bench("proposers=[ngram]", "repeats=1", "predict=false")[0] == 0
    code, _, said = bench("resume=run", "proposers=[suffix]", out="other")
    assert code == 2
    assert said.err == "specpipe: proposers: is not that of 'run'; a bench goes on with its own config.\n"


def test_a_cell_is_one_line_of_the_table(bench: Any) -> None:
    """Piped, however many columns there are."""
    code, _, said = bench("proposers=[ngram]", "sweep.temperature=[0,1]", "sweep.batch_size=[1,2]")
    assert code == 0
    lines = said.out.splitlines()
    assert lines[0].split()[-2:] == ["alpha", "c"]
    assert [line.split()[0] for line in lines[1:9]] == ["none", "ngram"] * 4
    assert lines[9] == ""


def test_generate_of_hugging_face_is_a_row_of_the_same_table(bench: Any) -> None:
    code, result, _ = bench(
        "proposers=[ngram]", "peers=[hf]", "repeats=1", "predict=false", "generation.ignore_eos=true"
    )
    assert code == 0
    peers = [cell for cell in result["cells"] if cell["peer"]]
    assert [cell["proposer"] for cell in peers] == ["hf", "hf prompt lookup"]
    for cell in peers:
        assert cell["summary"]["new_tokens"] == 30
        assert cell["summary"]["speedup"]["mean"] > 0
        assert cell["summary"]["tokens_per_target_pass"] is None


def test_generate_is_assisted_by_a_draft_model_of_the_bench(bench: Any, tmp_path: Path) -> None:
    saved_tiny(tmp_path / "model")
    words = ["proposers=[{draft:{model:model,dtype:float32}}]", "peers=[hf]", "repeats=1", "predict=false"]
    code, result, said = bench(*words, "generation.ignore_eos=true")
    assert code == 0
    assert [cell["proposer"] for cell in result["cells"] if cell["peer"]][-1] == "hf assisted"
    assert "transformers" not in said.err


def test_a_run_on_another_engine_does_not_go_on_with_it(bench: Any, tmp_path: Path) -> None:
    assert bench("proposers=[ngram]", "repeats=1", "predict=false", "verifier=packed")[0] == 0
    file = tmp_path / "run" / "result.json"
    file.write_text(file.read_text().replace('"verifier": "packed"', '"verifier": "compiled"'))
    code, _, said = bench("resume=run", out="other")
    assert code == 2
    assert said.err.startswith("specpipe: resume: 'run' ran compiled, and here the target runs packed")


def test_a_fixed_width_is_that_of_the_longest_draft_of_all_cells(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain decoding too, which is compared with the others."""
    widths, read = set(), Reader.read

    def watched(self: Reader, sequences: Any, draft: Draft) -> Any:
        widths.add(self.width)
        return read(self, sequences, draft)

    words = ["proposers=[ngram]", "sweep.num_speculative_tokens=[1,7]", "repeats=1", "predict=false"]
    monkeypatch.setattr(Reader, "read", watched)
    code, result, _ = bench(*words, "verifier=packed", "verifier.width=fixed")
    assert code == 0
    assert all(cell["summary"]["identical_texts"] == 3 for cell in result["cells"] if cell["proposer"] != "none")
    assert widths == {6, 8, None}  # None: in the rehearsal at load; 6: in the trial before the cells are known


def test_texts_that_are_not_plain_decodings_are_an_answer_of_no(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specpipe.samplers.rejection import Rejection

    monkeypatch.setattr(Rejection, "accept", lambda self, x, p, q, chance: (len(x), 3))
    code, _, said = bench("proposers=[ngram]", "repeats=1", "predict=false")
    assert code == 1
    assert "not reproduced: ngram, gamma 5" in said.err
