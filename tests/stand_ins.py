"""Models of a few lines: table models that read their own cache.

A table model computes logits from the ids it finds in the cache it was given, under the mask it was given, never from
anything beside it, so a lost, stale or doubled entry changes the result at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from specpipe.audit.exact import explore
from specpipe.audit.tables import FixedProposer, Rule
from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.proposers import artifact
from specpipe.proposers.artifact import Card
from specpipe.proposers.counts import vocabulary_hash
from specpipe.proposers.heads import KINDS, Heads
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier import compiled, graphs
from specpipe.verifier.eager import EagerVerifier
from specpipe.verifier.targets import Target, tiny
from train.shards import Document


def chain(size: int) -> Rule:
    return lambda ids: _peak(size, ids[-1] + 1)


def context(size: int) -> Rule:
    return lambda ids: _peak(size, 1 + sum(ids))


def window(size: int, width: int) -> Rule:
    return lambda ids: _peak(size, 1 + sum(ids[-width:]))


def constant(p: list[float]) -> Rule:
    logits = torch.tensor(p, dtype=torch.float64).log()
    return lambda ids: logits


def _peak(size: int, best: int) -> Tensor:
    logits = torch.zeros(size, dtype=torch.float64)
    logits[best % size] = 10.0
    return logits


class TableLayer(nn.Module):
    """An attention layer whose keys are the ids themselves; `rule` turns those it sees into logits."""

    def __init__(self, index: int, rule: Rule) -> None:
        super().__init__()
        self.index, self.rule = index, rule


class TableEmbeddings(nn.Module):
    """Embedding or head of a table model: its hidden states are its logits, and each id has a unit vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size))

    def forward(self, states: Tensor) -> Tensor:
        return states


class TableModel(nn.Module):
    """A causal LM of `transformers`' shape: its logits are the sum of its layers'."""

    base_model_prefix = "model"

    def __init__(
        self, rule: Rule, size: int, context: int | None = None, dtype: torch.dtype = torch.float64, *more: Rule
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config: Any = SimpleNamespace(
            num_hidden_layers=1 + len(more), vocab_size=size, max_position_embeddings=context, eos_token_id=None
        )
        self.config.get_text_config = lambda: self.config
        self.model: Any = nn.Module()
        self.model.config = self.config
        self.model.layers = nn.ModuleList(TableLayer(i, each) for i, each in enumerate((rule, *more)))
        self.size, self.dtype = size, dtype
        self.embeddings = TableEmbeddings(size).to(dtype)
        self.calls: list[SimpleNamespace] = []

    @property
    def base_model(self) -> Any:
        return self.model

    def get_input_embeddings(self) -> TableEmbeddings:
        return self.embeddings

    def get_output_embeddings(self) -> TableEmbeddings:
        return self.embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
    ) -> Any:
        rows, width = input_ids.shape
        seen = [input_ids for _ in self.model.layers]
        if cache is not None:
            entries = torch.stack([input_ids, position_ids], -1).double()[:, None]  # [R, 1, W, 2]
            seen = [cache.update(entries, entries, layer.index)[0] for layer in self.model.layers]
        if attention_mask is None:
            attention_mask = torch.ones(width, width, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
        self.calls.append(
            SimpleNamespace(ids=input_ids.tolist(), positions=None if cache is None else position_ids.tolist())
        )
        keep = range(width)[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep.tolist()
        logits = torch.zeros(rows, len(keep), self.size, dtype=self.dtype)
        for b in range(rows):
            for i, column in enumerate(keep):
                if cache is not None and column and position_ids[b, column] == position_ids[b, column - 1]:
                    continue  # padding behind a shorter row
                mask = attention_mask[b, 0, column]
                for layer, entries in zip(self.model.layers, seen, strict=True):
                    logits[b, i] += layer.rule(self._visible(entries, mask, b, cache is not None))
        return SimpleNamespace(logits=self.embeddings(logits))

    def _visible(self, seen: Tensor, mask: Tensor, b: int, cached: bool) -> list[int]:
        if not cached:
            return seen[b, : int(mask.sum())].tolist()
        entries = seen[b, 0, mask].long()  # [n, 2] of id, position
        assert entries[:, 1].tolist() == list(range(len(entries))), "a position is missing, doubled or out of place"
        return entries[:, 0].tolist()


class ToyTokenizer:
    """Ids as letters; no chat template."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def right_but_at(rule: Rule, place: int, size: int) -> FixedProposer:
    """Guesses greedily what the rule says, and one id too high at `place` of the block (-1: nowhere)."""

    def guess(tokens: list[int], k: int) -> list[int]:
        block: list[int] = []
        for i in range(k):
            best = int(rule([*tokens, *block]).argmax())
            block.append((best + (i == place)) % size)
        return block

    return FixedProposer(guess)


def pipeline_of(
    rule: Rule,
    size: int,
    proposer: Any,
    *,
    gamma: int = 4,
    sampler: Any = None,
    seed: int = 0,
    context: int | None = None,
    eos: int | list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Pipeline:
    model = TableModel(rule, size, context, dtype)
    model.config.eos_token_id = eos
    verifier = EagerVerifier(Target(model, ToyTokenizer(), "table", None))
    model.calls.clear()
    return Pipeline(
        verifier=verifier,
        proposer=proposer,
        sampler=sampler or Rejection(),
        settings=GenerationSettings(**settings),
        num_speculative_tokens=gamma,
        seed=seed,
    )


def greedy(rule: Rule, prompt: list[int], n: int) -> list[int]:
    """Plain greedy decoding by the rule itself."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(rule(ids).argmax()))
    return ids[len(prompt) :]


def small(kind: str, **config: Any) -> Any:
    """A random model of `transformers`, a few kilobytes in float64, always the same one."""
    import transformers

    common = {"vocab_size": 61, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common |= {"GPT2": {"n_embd": 32, "n_head": 2, "n_positions": 64}}.get(
        kind,
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
    )
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**common | config)
    name = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind.removesuffix('Text')}ForCausalLM")
    return getattr(transformers, name)(made).double().eval()


def sharpened(model: Any) -> Any:
    """The same model with weights large enough for attention to decide what comes next."""
    for weight in model.parameters():
        weight.data *= 4 if weight.dim() > 1 else 1
    return model


def uncached(model: Any, ids: list[int]) -> Tensor:
    """[n, V] from the model's own forward, which makes its own masks."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def own_greedy(model: Any, prompt: list[int], n: int) -> list[int]:
    """Plain greedy decoding by a model's own forward, without any cache."""
    return greedy(lambda ids: uncached(model, ids)[-1], prompt, n)


def saved_tiny(folder: Path) -> Path:
    """The target `tiny` as a directory of `transformers`."""
    target = tiny(device="cpu")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def random_heads(kind: str, hidden: int, heads: int = 3) -> Heads:
    """Heads whose guesses depend on all that they are given, always the same ones."""
    made = KINDS[kind](hidden=hidden, heads=heads)
    torch.manual_seed(0)
    for weight in made.parameters():
        weight.data = torch.randn_like(weight) * (1.0 if weight.dim() == 1 else hidden**-0.5)
    return made


def saved_heads(folder: Path, heads: Heads, target: Target, ids: list[int] | None = None) -> Path:
    """The heads in a folder, for a target; they can say `ids`, or all."""
    card = Card(heads.kind, target.name, vocabulary_hash(target.tokenizer), heads.hidden, {"heads": heads.heads})
    artifact.save(folder, card, heads.state_dict(), torch.tensor(ids or range(target.vocabulary)))
    return folder


class Texts(list[Document]):
    """Documents in memory, as training takes those on disk."""

    @property
    def lengths(self) -> list[int]:
        return [len(each.ids) for each in self]

    def generated_ids(self) -> Any:
        return torch.cat([each.answer for each in self]).numpy()


def as_read(target: Target, ids: list[int], prompt: int, temperature: float = 0.0) -> Document:
    """Any ids as a document: what the target thinks of those behind the prompt."""
    with torch.inference_mode():
        read = target.model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        states = read[prompt - 1 : -1].float()
        logz = (states @ target.head_weight.float().T).logsumexp(-1)
    states, logz = states.clone(), logz.clone()  # not of inference mode
    return Document(torch.tensor(ids), prompt, states.to(torch.bfloat16), logz, temperature)


class Compared:
    """Drafts with what the verifier keeps, and checks each draft with a twin that reads everything for itself."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.sharing, self.alone = make(), make()
        self.drafted = 0

    def bind(self, target: Target) -> None:
        self.sharing.bind(target)
        self.alone.bind(target)

    def attach(self, verifier: EagerVerifier) -> None:
        self.sharing.attach(verifier)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        copies = copy.deepcopy(sequences)
        draft = self.sharing.propose(sequences, lengths)
        wanted = self.alone.propose(copies, [k if s.steps else 0 for s, k in zip(sequences, lengths, strict=True)])
        for b in range(len(sequences)):
            (x, q), (y, r) = draft.row(b), wanted.row(b)
            assert x == y
            assert (q is None) == (r is None)
            assert q is None or r is None or torch.allclose(q, r, atol=1e-6)
            self.drafted += len(x)
        return draft


def law(pipeline: Pipeline, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Of whole requests: every decision of every step explored, caches rolled back in between."""

    def text(chance: Any) -> tuple[int, ...]:
        sequence = Sequence(prompt, pipeline.settings, chance=chance)
        for _ in pipeline.decode(sequence):
            pass
        return tuple(sequence.new_tokens)

    found: dict[tuple[int, ...], float] = {}
    for ids, mass in explore(text):
        found[ids] = found.get(ids, 0.0) + mass
    return found


def played(
    self: graphs.Recorder, run: Callable[[], graphs.Outputs], device: torch.device
) -> tuple[Callable[[], None], graphs.Outputs]:
    """Stands for a `graphs.Recorder` where there is no GPU: what is played are the operations of one run of `run`.

    The same ones over the same memory, with whatever numbers Python passed to them then, as in a CUDA graph; and what
    looks at a number of a tensor cannot be recorded.
    """
    traced = make_fx(run)()
    outputs = run()

    def play() -> None:
        for kept, made in zip(outputs, traced(), strict=True):
            if kept is not None:
                kept.copy_(made)

    return play, outputs


@contextmanager
def recordable() -> Iterator[None]:
    """Inside the block models on the CPU are recorded as they are on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.Recorder, "__call__", played)
        patch.setattr(
            compiled, "unrecorded", lambda model: "already" if isinstance(model, graphs.GraphedModel) else None
        )
        yield
