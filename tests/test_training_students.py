"""What is trained: which ids are kept, what the teacher says, what a checkpoint and a draft's folder hold."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from specpipe.chance import Chance
from specpipe.distribution import probabilities
from specpipe.errors import UserError
from specpipe.proposers import artifact
from specpipe.proposers.artifact import VOCABULARY
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import Texts, as_read, sharpened, small
from train.batches import Batch, DraftData, collate
from train.layers import best_layers
from train.losses import LOSSES, Kl, overlap
from train.module import DraftTraining, figures
from train.optimizer import AdamW
from train.shards import Document
from train.students import DistilledStudent, HeadsStudent, Student
from train.trainer import trainer
from train.vocabulary import kept_ids

V, H = 257, 64  # of `tiny`
KINDS = ("mlp", "medusa", "distilled")
SAMPLE = GenerationSettings(temperature=1.0)


@cache
def target() -> Target:
    return tiny(device="cpu")


def written(prompt: list[int], n: int, temperature: float) -> Document:
    """What the target writes behind a prompt."""
    ids, chance = list(prompt), Chance(0, prompt, int(temperature))
    settings = GenerationSettings(temperature=temperature)
    for _ in range(n):
        with torch.inference_mode():
            logits = target().model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(chance.draw(probabilities(logits, settings)))
    return as_read(target(), ids, len(prompt), temperature)


@cache
def texts() -> Texts:
    """Four prompts, each answered greedily and by drawing."""
    chance = random.Random(0)
    prompts = [[chance.randrange(V) for _ in range(k)] for k in (2, 5, 9, 4)]
    return Texts(written(prompt, 15, temperature) for prompt in prompts for temperature in (0.0, 1.0))


def made(kind: str, vocabulary: int | None = None, heads: int = 3, layers: Any = (0, 1)) -> Student:
    student: Student
    if kind == "distilled":
        student = DistilledStudent(layers=list(layers), vocabulary=vocabulary)
    else:
        student = HeadsStudent(heads=heads, form=kind, vocabulary=vocabulary)
    student.prepare(target(), texts())  # type: ignore[arg-type]
    return student


def moved(student: Student, amount: float = 0.1) -> Student:
    """Away from its start, to weights that bfloat16 holds exactly."""
    chance = torch.Generator().manual_seed(0)
    for weight in student.parameters():
        if weight.requires_grad:
            weight.data += amount * torch.randn(weight.shape, generator=chance)
            weight.data = weight.data.to(torch.bfloat16).float()
    return student


def training(student: Student, loss: Any = None, gamma: int = 3) -> DraftTraining:
    """A module outside of any trainer."""
    module = DraftTraining(student, loss or Kl(), AdamW(lr=1e-2), gamma)
    module.trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    module.log = module.log_dict = lambda *given, **named: None  # type: ignore[method-assign, assignment]
    return module


def validated(student: Student, documents: Texts, gamma: int = 3, loss: Any = None, size: int = 4) -> dict[str, float]:
    """The figures of a validation in batches of `size`."""
    module = training(student, loss, gamma)
    module.on_validation_epoch_start()
    with torch.no_grad():
        for at in range(0, len(documents), size):
            module.validation_step(collate(documents[at : at + size]), at)
    return figures(module._counts.flat(student.heads, gamma).tolist(), student.heads, gamma)


# ---- the ids it keeps ----


class Letters:
    """A tokenizer of 50 ids, where 40 is special and 10 to 21 are the digits, blank and newline."""

    all_special_ids = (40, 99)  # the second is beyond what the model has

    def encode(self, letter: str, add_special_tokens: bool) -> list[int]:
        return [10 + "0123456789 \n".index(letter)]


def kept(generated: list[int], size: int | None) -> list[int]:
    of: Any = SimpleNamespace(vocabulary=50, tokenizer=Letters(), eos_ids=(3,))
    return kept_ids(np.array(generated), of, size).tolist()


MUST = [3, *range(10, 22), 40]


def test_the_most_frequent_ids_are_kept_of_equals_the_lowest() -> None:
    text = [30] * 3 + [45] * 2 + [44] * 2 + [3] * 9
    for size, others in ((14, []), (15, [30]), (16, [30, 44]), (17, [30, 44, 45]), (19, [0, 1, 30, 44, 45])):
        assert kept(text, size) == sorted([*MUST, *others])


def test_without_a_size_or_with_a_large_one_all_are_kept() -> None:
    assert kept([1], None) == kept([1], 50) == kept([1], 8192) == list(range(50))


def test_too_few_for_what_must_be_kept_are_refused() -> None:
    with pytest.raises(UserError, match=r"^student\.vocabulary: 13 ids are too few; 14 special ones"):
        kept([1], 13)


def test_the_map_leads_there_and_back() -> None:
    student = made("mlp", vocabulary=40)
    assert len(student.ids) == 40
    assert student.row_of[student.ids].tolist() == list(range(40))
    left = torch.ones(V, dtype=torch.bool)
    left[student.ids] = False
    assert (student.row_of[left] == -1).all()
    assert torch.equal(student.head_rows, target().head_weight[student.ids])
    assert set(target().eos_ids) <= set(student.ids.tolist())


def test_coverage_and_mass_are_those_of_the_kept_ids() -> None:
    student = made("mlp", vocabulary=40)
    found = validated(student, texts())
    ids = set(student.ids.tolist())
    answers = [token for each in texts() for token in each.answer.tolist()]
    laws = torch.cat([(each.states.float() @ target().head_weight.T).softmax(-1) for each in texts()])
    assert found["val/coverage"] == pytest.approx(sum(token in ids for token in answers) / len(answers))
    assert found["val/p_mass"] == pytest.approx(float(laws[:, student.ids].sum(-1).mean()), abs=5e-3)
    assert 0.1 < found["val/coverage"] < 1


# ---- the teacher ----


def test_the_teacher_says_the_targets_true_probabilities() -> None:
    """Of the kept ids, not renormalised: alpha is at most their mass, and renormalised it would be more."""
    student = made("mlp", vocabulary=40)
    batch = collate(texts())
    p = student.teacher(batch)
    laws = (batch.states.float() @ target().head_weight.T).softmax(-1)[:, student.ids]
    assert torch.allclose(p, laws, rtol=2e-2)
    mass = p.sum(-1)
    assert (mass < 1).all()
    for each in student.guesses(batch):
        alpha = overlap(p[each.at], each.logits)
        assert (alpha <= mass[each.at] + 1e-6).all()
        flattered = overlap(p[each.at] / mass[each.at, None], each.logits)
        assert (flattered > alpha).all()


def test_the_target_as_its_own_draft_is_always_accepted() -> None:
    """alpha 1, tau gamma + 1, no loss, in float32 but for the states, which are kept in bfloat16."""
    student = made("distilled")
    found = validated(student, texts(), gamma=4)
    assert found["val/tau_g4"] == 5.0
    assert found["val/tau_g4_T1"] > 4.95
    assert found["val/alpha"] >= 0.995
    assert all(found[f"val/acc_pos{i}"] == 1.0 for i in (1, 2, 3, 4))
    assert found["val/p_mass"] == pytest.approx(1, abs=0.01)
    for name, bound in {
        "kl": 1e-3,
        "reverse_kl": 1e-3,
        "jsd": 1e-3,
        "tv": 0.01,
        "nla": 0.01,
        "lk_hybrid": 0.01,
    }.items():
        assert abs(validated(student, texts(), loss=LOSSES[name])["val/loss"]) < bound


def test_a_walk_in_batches_is_the_walk_of_each_text() -> None:
    student = moved(made("mlp"), 0.02)
    whole = validated(student, texts(), size=8)
    for size in (1, 3):
        assert validated(student, texts(), size=size) == pytest.approx(whole, rel=1e-4)


def test_ids_that_a_student_lacks_are_misses() -> None:
    """The target itself over few ids: what it cannot say is never accepted."""
    student = made("distilled", vocabulary=40)
    greedy = Texts(each for each in texts() if each.temperature == 0)
    found = validated(student, greedy, gamma=1)
    known = [bool(student.row_of[token] >= 0) for each in greedy for token in each.answer.tolist()]
    assert found["val/acc_pos1"] == pytest.approx(sum(known) / len(known))


# ---- heads ----


def test_medusas_zero_blocks_guess_the_newest_token_again() -> None:
    student, batch = made("medusa"), collate(texts())
    for each in student.guesses(batch):
        anchors = each.at - each.head - 1
        assert torch.allclose(each.logits, F.linear(batch.states[anchors].float(), student.head_rows), atol=1e-4)
        greedy = ~batch.drawn[anchors]
        assert (each.logits.argmax(-1) == batch.answer[anchors])[greedy].float().mean() > 0.95


def logits_of(student: Student, batch: Batch) -> list[Tensor]:
    with torch.no_grad():
        return [each.logits for each in student.guesses(batch)]


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_mlp_heads_see_the_tokens_before_their_guess_and_medusa_heads_do_not(kind: str) -> None:
    student = moved(made(kind))
    batch = collate(texts()[:1])
    for k in (0, 1):  # y_k is seen from the first anchor by heads from k on
        answer = batch.answer.clone()
        answer[k] = (answer[k] + 1) % V
        before, after = logits_of(student, batch), logits_of(student, replace(batch, answer=answer))
        changed = [not torch.allclose(a[0], b[0], atol=1e-5) for a, b in zip(before, after, strict=True)]
        assert changed == [kind == "mlp" and head >= k for head in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_supervised_tokens_has_no_loss_and_no_nan(kind: str) -> None:
    """Documents of one written token give heads nothing to guess; of two, all but the first."""
    student = moved(made(kind), 0.02)
    short = Texts(as_read(target(), each.ids[: each.prompt + 1].tolist(), each.prompt) for each in texts())
    for documents, empty in ((short, kind != "distilled"), ([*short, as_read(target(), [1, 2, 3], 1)], False)):
        student.zero_grad()
        loss = training(student).training_step(collate(documents), 0)
        loss.backward()
        gradients = [weight.grad for weight in student.parameters() if weight.requires_grad]
        assert all(each is not None and each.isfinite().all() for each in gradients)
        assert (loss.item() == 0.0) is empty
        assert any(float(each.abs().max()) > 0 for each in gradients if each is not None) is not empty
    found = validated(student, short)
    assert all(np.isfinite(value) for value in found.values())


# ---- training ----


@pytest.mark.parametrize(("kind", "left"), [("mlp", 0.1), ("distilled", 0.1), ("medusa", 0.3)])
def test_four_documents_are_learned_by_heart(kind: str, left: float) -> None:
    """Medusa's blocks get less far: what one adds to a state has no part below -0.28, the least of SiLU."""
    student = made(kind, layers=[1])
    few = Texts(as_read(target(), each.ids[: each.prompt + 6].tolist(), each.prompt) for each in texts()[::2])
    batch, module = collate(few), training(student)
    trained = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    before = module.training_step(batch, 0).item()
    for _ in range(120):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    assert module.training_step(batch, 0).item() < left * before


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_what_is_trained_and_the_target_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    before = copy.deepcopy(target().model.state_dict())
    student = made(kind, vocabulary=40)
    start = copy.deepcopy(student.state_dict())
    module = DraftTraining(student, Kl(), AdamW(lr=1e-2), 3)
    corpus: Any = SimpleNamespace(train=texts(), val=texts()[:2])
    keep = ModelCheckpoint(tmp_path, "t", every_n_train_steps=4)
    fit = trainer(max_steps=4, accelerator="cpu", precision="32-true", val_every=4, callbacks=keep, logger=False)
    fit.fit(module, DraftData(corpus, batch_size=2, seed=0))
    held = torch.load(tmp_path / "t.ckpt", weights_only=True)
    trained = {f"student.{name}" for name, weight in student.named_parameters() if weight.requires_grad}
    assert set(held["state_dict"]) == trained
    assert not any("embed" in name or "head" in name or "row_of" in name for name in trained)
    moments = sum(weight.numel() for weight in student.parameters() if weight.requires_grad)
    assert (tmp_path / "t.ckpt").stat().st_size < 3 * 4 * moments + 100_000
    assert all(torch.equal(before[name], weight) for name, weight in target().model.state_dict().items())
    changed = {name for name, weight in student.state_dict().items() if not torch.equal(weight, start[name])}
    assert {f"student.{name}" for name in changed} == trained
    again = DraftTraining(made(kind, vocabulary=40), Kl(), AdamW(), 3)
    again.load_state_dict(held["state_dict"], strict=False)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
    assert not target().model.training


# ---- the draft's folder ----


def laws(proposer: Any, tokens: list[int], k: int) -> tuple[list[int], Tensor]:
    """Drafted tokens, and the q [k, V] that each was drawn from."""
    draft = proposer.propose([Sequence(tokens, SAMPLE, chance=Chance(0, tokens))], [k])
    return draft.tokens[0, : draft.lengths[0]].tolist(), draft.probs[0, : draft.lengths[0]]


def students_laws(student: Student, tokens: list[int], prompt: int, drafted: list[int]) -> Tensor:
    """[k, V] what the student says behind `tokens`, given the same drafts."""
    document = as_read(target(), [*tokens, *drafted], prompt)
    with torch.inference_mode():
        read = target().model.base_model(input_ids=document.ids[None], use_cache=False).last_hidden_state[0]
    batch = collate([replace(document, states=read[prompt - 1 : -1])])
    with torch.no_grad():
        found = {
            (number, each.head): row
            for each in student.guesses(batch)
            for number, row in zip(each.at.tolist(), each.logits, strict=True)
        }
    first = len(tokens) - prompt
    rows = [found[first + i, i if student.start else 0] for i in range(len(drafted))]
    whole = torch.zeros(len(rows), V)
    whole[:, student.ids] = torch.stack(rows).softmax(-1)
    return whole


def saved(student: Student, folder: Path) -> Any:
    """The proposer of a saved student, for the target."""
    student.save(folder, {"seed": 0, "data": {}})
    proposer = student.proposer(folder)
    proposer.bind(tiny(device="cpu"))
    return proposer


@pytest.mark.parametrize("vocabulary", [None, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_the_proposers_laws_are_the_students(kind: str, vocabulary: int | None, tmp_path: Path) -> None:
    student = moved(made(kind, vocabulary, layers=[1])).eval()
    proposer = saved(student, tmp_path)
    for each in texts()[:3]:
        for n in (1, 4, 9):
            tokens = each.ids[: each.prompt + n].tolist()
            drafted, q = laws(proposer, tokens, 3)
            assert torch.allclose(q, students_laws(student, tokens, each.prompt, drafted), atol=2e-4)
            wrong = students_laws(student, [*tokens[:-2], tokens[-1], tokens[-1]], each.prompt, drafted)
            assert not torch.allclose(q, wrong, atol=2e-2) or n == 1


@pytest.mark.parametrize("kind", ["mlp", "distilled"])
def test_ids_that_are_saved_as_offsets_are_found_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lead to others, or to none."""
    student = moved(made(kind, 60, layers=[1])).eval()
    assert load_ids(student, tmp_path / "right") == student.ids.tolist()
    write = artifact.save_card
    monkeypatch.setattr(artifact, "save_card", lambda folder, card, ids: write(folder, card, ids - torch.arange(60)))
    with pytest.raises(UserError, match="its kept ids are not ascending"):
        saved(student, tmp_path / "wrong")


def load_ids(student: Student, folder: Path) -> list[int]:
    saved(student, folder)
    return load_file(folder / VOCABULARY)["ids"].tolist()


def test_the_card_says_how_it_came_about(tmp_path: Path) -> None:
    made("distilled", layers=[0]).save(tmp_path, {"seed": 7})
    told = json.loads((tmp_path / "draft.json").read_text())
    assert (told["kind"], told["target"], told["hidden"]) == ("distilled", "tiny", H)
    assert told["training"] == {"seed": 7, "layers": [0]}


# ---- which layers ----


@cache
def planted() -> Target:
    """Four layers, all but the third of which leave what they are given as it is."""
    model = sharpened(small("Llama", num_hidden_layers=4)).float()
    for i in (0, 1, 3):
        model.model.layers[i].self_attn.o_proj.weight.data.zero_()
        model.model.layers[i].mlp.down_proj.weight.data.zero_()
    return Target(model, SimpleNamespace(get_vocab=lambda: {f"w{i}": i for i in range(61)}), "planted", None)


def search(count: Any, change: Callable[[Student], None] = lambda student: None) -> Any:
    student = DistilledStudent(layers=count, vocabulary=None)
    chance = random.Random(0)
    some = Texts(as_read(planted(), [chance.randrange(61) for _ in range(12)], 4) for _ in range(3))
    student.prepare(planted(), some)  # type: ignore[arg-type]
    return student.layers, best_layers(planted(), student, some, 1)  # type: ignore[arg-type]


def test_the_search_finds_the_layer_that_matters() -> None:
    layers, best = search(1)
    assert layers == best == [2]
    both, _ = search(2)
    assert both == sorted(both)
    assert 2 in both


@pytest.mark.parametrize("layers", [5, [0, 9]])
def test_layers_that_the_target_lacks_are_refused(layers: Any) -> None:
    with pytest.raises(UserError, match=r"^student\.layers: "):
        search(layers)


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("heads", lambda: HeadsStudent(heads=0)),
        ("form", lambda: HeadsStudent(form="x")),
        ("vocabulary", lambda: HeadsStudent(vocabulary=1)),
        ("vocabulary", lambda: DistilledStudent(vocabulary=0)),
        ("layers", lambda: DistilledStudent(layers=0)),
        ("layers", lambda: DistilledStudent(layers=[])),
        ("layers", lambda: DistilledStudent(layers="all")),  # type: ignore[arg-type]
        ("layers", lambda: DistilledStudent(layers=[-1])),
    ],
)
def test_a_wrong_value_names_its_key(key: str, make: Callable[[], Student]) -> None:
    with pytest.raises(UserError, match=f"^{key}: "):
        make()
