"""A compiled target is the same target, to the last bit whatever shares a pass; where it cannot be compiled it runs as
it is, and says so once."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specpipe as package
from specpipe.audit.reading import Answer, all_logits
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier import kernels
from specpipe.verifier.compiled import CompiledModel, CompiledVerifier, take_back
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.kernels import NoCompiler, PanelLinear
from specpipe.verifier.support import difference
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import ToyTokenizer, sharpened, small

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, heads of 64": ("Llama", {"head_dim": 64, "num_attention_heads": 8}),
    "Llama, heads of 128": ("Llama", {"head_dim": 128}),
    "Mistral, window": ("Mistral", {"sliding_window": 3}),
    "Qwen2, window in one layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE = {"float32": 1e-5, "bfloat16": 0.05}  # of the logits' spread


def target_of(kind: str = "Llama", dtype: str = "float32") -> Target:
    name, config = KINDS[kind]
    return Target(sharpened(small(name, **config)).to(TYPES[dtype]), ToyTokenizer(), kind, None)


def compiled(target: Target) -> CompiledVerifier:
    """Compiled, not a fallback."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verifier = CompiledVerifier(target)
    assert isinstance(verifier.reader.model, CompiledModel)
    return verifier


def text(prompt: list[int]) -> Sequence:
    return Sequence(prompt, GenerationSettings(max_new_tokens=20), chance=Chance(0))


def rows_read(verifier: Any) -> list[torch.Tensor]:
    """Logits of two texts read side by side in passes of several widths, drafts rejected and accepted."""
    one, two = text([5, 9, 3, 20, 7]), text([8])
    seen = []
    for drafts, (block_one, block_two) in (
        ([[4, 6], [1]], ([4, 30], [2])),
        ([[], []], ([11], [12])),
        ([[9, 9, 9], []], ([9, 9, 1], [40])),
        ([[], [3, 3]], ([6], [3, 3, 5])),
    ):
        draft = Draft.of(drafts, verifier.device)
        seen += verifier.score([one, two], draft)
        one.commit(block_one, len(drafts[0]), [])
        two.commit(block_two, len(drafts[1]), [])
        verifier.roll_back([one, two])
    return seen


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_target_reads_as_the_plain_one(kind: str, dtype: str) -> None:
    plain = rows_read(EagerVerifier(target_of(kind, dtype), prepack=False, fuse=False))
    for ours, theirs in zip(rows_read(compiled(target_of(kind, dtype))), plain, strict=True):
        assert torch.equal(ours, ours.to(theirs.dtype))  # rounded to the type, whatever they are kept in
        assert max(map(difference, ours, theirs)) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_logits_to_the_last_bit_whatever_shares_its_pass(kind: str, dtype: str) -> None:
    """One by one, as a prompt, as a draft, beside other texts, after a roll-back, by one thread: past two blocks."""
    verifier = compiled(target_of(kind, dtype))
    ids = [(7 * i * i + 3) % 60 for i in range(150)]
    last = Draft.of([[]], verifier.device)
    [whole] = verifier.score([text(ids[:1])], Draft.of([ids[1:]], verifier.device))  # [150, V]
    at_once = [verifier.score([text(ids[:n])], last)[0][0] for n in (1, 5, 64, 65, 97, 129, 150)]
    assert all(torch.equal(row, whole[n - 1]) for row, n in zip(at_once, (1, 5, 64, 65, 97, 129, 150), strict=True))
    beside = [text(ids[:40]), text([4]), text(ids[:131])]
    rows = verifier.score(beside, Draft.of([ids[40:47], [9], []], verifier.device))
    assert torch.equal(rows[0], whole[39:47])
    assert torch.equal(rows[2], whole[130:131])
    stepped = text(ids[:100])
    verifier.score([stepped], Draft.of([[1, 2, 3]], verifier.device))
    threads = torch.get_num_threads()
    try:
        for torch_threads in (2, 3, 5):
            torch.set_num_threads(torch_threads)
            assert torch.equal(verifier.score([text(ids[:1])], Draft.of([ids[1:]], verifier.device))[0], whole)
        for i, token in enumerate(ids[100:118]):
            torch.set_num_threads(1 + i % 3)
            stepped.commit([token], 0, [])
            verifier.roll_back([stepped])
            assert torch.equal(verifier.score([stepped], last)[0][0], whole[100 + i])
    finally:
        torch.set_num_threads(threads)


def test_packed_logits_depend_on_the_width_of_the_pass() -> None:
    """The wrong variant: what the test above holds for is not so of library products."""
    verifier = EagerVerifier(target_of())
    ids = [(7 * i * i + 3) % 60 for i in range(150)]
    [whole] = verifier.score([text(ids[:1])], Draft.of([ids[1:]], verifier.device))
    rows = [verifier.score([text(ids[:n])], Draft.of([[]], verifier.device))[0][0] for n in range(1, 150)]
    assert not all(torch.equal(row, whole[i]) for i, row in enumerate(rows))


@pytest.mark.parametrize("generation", ["greedy", "sample"])
def test_in_bfloat16_speculative_text_is_plain_text(generation: str) -> None:
    """Token for token; a sampled one where the draft says nothing of the text's own random numbers: exact match."""
    words = [
        "target=tiny",
        "target.device=cpu",
        "target.dtype=bfloat16",
        "verifier=compiled",
        f"generation={generation}",
    ]
    words += ["generation.max_new_tokens=200", "generation.ignore_eos=true", "sampler=exact_match"]
    prompts = ["abcabcabc", "x", "one two one two one"]
    plain, *others = (
        [each.token_ids for each in package.load(*words, *more).generate(prompts)]
        for more in (
            ["proposer=none"],
            ["proposer=ngram", "num_speculative_tokens=7"],
            ["proposer=layer_skip", "proposer.layers=1", "proposer.draw=argmax"],
        )
    )
    assert all(each == plain for each in others)


@pytest.mark.parametrize("layers", ["1", "[0]", "[1]", "[0,1]"])
def test_what_drafts_for_a_compiled_target_is_compiled_too_and_drafts_the_same(layers: str) -> None:
    """With the target's own cache and with one of its own."""
    words = ["target=tiny", "target.device=cpu", "proposer=layer_skip", f"proposer.layers={layers}"]
    words += ["generation.max_new_tokens=40", "generation.ignore_eos=true", "num_speculative_tokens=3"]
    found = []
    for engine in ("packed", "compiled"):
        pipeline = package.load(*words, f"verifier={engine}")
        assert isinstance(pipeline.proposer._reader.model, CompiledModel) == (engine == "compiled")
        sequences = pipeline.sequences(["abcab", "x", "hello"])
        steps = [(step.drafted, step.accepted, step.tokens) for _, step in pipeline.decode_together(sequences, 2)]
        found.append(steps)
    assert found[0] == found[1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", ["bfloat16", "float32 from bfloat16", "float32"])
@pytest.mark.parametrize(("out", "rows"), [(16, 1), (37, 5), (3, 7), (64, 100)])
def test_products_of_panels_are_those_of_the_layer(out: int, rows: int, weights: str, bias: bool) -> None:
    generator = torch.Generator().manual_seed(out)
    linear = torch.nn.Linear(24, out, bias=bias)
    linear.weight = torch.nn.Parameter(torch.randn(out, 24, generator=generator))
    if "bfloat16" in weights:
        linear.bfloat16()
    if "float32" in weights:
        linear.float()
    made = PanelLinear(linear.weight, linear.bias)
    x = torch.randn(2, rows, 24, generator=generator).to(linear.weight.dtype)
    assert torch.equal(made.unpacked()[0], linear.weight)
    torch.testing.assert_close(made(x), linear(x))


def test_a_number_that_is_none_is_none_in_the_logits() -> None:
    verifier = compiled(target_of())
    verifier.target.model.model.embed_tokens.weight.data[7] = torch.nan
    rows = verifier.score([text([5, 7])], Draft.of([[3]], verifier.device))[0]
    assert rows.isnan().all()
    assert not verifier.score([text([5])], Draft.of([[3]], verifier.device))[0].isnan().any()


@pytest.mark.parametrize(
    "why", ["no compiler", "wrong logits", "other bits", "unknown kind", "other activation", "float64"]
)
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    said = "there is no C++ compiler"
    if why == "no compiler":
        monkeypatch.setattr("specpipe.verifier.compiled.program", no_compiler)
    if why == "wrong logits":
        monkeypatch.setattr("specpipe.verifier.compiled.window", lambda config: 1)
        target, said = target_of("Mistral, window"), "does not reproduce its own logits"
    if why == "other bits":
        forward = PanelLinear.forward
        monkeypatch.setattr(PanelLinear, "forward", lambda self, x: forward(self, x) * (1 + 1e-6 * (x.shape[1] > 3)))
        said = "its numbers depend on what shares a pass"
    if why == "unknown kind":
        target, said = Target(small("GPT2"), ToyTokenizer(), "GPT2", None), "GPT2LMHeadModel is of no kind"
    if why == "other activation":
        model = sharpened(small("Llama", hidden_act="gelu")).float()
        target, said = Target(model, ToyTokenizer(), "Llama", None), "its activation is"
    if why == "float64":
        target, said = Target(small("Llama").double(), ToyTokenizer(), "Llama", None), "its weights are torch.float64"
    with pytest.warns(UserWarning, match=re.escape(said)) as told:
        verifier = CompiledVerifier(target)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert not isinstance(verifier.reader.model, CompiledModel)
    assert verifier.engine == ("eager" if why == "unknown kind" else "packed")
    assert rows_read(verifier)


def test_auto_is_silent_about_kinds_but_not_about_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verifier = CompiledVerifier(Target(small("GPT2"), ToyTokenizer(), "GPT2", None), warn=False)
    assert rows_read(verifier)
    monkeypatch.setattr("specpipe.verifier.compiled.program", no_compiler)
    with pytest.warns(UserWarning, match="there is no C\\+\\+ compiler"):
        CompiledVerifier(target_of(), warn=False)


def no_compiler() -> Any:
    raise NoCompiler("there is no C++ compiler")


def test_the_program_is_compiled_once_on_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path))
    calls: list[str] = []
    run = kernels._run
    monkeypatch.setattr(kernels, "_run", lambda words: calls.append(words[1]) or run(words))
    for _ in range(2):
        assert kernels.program.__wrapped__().run_layers
    assert calls == ["--version", "-O3", "--version"]
    assert len(list(tmp_path.glob("compiled*/layers-*.so"))) == 1


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that was compiled, in the folder that was made for it."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECPIPE_CACHE", str(folder))
        kernels.program.__wrapped__()
    [file] = folder.glob("compiled*/layers-*.so")
    return file


def test_a_file_that_was_cut_short_is_made_anew(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / built.parent.name / built.name
    place.parent.mkdir(mode=0o755)
    place.write_bytes(b"")
    place.chmod(0o755)
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path))
    assert kernels.program.__wrapped__().run_layers
    assert place.read_bytes() == built.read_bytes()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and rights are those of POSIX")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_code_that_others_could_have_put_there_is_not_loaded(
    what: str, built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / built.parent.name / built.name
    place.parent.mkdir(mode=0o755)
    place.write_bytes(built.read_bytes())
    place.chmod(0o755)
    (place if what == "file" else place.parent).chmod(0o777)
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path))
    loaded = []
    monkeypatch.setattr(kernels, "_compile", lambda compiler, file: loaded.append(file) or built)
    assert kernels.program.__wrapped__().run_layers
    assert len(loaded) == 1
    assert (loaded[0] == place) == (what == "file")


@pytest.mark.parametrize(
    ("named", "said"),
    [("false", "false failed: exit code 1"), ("no-such-compiler", "there is no C++ compiler 'no-such-compiler' (CXX)")],
)
def test_a_compiler_that_fails_is_no_crash(
    named: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", named)
    with pytest.raises(NoCompiler, match=re.escape(said)):
        kernels.program.__wrapped__()


def test_a_cache_that_takes_nothing_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(NoCompiler, match="file"):
        kernels.program.__wrapped__()


def test_a_compiler_command_may_have_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env c++ -O1")
    [command] = kernels._compilers()
    assert command[1:] == ["c++", "-O1"]
    monkeypatch.setenv("CXX", "c++ 'half a word")
    with pytest.raises(NoCompiler, match="CXX: "):
        kernels.program.__wrapped__()


def test_where_one_compiler_fails_the_next_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECPIPE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(kernels, "COMPILERS", ("false", "c++"))
    assert kernels.program.__wrapped__().run_layers


def test_an_audit_judges_by_the_models_own_rounding() -> None:
    """The program gives float32 logits that are bfloat16 numbers: by float32's rounding near-ties would be faults."""
    verifier = compiled(target_of(dtype="bfloat16"))
    assert verifier.score([text([5, 9])], Draft.of([[]]))[0].dtype == torch.float32
    assert all_logits(verifier, Answer([5, 9], [3, 20, 7]), 2).dtype == torch.bfloat16


def test_a_target_can_be_prepared_more_than_once() -> None:
    """By the same engine, and by another one; in bfloat16, where readings differ most."""
    target = target_of(dtype="bfloat16")
    rows = [rows_read(engine) for engine in (compiled(target), compiled(target), EagerVerifier(target))]
    assert all(torch.equal(a, b) for a, b in zip(rows[0], rows[1], strict=True))
    assert max(map(difference, rows[2], rows[0])) < CLOSE["bfloat16"]


def test_a_model_that_is_taken_back_reads_as_it_did() -> None:
    model = target_of(dtype="bfloat16").model
    ids = torch.tensor([[5, 9, 3, 20]])
    EagerVerifier(Target(model, ToyTokenizer(), "Llama", None), prepack=False)
    before = model(input_ids=ids).logits
    CompiledModel(model)
    take_back(model)
    assert not any(isinstance(each, PanelLinear) for each in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_many_texts_and_layers_in_several_calls_have_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = compiled(target_of())
    texts = [[(7 * i + j) % 60 for i in range(9 + j)] for j in range(5)]
    wanted = verifier.score([text(ids) for ids in texts], Draft.of([[1, 2]] * 5))
    calls = []
    run = verifier.reader.model._program.run_layers
    monkeypatch.setattr("specpipe.verifier.compiled.TOGETHER", 30)
    monkeypatch.setattr("specpipe.verifier.compiled.UNHEARD", 1)
    program = SimpleNamespace(scratch_for=verifier.reader.model._program.scratch_for)
    program.run_layers = lambda *given: calls.append(1) or run(*given)
    monkeypatch.setattr(verifier.reader.model, "_program", program)
    found = verifier.score([text(ids) for ids in texts], Draft.of([[1, 2]] * 5))
    assert len(calls) == 3 * 2
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_layers_that_are_not_as_the_config_says_are_left_alone() -> None:
    """The program would write past the end of what it is given."""
    model = sharpened(small("Llama")).float()
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = (torch.nn.Linear(32, 80, bias=False) for _ in range(2))
        layer.mlp.down_proj = torch.nn.Linear(80, 32, bias=False)
    with pytest.warns(UserWarning, match="not as its config says"):
        verifier = CompiledVerifier(Target(model, ToyTokenizer(), "Llama", None))
    assert rows_read(verifier)


@pytest.mark.parametrize("where", ["o_proj", "lm_head"])
def test_a_wrapped_linear_layer_is_not_read_past_its_wrapper(where: str) -> None:
    """As adapters wrap one: `weight` is the base's, and what they add would be lost."""

    class Wrapped(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    model = sharpened(small("Llama")).float()
    holder = model if where == "lm_head" else model.model.layers[0].self_attn
    linear = getattr(holder, where)
    wrapped = Wrapped(linear.in_features, linear.out_features, bias=False)
    wrapped.weight = linear.weight
    setattr(holder, where, wrapped)
    with pytest.warns(UserWarning, match="layers of the kind Wrapped"):
        CompiledVerifier(Target(model, ToyTokenizer(), "Llama", None))


def test_no_memory_for_the_panels_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def panels(linear: Any, wide: bool = False) -> Any:
        made.append(linear)
        if len(made) > 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return PanelLinear(linear.weight, None)

    monkeypatch.setattr("specpipe.verifier.compiled._panels", panels)
    target = target_of()
    with pytest.warns(UserWarning, match="no memory"):
        verifier = CompiledVerifier(target)
    assert not any(isinstance(each, PanelLinear) for each in target.model.modules())
    assert rows_read(verifier)


def test_weights_are_in_memory_once() -> None:
    target = tiny(device="cpu")
    compiled(target)
    layer = target.model.model.layers[0]
    linears = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj, target.model.lm_head)
    assert all(isinstance(each, PanelLinear) for each in linears)
    assert target.head_weight.shape == (target.vocabulary, 64)
