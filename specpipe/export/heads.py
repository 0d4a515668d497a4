"""Trained heads on the target's states, written in the formats `medusa` and `mlp_speculator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpipe.errors import UserError
from specpipe.export import about_the_proposer
from specpipe.export.check import Check, NotTheSame, compare
from specpipe.export.serving import Serving
from specpipe.export.texts import ANSWER, Text, read, texts_of
from specpipe.export.trimming import all_rows, penalty_row, settled_head
from specpipe.formats import load_heads, medusa, mlp_speculator
from specpipe.formats.checkpoint import save_files
from specpipe.proposers.bound_heads import TrainedHeads
from specpipe.verifier.support import ROUNDING
from specpipe.verifier.targets import Target

ABLE = ("penalty", "zero")  # of `trimming.HEADS`
ARCHITECTURES = {"arctic": "ArcticMLPSpeculatorPreTrainedModel", "tgi": "MLPSpeculatorPreTrainedModel"}
MLP_LOADED_BY = {
    "arctic": (
        "ArcticInference, a plug-in of vLLM: `arctic`, by its sources, not tried",
        "it rounds the shared head to 8 bits",
    ),
    "tgi": (
        "Text Generation Inference and fms-extras: by their sources, not tried",
        "not with fewer tokens than there are heads: the weights of the tokens depend on that number",
    ),
}
BY_SPECPIPE = "specpipe: `proposer=mlp proposer.path=...`"


@dataclass(frozen=True)
class Places:
    """Where heads guess: the target's states [N, H], and the tokens [N, n] from the newest one on that they see."""

    states: Tensor
    tokens: Tensor


class HeadsExport:
    """What both kinds have in common. Numbers are multiplied in float32, rounded once to the type of the target.

    Args:
        trained: the heads, not bound.
        target: the one that they were trained for.
        head: what becomes of the ids that they cannot say, see `trimming.py`.

    Raises:
        UserError: for another target, and a head that the heads cannot have.
    """

    serving: Serving
    loaded_by: tuple[str, ...]

    def __init__(self, trained: TrainedHeads, target: Target, head: str | None) -> None:
        with about_the_proposer():
            trained.refuse_other(target)
        self.training: Mapping[str, Any] = trained.card.training
        self._heads: Any = trained.module
        self._ids = trained.ids
        self._embedding = target.embedding_weight.cpu()
        every_row = target.head_weight.cpu()
        self._dtype, self._size = every_row.dtype, target.vocabulary
        self._rows = every_row[self._ids].float()
        self.head = settled_head(head, trimmed=len(self._ids) < self._size, able=ABLE)
        fitting, checking = texts_of(target, ANSWER + self._heads.heads)
        self._fitting = _places(target.model, fitting, self._heads.heads)
        self._checking = _places(target.model, checking, self._heads.heads)

    def write(self, folder: Path) -> None:
        tensors = self._tensors(self._head_rows())
        save_files(folder, self._config(), {name: w.to(self._dtype, copy=True) for name, w in tensors.items()})

    def check(self, folder: Path) -> Check:
        at = self._checking
        _, features = self._passed(at)
        try:
            again = load_heads(folder).to(torch.device("cpu"), torch.float32)
        except UserError as error:
            raise NotTheSame(f"the artefact cannot be loaded back: {error.message}") from error
        return compare(
            (features @ self._rows.T).flatten(0, 1),
            again.logits(at.states, at.tokens).flatten(0, 1),
            self._ids,
            allowed=max(ROUNDING[self._dtype], ROUNDING[torch.float32]),
            same_law=self.head != "zero",
        )

    def _tensors(self, head: Tensor) -> dict[str, Tensor]:
        """All by their names in the file; head [V, H] as `_head_rows` gives it."""
        raise NotImplementedError

    def _config(self) -> dict[str, Any]:
        raise NotImplementedError

    def _head_rows(self) -> Tensor:
        """[V, H] rows for what the format's head is given."""
        given, _ = self._passed(self._fitting)
        other = penalty_row(given.flatten(0, 1)) if self.head == "penalty" else None
        return all_rows(self._for_head(self._rows), self._ids, self._size, other)

    def _for_head(self, rows: Tensor) -> Tensor:
        """Rows [D, H] for the heads' features as rows for what the format's head is given."""
        return rows

    def _passed(self, at: Places) -> tuple[Tensor, Tensor]:
        """What the format's head is given and the heads' own features, [N, n, H] each."""
        given, features, carry = [], [], at.states
        for i in range(self._heads.heads):
            carry, feature = self._heads.step(i, carry, self._embedding[at.tokens[:, i]].float())
            given.append(carry if self._heads.sees_drafts else feature)
            features.append(feature)
        return torch.stack(given, 1), torch.stack(features, 1)


class MedusaExport(HeadsExport):
    """Medusa heads over one shared head, as vLLM loads them. Without biases, which it drops unless told."""

    loaded_by: tuple[str, ...] = (
        "vLLM: `medusa`, the best token of each head, no tree; not more tokens than there are heads",
        BY_SPECPIPE,
        "not Text Generation Inference: its files have other names",
    )

    def __init__(self, trained: TrainedHeads, target: Target, head: str | None) -> None:
        super().__init__(trained, target, head)
        heads = self._heads.heads
        self.serving = Serving({"method": "medusa"}, heads, heads)

    def _tensors(self, head: Tensor) -> dict[str, Tensor]:
        blocks = {f"blocks.{i}.layers.0.weight": block for i, block in enumerate(self._heads.blocks)}
        return {**blocks, "lm_heads.0.weight": head}

    def _config(self) -> dict[str, Any]:
        return {
            "model_type": medusa.MODEL_TYPE,
            "architectures": [medusa.ARCHITECTURE],
            "hidden_size": self._heads.hidden,
            "vocab_size": self._size,
            "num_heads": self._heads.heads,
            "num_hidden_layers": 1,
            "original_lm_head": True,
            "medusa_fc_bias": False,
            "truncated_vocab_size": self._size,
        }


class MlpSpeculatorExport(HeadsExport):
    """MLP heads, their vocabulary tables multiplied out: emb = E A, head = W B.

    Args:
        flavour: arctic or tgi; the architecture's name depends on it.
        base: the target, by the name or path that an engine finds it under.
    """

    def __init__(self, trained: TrainedHeads, target: Target, head: str | None, *, flavour: str, base: str) -> None:
        super().__init__(trained, target, head)
        self._flavour, self._base, self._base_architecture = flavour, base, type(target.model).__name__
        self.loaded_by = (*MLP_LOADED_BY[flavour], BY_SPECPIPE, "not vLLM by itself, which refuses this architecture")
        heads = self._heads.heads
        keys = {"method": "arctic"} if flavour == "arctic" else None
        self.serving = Serving(keys, heads, heads, engine="vllm" if keys else "tgi")

    def _for_head(self, rows: Tensor) -> Tensor:
        return rows @ self._heads.outer

    def _tensors(self, head: Tensor) -> dict[str, Tensor]:
        made, table = self._heads, self._embedding.float() @ self._heads.inner
        tensors: dict[str, Tensor] = {}
        for i in range(made.heads):
            parts = {
                f"emb.{i}.weight": table,
                f"proj.{i}.weight": made.proj_1 if i else made.proj_0,
                f"head.{i}.weight": head,
                f"ln.{i}.weight": made.norm_weight,
                f"ln.{i}.bias": made.norm_bias,
            }
            tensors |= {f"{mlp_speculator.PREFIX}{name}": part for name, part in parts.items()}
        return tensors

    def _config(self) -> dict[str, Any]:
        heads, hidden = self._heads.heads, self._heads.hidden
        return {
            "architectures": [ARCHITECTURES[self._flavour]],
            "model_type": mlp_speculator.MODEL_TYPE,
            "vocab_size": self._size,
            "emb_dim": hidden,
            "inner_dim": hidden,
            "n_predict": heads,
            "top_k_tokens_per_head": [1] * heads,
            "n_candidates": heads,
            "tie_weights": True,
            "scale_input": True,
            "base_model_name_or_path": self._base,
            "base_model_archs": [self._base_architecture],
            "torch_dtype": str(self._dtype).removeprefix("torch."),
        }


def _places(model: Any, texts: list[Text], heads: int) -> Places:
    """All places of the answers behind which so many tokens stand."""
    states, tokens = [], []
    for text in texts:
        behind = torch.tensor(text.answer).unfold(0, heads, 1)
        tokens.append(behind)
        states.append(read(model, text)[0][: len(behind)])
    return Places(torch.cat(states), torch.cat(tokens))
