"""What is trained (config group `student`): modules that guess, and how a batch of text becomes their guesses.

A student is built in two steps: from its config, then with `prepare` for a target. Embedding and head are the target's:
buffers outside of checkpoints, without gradients. Knows models and batches; knows nothing of losses or trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specpipe.errors import UserError, choice, flag, integer
from specpipe.proposers import artifact
from specpipe.proposers.artifact import Card
from specpipe.proposers.counts import LONGEST, Counts, Origin, Smoothed, fit, vocabulary_hash
from specpipe.proposers.counts import save as save_counts
from specpipe.proposers.distilled import KIND as DISTILLED
from specpipe.proposers.distilled import DistilledDraft, pruned, save_draft
from specpipe.proposers.heads import KINDS, Heads, MlpHeads
from specpipe.proposers.mlp import HeadsProposer
from specpipe.proposers.table import CountsProposer
from specpipe.verifier.targets import Target
from train.batches import Batch
from train.layers import best_layers
from train.shards import Text
from train.vocabulary import kept_ids


@dataclass(frozen=True)
class Guesses:
    """What one head, or a model, guesses in a batch.

    head: from 0; 0 for a model. at: [A] numbers of the guessed tokens among the batch's written ones. logits: [A, D].
    """

    head: int
    at: Tensor
    logits: Tensor


class Student(nn.Module):
    """What both trained kinds have in common.

    `option` of the group `proposer` decodes with it; `trains`: it has weights that a loss moves; `start` is the first
    place that it can guess then, as in `specpipe.walk`; `heads` is how many guesses begin at one place.

    Args:
        vocabulary: how many ids it can say, the most frequent ones of the text; None: all.
    """

    option: str
    trains = True
    start: int
    heads: int
    head_rows: Tensor
    row_of: Tensor
    ids: Tensor
    _hidden: int

    def __init__(self, vocabulary: int | None) -> None:
        super().__init__()
        self.vocabulary = None if vocabulary is None else integer("vocabulary", vocabulary, 2)

    def prepare(self, target: Target, text: Text) -> None:
        """Build what is trained for a target, with the ids that its text is mostly made of.

        Raises:
            UserError: for a target that it cannot be trained for.
        """
        self.ids = kept_ids(text.generated_ids(), target, self.vocabulary)
        row_of = torch.full((target.vocabulary,), -1)
        row_of[self.ids] = torch.arange(len(self.ids))
        self.register_buffer("row_of", row_of, persistent=False)
        self.register_buffer("head_rows", target.head_weight[self.ids].float().contiguous(), persistent=False)
        self._target_name, self._vocabulary_hash = target.name, vocabulary_hash(target.tokenizer)
        self._hidden = self.head_rows.shape[1]
        self._build(target, text)

    def teacher(self, batch: Batch) -> Tensor:
        """[G, D] the target's true probabilities of the kept ids at each written token; a row sums to 1 at most."""
        with torch.no_grad(), torch.autocast(batch.states.device.type, enabled=False):
            return (F.linear(batch.states.float(), self.head_rows) - batch.logz[:, None]).exp()

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        """Of each head in turn, for every written token that it can be taught with."""
        raise NotImplementedError

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        """Write a draft; `training` says how it came about."""
        raise NotImplementedError

    def proposer(self, folder: Path) -> Any:
        """What decodes with the draft that was saved there, in the precision that it was trained in."""
        raise NotImplementedError

    def path(self, folder: Path) -> Path:
        """What `proposer.path` takes, of the draft in a folder."""
        return folder

    def _build(self, target: Target, text: Text) -> None:
        raise NotImplementedError

    def _card(self, kind: str, shape: dict[str, Any], training: dict[str, Any]) -> Card:
        return Card(kind, self._target_name, self._vocabulary_hash, self._hidden, shape, training)


class HeadsStudent(Student):
    """Heads on the target's last hidden state, for `proposer=mlp`.

    Args:
        heads: how many tokens they draft.
        form: `mlp`, each sees the token drafted before its own (arXiv 2404.19124), or `medusa`, none does
            (arXiv 2401.10774).
        vocabulary: see `Student`.
    """

    option, start = "mlp", 1
    module: Heads
    embedding: Tensor

    def __init__(self, *, heads: int = 3, form: str = "mlp", vocabulary: int | None = 8192) -> None:
        super().__init__(vocabulary)
        self.heads, self.form = integer("heads", heads, 1), choice("form", form, KINDS)

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        anchors = batch.anchors(0)
        carry = batch.states[anchors].to(self.head_rows.dtype)
        for head in range(self.heads):
            going = batch.left[anchors] > head
            anchors, carry = anchors[going], carry[going]
            embedded = self.embedding[batch.answer[anchors + head]].to(carry.dtype)
            carry, feature = self.module.step(head, carry, embedded)
            yield Guesses(head, anchors + head + 1, F.linear(feature, self.head_rows))

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        weights = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in self.module.state_dict().items()}
        artifact.save(folder, self._card(self.form, {"heads": self.heads}, training), weights, self.ids)

    def proposer(self, folder: Path) -> HeadsProposer:
        return HeadsProposer(path=str(folder))

    def _build(self, target: Target, text: Text) -> None:
        self.register_buffer("embedding", target.embedding_weight.detach(), persistent=False)
        self.module = KINDS[self.form](hidden=self._hidden, heads=self.heads)
        if isinstance(self.module, MlpHeads):
            self.module.start(self.embedding)


class DistilledStudent(Student):
    """Some of the target's layers as a model of its own, for `proposer=distilled`.

    Args:
        layers: a list of the target's layers, or how many: those whose guesses, untrained, cover most of the target's
            law are then searched for.
        vocabulary: see `Student`.
    """

    option, start, heads = "distilled", 0, 1

    def __init__(self, *, layers: int | Items[int] = 4, vocabulary: int | None = 8192) -> None:
        super().__init__(vocabulary)
        if isinstance(layers, int):
            self.layers: int | list[int] = integer("layers", layers, 1)
        elif isinstance(layers, str) or not layers:
            raise UserError(f"{layers!r} is neither a number nor a list of the target's layers.", key="layers")
        else:
            self.layers = [integer("layers", each, 0) for each in layers]

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        read = self.model.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state  # [B, T, H]
        logits = F.linear(read.flatten(0, 1)[batch.place], self.head_rows)
        yield Guesses(0, torch.arange(len(batch.answer), device=logits.device), logits)

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        card = self._card(DISTILLED, {}, {**training, "layers": self.layers})
        save_draft(folder, self.model, card, self.ids)

    def proposer(self, folder: Path) -> DistilledDraft:
        return DistilledDraft(path=str(folder), dtype="float32")

    def _build(self, target: Target, text: Text) -> None:
        if isinstance(self.layers, int):
            self.layers = best_layers(target, self, text, self.layers)
        try:
            self.model = pruned(target.model, self.layers).float().train()
        except UserError as error:
            raise error.under("student") from error
        frozen = [self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight]
        for weight in frozen:
            weight.requires_grad_(False)


class TableStudent(Student):
    """Counts of n-grams, for `proposer=table`: one pass over the text, and nothing for a loss to train.

    Args:
        order: 1 unigrams, 2 bigrams, 3 trigrams.
        singletons: keep n-grams that occurred once, most of a table.
    """

    option, trains, start, heads = "table", False, 0, 1

    def __init__(self, *, order: int = 2, singletons: bool = True) -> None:
        super().__init__(vocabulary=None)
        self.order, self.singletons = integer("order", order, 1, LONGEST), flag("singletons", singletons)

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        rows, columns = batch.place // batch.ids.shape[1], batch.place % batch.ids.shape[1]
        contexts = [batch.ids[row, : column + 1] for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]
        laws = [self._law.law(self._law.context(context[-LONGEST:].tolist())) for context in contexts]
        device = batch.ids.device  # the counts are on the host
        yield Guesses(0, torch.arange(len(laws), device=device), torch.stack(laws).float().log().to(device))

    def save(self, folder: Path, training: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        origin = Origin(self._target_name, self._vocabulary_hash, f"{self._counts.tokens} tokens of {training['data']}")
        save_counts(self._counts, origin, self.path(folder))

    def proposer(self, folder: Path) -> CountsProposer:
        return CountsProposer(path=str(self.path(folder)))

    def path(self, folder: Path) -> Path:
        return folder / "table.safetensors"

    def _build(self, target: Target, text: Text) -> None:
        answers = (document.answer.tolist() for document in text)
        counts: Counts = fit(answers, order=self.order, size=target.vocabulary)
        self._counts = counts if self.singletons else counts.without_singletons()
        self._law = Smoothed(self._counts, self.order, target.vocabulary)
