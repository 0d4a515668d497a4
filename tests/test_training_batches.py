"""Which token belongs to which state, and in which order documents come: against definitions in plain Python."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specpipe.errors import UserError
from specpipe.verifier.targets import Target, tiny
from tests.stand_ins import Texts, as_read
from train import batches
from train.batches import Batch, DraftData, Loader, Order, collate
from train.losses import Kl
from train.module import DraftTraining
from train.optimizer import AdamW
from train.shards import Document
from train.students import DistilledStudent, Guesses, HeadsStudent, Student

SIZES = [(3, 5), (1, 1), (6, 2), (2, 7), (4, 1)]  # prompt, answer
HEADS = 3


@cache
def target() -> Target:
    return tiny(device="cpu")


@cache
def documents() -> Texts:
    """Random text of unequal lengths, some of a single token, as the target reads it."""
    chance = random.Random(0)
    return Texts(
        as_read(target(), [chance.randrange(257) for _ in range(prompt + n)], prompt, float(i % 2))
        for i, (prompt, n) in enumerate(SIZES)
    )


@cache
def student(kind: str) -> Student:
    """Not at its start, so that all that it is given has a part in its guesses."""
    made: dict[str, Student] = {
        "mlp": HeadsStudent(heads=HEADS, vocabulary=None),
        "medusa": HeadsStudent(heads=HEADS, form="medusa", vocabulary=None),
        "distilled": DistilledStudent(layers=[1], vocabulary=None),
        "itself": DistilledStudent(layers=[0, 1], vocabulary=None),
    }
    made[kind].prepare(target(), documents())  # type: ignore[arg-type]
    if kind != "itself":
        torch.manual_seed(0)
        for weight in made[kind].parameters():
            if weight.requires_grad:
                weight.data += 0.1 * torch.randn_like(weight)
    return made[kind]


# ---- alignment ----


def test_places_and_answers_are_those_of_the_definition() -> None:
    """y_k stands at prompt + k and is predicted by the reading of the token before it."""
    batch = collate(documents())
    width = max(map(sum, SIZES))
    assert batch.ids.shape == (len(SIZES), width)
    g = 0
    for row, each in enumerate(documents()):
        assert batch.ids[row].tolist() == each.ids.tolist() + [0] * (width - len(each.ids))
        n = len(each.ids) - each.prompt
        assert batch.sizes[row] == n
        for k in range(n):
            assert batch.place[g] == row * width + each.prompt + k - 1
            assert batch.answer[g] == each.ids[each.prompt + k]
            assert batch.left[g] == n - 1 - k
            assert torch.equal(batch.states[g], each.states[k])
            assert batch.logz[g] == each.logz[k]
            assert batch.drawn[g] == (each.temperature > 0)
            g += 1
    assert g == len(batch.answer) == len(batch.place) == len(batch.states)


@pytest.mark.parametrize("head", range(8))
def test_a_head_has_an_anchor_where_its_own_document_goes_on_far_enough(head: int) -> None:
    first, expected = 0, []
    for _, n in SIZES:
        expected += [first + k for k in range(n) if k + head + 1 < n]
        first += n
    assert collate(documents()).anchors(head).tolist() == expected


class Recorder(nn.Module):
    """Heads that write down what they are given, an embedding being the id itself."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[tuple[Any, ...]]] = []

    def step(self, head: int, carry: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([carry, embedded], 1)
        self.given.append([tuple(row) for row in seen.tolist()])
        return seen, torch.zeros(len(carry), 64)


def given_to_heads(batch: Batch) -> list[dict[int, tuple[Any, ...]]]:
    """For each head, by the number of the written token that it guesses: a state, and the ids behind it."""
    recording = copy.copy(student("mlp"))
    recording._modules, recording._buffers = dict(recording._modules), dict(recording._buffers)
    recording.module = Recorder()
    recording.embedding = torch.arange(257.0)[:, None]
    numbered = replace(batch, states=batch.states[:, :1])
    numbers = [each.at.tolist() for each in recording.guesses(numbered)]
    assert [guess.head for guess in recording.guesses(numbered)] == list(range(HEADS))
    given = recording.module.given[:HEADS]
    return [dict(zip(at, rows, strict=True)) for at, rows in zip(numbers, given, strict=True)]


def defined_for_heads() -> list[dict[int, tuple[Any, ...]]]:
    """Head i at anchor k: s_k and y_k .. y_{k+i}, for y_{k+1+i}."""
    expected: list[dict[int, tuple[Any, ...]]] = [{} for _ in range(HEADS)]
    first = 0
    for each in documents():
        y, n = each.answer.tolist(), len(each.answer)
        for i in range(HEADS):
            for k in range(n - 1 - i):
                expected[i][first + k + 1 + i] = (float(each.states[k, 0]), *map(float, y[k : k + i + 1]))
        first += n
    return expected


def test_heads_are_given_the_state_and_the_tokens_of_the_definition() -> None:
    assert given_to_heads(collate(documents())) == defined_for_heads()


WRONG = {
    "states one place early": lambda batch: replace(batch, states=batch.states.roll(1, 0)),
    "states one place late": lambda batch: replace(batch, states=batch.states.roll(-1, 0)),
    "tokens one place late": lambda batch: replace(batch, answer=batch.answer.roll(-1, 0)),
    "the mask not shifted": lambda batch: replace(batch, left=batch.left + 1),
    "the mask shifted twice": lambda batch: replace(batch, left=batch.left - 1),
}


@pytest.mark.parametrize("what", WRONG)
def test_heads_that_are_given_anything_else_are_found_out(what: str) -> None:
    wrong = WRONG[what](collate(documents()))
    if what == "the mask not shifted":  # behind the last document there is nothing
        wrong = replace(wrong, left=torch.cat([wrong.left[:-1], torch.tensor([0])]))
    try:
        assert given_to_heads(wrong) != defined_for_heads()
    except IndexError:
        assert what == "the mask not shifted"


def all_of(kind: str, batch: Batch) -> list[Guesses]:
    with torch.no_grad():
        return list(student(kind).guesses(batch))


def divergence(batch: Batch) -> float:
    """From the target's law to that of the target as its own draft, the worst row."""
    [guesses] = all_of("itself", batch)
    return float(Kl()(student("itself").teacher(batch)[guesses.at], guesses.logits).max())


def test_the_target_as_its_own_draft_says_the_teachers_law_and_only_where_it_should() -> None:
    """Up to the rounding of states; with anything moved by one place it says another."""
    batch = collate(documents())
    assert divergence(batch) < 1e-3
    for wrong in (
        replace(batch, place=batch.place + 1),
        replace(batch, place=batch.place - 1),
        WRONG["states one place early"](batch),
        WRONG["states one place late"](batch),
    ):
        assert divergence(wrong) > 0.5


@pytest.mark.parametrize("kind", ["mlp", "medusa", "distilled"])
def test_nothing_reaches_from_one_document_into_another(kind: str) -> None:
    """Guesses of a document are those that it has alone; other neighbours change none of them."""
    one = documents()[0]
    beside = all_of(kind, collate(documents()))
    alone = all_of(kind, collate([one]))
    for ours, all_ in zip(alone, beside, strict=True):
        own = all_.at < len(one.answer)
        assert torch.equal(all_.at[own], ours.at)
        assert torch.allclose(all_.logits[own], ours.logits, atol=1e-4)


# ---- the loss ----


def step(of: Student, batch: Batch, world: int = 1) -> Tensor:
    """The loss of a training step."""
    module = DraftTraining(of, Kl(), AdamW(), gamma=3)
    module.trainer = SimpleNamespace(world_size=world)  # type: ignore[assignment]
    module.log = lambda *given, **named: None  # type: ignore[method-assign]
    return module.training_step(batch, 0)


def gradient(of: Student, loss: Tensor) -> Tensor:
    trained = [weight for weight in of.parameters() if weight.requires_grad]
    parts = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def summed_alone(kind: str) -> tuple[Tensor, int]:
    """Of the first head: the sum of the rows' losses, each document by itself, and how many rows there are."""
    total, rows = torch.zeros(()), 0
    for each in documents():
        batch = collate([each])
        count = len(next(iter(student(kind).guesses(batch))).at)
        total, rows = total + step(one_head(kind), batch) * count, rows + count
    return total, rows


@cache
def one_head(kind: str) -> Student:
    """The first head of a student alone."""
    if kind == "distilled":
        return student(kind)
    made = copy.copy(student(kind))
    made.heads = 1
    return made


def expected_rows(kind: str) -> int:
    return sum(n if kind == "distilled" else n - 1 for _, n in SIZES)


@pytest.mark.parametrize("kind", ["mlp", "medusa", "distilled"])
def test_padding_and_neighbours_change_neither_loss_nor_gradient(kind: str) -> None:
    """The step's loss is the mean over all supervised tokens, each as in its document alone."""
    total, rows = summed_alone(kind)
    assert rows == expected_rows(kind)
    of = one_head(kind)
    loss = step(of, collate(documents()))
    assert loss.item() == pytest.approx(total.item() / rows, rel=1e-5)
    expected = gradient(of, total / rows)
    assert torch.allclose(gradient(of, loss), expected, atol=1e-6 * float(expected.abs().max()) + 1e-7)


def test_wrong_means_are_found_out() -> None:
    """Over padding, over prompts, and of the documents' means."""
    total, _ = summed_alone("distilled")
    right = step(student("distilled"), collate(documents())).item()
    padded = total.item() / (len(SIZES) * max(map(sum, SIZES)))
    of_means = sum(step(student("distilled"), collate([each])).item() for each in documents()) / len(SIZES)
    prompts_too = Texts(as_read(target(), each.ids.tolist(), 1) for each in documents() if len(each.ids) > 1)
    over_prompts = step(student("distilled"), collate(prompts_too)).item()
    for wrong in (padded, of_means, over_prompts):
        assert abs(wrong / right - 1) > 1e-2


def test_heads_are_weighted_so_that_the_rate_does_not_depend_on_their_number() -> None:
    """sum of 0.8^i L_i over sum of 0.8^i, each L_i the mean over its own rows."""
    batch = collate(documents())
    of = student("mlp")
    p = of.teacher(batch)
    means = [Kl()(p[each.at], each.logits).mean() for each in of.guesses(batch)]
    expected = sum(0.8**i * mean for i, mean in enumerate(means)) / sum(0.8**i for i in range(HEADS))
    assert torch.allclose(step(of, batch), expected)  # type: ignore[arg-type]


def test_ranks_with_unequal_parts_have_the_gradient_of_one_process() -> None:
    """Each divides by the rows of all; DDP then averages. With counts of their own they would not."""
    whole = collate(documents())
    of = student("distilled")
    right = gradient(of, step(of, whole))
    parts = [collate(documents()[:2]), collate(documents()[2:])]
    total = torch.tensor([float(len(whole.answer))])

    def averaged(count: Any) -> Tensor:
        parts_of = []
        for part in parts:
            module = DraftTraining(of, Kl(), AdamW(), gamma=3)
            module.trainer = SimpleNamespace(  # type: ignore[assignment]
                world_size=2, strategy=SimpleNamespace(reduce=lambda rows, reduce_op: count(rows))
            )
            module.log = lambda *given, **named: None  # type: ignore[method-assign]
            parts_of.append(gradient(of, module.training_step(part, 0)))
        return sum(parts_of) / 2  # type: ignore[return-value]

    assert torch.allclose(averaged(lambda rows: total), right, atol=1e-6)
    assert not torch.allclose(averaged(lambda rows: 2 * rows), right, atol=1e-3)


# ---- the order ----

LENGTHS = [7 + (37 * i) % 50 for i in range(101)]


def epochs(count: int = 2, **place: Any) -> list[list[int]]:
    order = Order(LENGTHS, **{"batch_size": 4, "seed": 0, **place})
    found = []
    for epoch in range(count):
        order.set_epoch(epoch)
        found.append(list(order))
        assert len(found[-1]) == len(order)
    return found


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    first, second = epochs()
    assert [first, second] == epochs()
    assert first != second
    assert epochs(seed=1)[0] not in (first, second)
    assert len({tuple(each) for seed in range(3) for each in epochs(seed=seed)}) == 6


def test_an_epoch_has_each_document_at_most_once_and_another_rest_is_left_out() -> None:
    left = set()
    for each in epochs(6):
        assert len(set(each)) == len(each) == 100
        left |= set(range(101)) - set(each)
    assert len(left) > 2


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batches_of_one_process(world: int) -> None:
    """Disjoint, and together the same documents in the same step."""
    for whole, *parts in zip(
        epochs(batch_size=8),
        *(epochs(batch_size=8 // world, rank=rank, world=world) for rank in range(world)),
        strict=True,
    ):
        size = 8 // world
        for b in range(len(whole) // 8):
            together = list(chain(*(part[b * size : (b + 1) * size] for part in parts)))
            assert together == whole[8 * b : 8 * (b + 1)]


def test_documents_of_a_batch_are_of_similar_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def spread() -> float:
        (order,) = epochs(1)
        groups = [[LENGTHS[i] for i in order[at : at + 4]] for at in range(0, len(order), 4)]
        return sum(max(group) - min(group) for group in groups) / len(groups)

    sorted_ = spread()
    monkeypatch.setattr(batches, "WINDOW", 1)
    assert sorted_ < 5 < 20 < spread()


def test_short_batches_do_not_come_first() -> None:
    (order,) = epochs(1)
    means = [sum(LENGTHS[i] for i in order[at : at + 4]) for at in range(0, len(order), 4)]
    assert means != sorted(means)


@pytest.mark.parametrize("world", [1, 2])
def test_skipped_batches_are_left_out_once(world: int) -> None:
    order = Order(LENGTHS, 4, 0, world - 1, world)
    whole = list(order)
    order.skip = 3
    assert list(order) == whole[12:]
    assert list(order) == whole


def loader(count: int = 22) -> Loader:
    texts: Any = list(range(count))
    return Loader(texts, batch_size=4, sampler=Order(LENGTHS[:count], 4, 0), collate_fn=list)


def some(of: Iterator[Any], count: int) -> list[Any]:
    return [next(of) for _ in range(count)]


def test_a_loader_goes_on_in_the_middle_of_an_epoch() -> None:
    straight = list(loader())
    assert len(straight) == 5
    first = loader()
    done = some(iter(first), 2)
    assert first.state_dict() == {"done": 2}
    second = loader()
    second.load_state_dict(first.state_dict())
    going = iter(second)
    done += some(going, 1)
    assert second.state_dict() == {"done": 3}
    third = loader()
    third.load_state_dict(second.state_dict())
    assert done + list(third) == straight
    assert list(third) == straight


def test_after_the_end_of_an_epoch_the_next_is_whole() -> None:
    first = loader()
    list(first)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 5


def test_a_plain_loader_would_replay_the_epoch() -> None:
    """What `skip` is for."""
    first, second = loader(), loader()
    some(iter(first), 2)
    assert next(iter(second)) == next(iter(loader()))
    assert first.state_dict() == {"done": 2}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_sees_each_document_once(world: int) -> None:
    seen: list[tuple[int, ...]] = []
    for rank in range(world):
        data = DraftData(SimpleNamespace(val=documents(), train=documents()), batch_size=2, seed=0)  # type: ignore[arg-type]
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)  # type: ignore[assignment]
        seen += [tuple(ids) for batch in data.val_dataloader() for ids in batch.ids.tolist()]
    short = {tuple(each.ids.tolist()) for each in documents()}
    assert len(seen) == len(SIZES)
    assert {next(ids for ids in short if each[: len(ids)] == ids) for each in seen} == short


def test_too_few_documents_are_refused() -> None:
    """Nothing would be trained, or one rank would wait for another's share of a validation for ever."""
    few: Any = SimpleNamespace(val=documents(), train=documents())
    for world, size, key in ((1, 6, "data.batch_size"), (3, 2, "data.batch_size"), (6, 1, "data.val_share")):
        data = DraftData(few, batch_size=size, seed=0)
        data.trainer = SimpleNamespace(global_rank=0, world_size=world)  # type: ignore[assignment]
        with pytest.raises(UserError, match=f"^{key}: 5 documents "):
            data.val_dataloader() if "val" in key else data.train_dataloader()


def test_a_batch_moves_as_a_whole() -> None:
    batch = collate(documents()).to(torch.device("meta"))
    assert all(getattr(batch, name).device.type == "meta" for name in Batch.__dataclass_fields__)


def test_a_single_document_is_a_batch() -> None:
    alone: Document = documents()[1]
    assert collate([alone]).anchors(0).tolist() == []
