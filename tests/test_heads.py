"""Heads as modules: the recurrence of the paper with its tables, what a head sees, and the folder they are kept in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specpipe.errors import UserError
from specpipe.proposers import artifact
from specpipe.proposers.artifact import Card, in_eight_bits
from specpipe.proposers.heads import KINDS, MedusaHeads, MlpHeads, heads_of
from tests.stand_ins import random_heads

H, V, ROWS = 8, 11, 5


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


E, W, STATES = drawn(V, H), drawn(V + 1, H)[:V], 3 * drawn(ROWS, H)
IDS = torch.tensor([[(3 * row + i) % V for i in range(4)] for row in range(ROWS)])


def by_the_paper(heads: MlpHeads, s: Tensor, ids: list[int], **wrong: Any) -> Tensor:
    """[n, V] logits of one row, with tables of V rows; `wrong` replaces what is said beside it."""
    w, n, d = heads.double().state_dict(), heads.heads, H
    emb, head = E @ w["inner"], W @ w["outer"]
    a = 0.5 ** (0.5 / n)
    b = math.sqrt((1 - a * a) * d / 2)
    weight, exact = wrong.get("weight", b / a), wrong.get("gelu", "none")
    later = wrong.get("later", "proj_1")
    if wrong.get("scale_input", True):
        s = s / (s.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    logits = []
    for i in range(n):
        x = w["proj_0" if i == 0 else later] @ s + weight * emb[ids[i]]
        x = x / (x.square().mean() + 1e-6).sqrt() * w["norm_weight"] + w["norm_bias"]
        s = F.gelu(x, approximate=exact)
        logits.append(head @ s)
    return torch.stack(logits)


def difference(heads: MlpHeads, **wrong: Any) -> float:
    logits = heads.double().features(STATES, E[IDS[:, : heads.heads]]) @ W.T
    wanted = torch.stack([by_the_paper(heads, s, ids.tolist(), **wrong) for s, ids in zip(STATES, IDS, strict=True)])
    return (logits - wanted).abs().max().item()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_mlp_heads_are_the_papers_recurrence_with_its_tables_multiplied_out(n: int) -> None:
    assert difference(random_heads("mlp", H, n)) < 1e-12  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"weight": 1.0}, {"gelu": "tanh"}, {"later": "proj_0"}, {"scale_input": False}])
def test_another_recurrence_would_be_seen(wrong: dict[str, Any]) -> None:
    assert difference(random_heads("mlp", H, 3), **wrong) > 1e-4  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "weight"), [(3, 8.652), (4, 7.382), (5, 6.544)])
def test_the_weight_of_a_token_is_that_of_the_published_implementation(n: int, weight: float) -> None:
    assert MlpHeads(hidden=576, heads=n).weight_of_token == pytest.approx(weight, abs=1e-3)


def test_training_begins_at_the_target() -> None:
    heads = MlpHeads(hidden=H, heads=2)
    heads.start(7 * E.float())
    assert (7 * E.float() @ heads.inner).std().item() == pytest.approx(H**-0.5)
    assert torch.equal(heads.inner, heads.inner[0, 0] * torch.eye(H))
    for matrix in (heads.proj_0, heads.proj_1, heads.outer):
        assert torch.equal(matrix, torch.eye(H))
    assert all(weight.requires_grad for weight in heads.parameters())


def test_all_heads_but_the_first_projection_share_their_matrices() -> None:
    assert sum(weight.numel() for weight in MlpHeads(hidden=576, heads=3).parameters()) == 4 * 576**2 + 2 * 576
    assert "proj_1" not in MlpHeads(hidden=H, heads=1).state_dict()


def test_medusa_heads_start_as_the_targets_own_head() -> None:
    features = MedusaHeads(hidden=H, heads=3).double().features(STATES, E[IDS[:, :3]])
    assert torch.equal(features, STATES[:, None].expand(-1, 3, -1))


def test_a_medusa_head_adds_a_gated_block_to_the_state() -> None:
    heads = random_heads("medusa", H, 3).double()
    features = heads.features(STATES, E[IDS[:, :3]])
    for i in range(3):
        block = STATES @ heads.state_dict()[f"blocks.{i}"].T
        assert torch.allclose(features[:, i], STATES + block * block.sigmoid())


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_and_all_at_once_are_the_same(kind: str) -> None:
    heads, embedded = random_heads(kind, H, 3).double(), E[IDS[:, :3]]
    together, carry = heads.features(STATES, embedded), STATES
    for i in range(3):
        carry, feature = heads.step(i, carry, embedded[:, i])
        assert torch.equal(feature, together[:, i])


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_sees_the_tokens_before_its_guess_alone(kind: str) -> None:
    heads, embedded = random_heads(kind, H, 3).double(), E[IDS[:, :3]]
    other = embedded.clone()
    other[:, 1] += 1
    changed = (heads.features(STATES, other) - heads.features(STATES, embedded)).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, heads.sees_drafts, heads.sees_drafts]


@pytest.mark.parametrize("wrong", [{"heads": 0}, {"heads": "3"}, {"hidden": 0}, {"hidden": 1.5}])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_no_heads_have_are_refused(kind: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        KINDS[kind](**{"hidden": H, "heads": 3} | wrong)


# ---- the folder ----


def card_of(kind: str, **other: Any) -> Card:
    given: dict[str, Any] = {"target": "toy", "vocabulary": "-", "hidden": H, "shape": {"heads": 3}}
    return Card(kind, **given | other)


def loaded(folder: Path) -> Any:
    card, weights, _ = artifact.load(folder, KINDS)
    return heads_of(card, weights)


def logits_of(heads: Any) -> Tensor:
    return heads.features(STATES.float(), E[IDS[:, :3]].float()) @ W.float().T


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_give_the_same_logits(kind: str, tmp_path: Path) -> None:
    """In 8 bits up to their rounding."""
    heads = random_heads(kind, H, 3)
    artifact.save(tmp_path / "whole", card_of(kind), heads.state_dict(), torch.arange(V))
    artifact.save(tmp_path / "small", card_of(kind), in_eight_bits(heads.state_dict()), torch.arange(V))
    whole, small = loaded(tmp_path / "whole"), loaded(tmp_path / "small")
    assert torch.equal(logits_of(whole), logits_of(heads))
    assert not any(weight.requires_grad for weight in whole.parameters())
    off = (logits_of(small) - logits_of(heads)).abs().max() / logits_of(heads).std()
    assert 0 < off < 0.1


@pytest.mark.parametrize("other", [{"hidden": H + 1}, {"shape": {"heads": 2}}, {"shape": {}}, {"shape": {"n": 3}}])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_card_are_refused(kind: str, other: dict[str, Any], tmp_path: Path) -> None:
    if kind == "mlp" and other == {"shape": {"heads": 2}}:
        other = {"shape": {"heads": 1}}  # from two heads on the tensors are the same
    artifact.save(tmp_path, card_of(kind, **other), random_heads(kind, H, 3).state_dict(), torch.arange(V))
    with pytest.raises(UserError, match="not those of the card"):
        loaded(tmp_path)


def test_a_draft_of_another_kind_is_refused(tmp_path: Path) -> None:
    artifact.save(tmp_path, card_of("distilled"), random_heads("mlp", H, 3).state_dict(), torch.arange(V))
    with pytest.raises(UserError, match="holds a distilled draft, not mlp or medusa"):
        loaded(tmp_path)
