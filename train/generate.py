"""The target writes its own training text (config group `data`): the law a draft must learn is the one it says.

Prompts go through the chat template as in `decode`; each is answered once per temperature. A prompt's answers stay on
one side of the split, and a shard is a pure function of its prompts, the settings and the seed: an interrupted run
goes on with the next shard, and a run that asks for more prompts of the same file adds to what is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import probabilities
from specpipe.draft import Draft
from specpipe.errors import UserError, integer, number
from specpipe.paths import from_start
from specpipe.prompts import DEMO, jsonl
from specpipe.proposers.counts import vocabulary_hash
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.text import TextCodec
from specpipe.verifier.compiled import CompiledVerifier
from specpipe.verifier.smollm2 import cache_root
from specpipe.verifier.support import ROUNDING, difference
from specpipe.verifier.targets import Target
from train.shards import Document, Text, describe, read_manifest, write_manifest, write_shard, written_tokens

SHARD = 128  # prompts of one
ENDED = 0.25  # share of a batch's rows that have ended before they are let go: moving the others costs a copy
PASS = 4096  # tokens of prompts read in one pass
PADDING = 1.2  # longest prompt of a pass, relative to its shortest
SALT = "specpipe split"
PARTS = 1000  # that prompts are split into
SAMPLES = 64  # numbers of each weight that enter the target's fingerprint

Note = Callable[[str], None]


class TargetText:
    """What the target answers to the prompts of a file.

    Args:
        prompts: a file of JSON lines with `prompt` or `turns`, or a list of such files; relative to the folder the
            command was started in. None: the demo prompts, for trying.
        limit: only the first so many prompts.
        tokens: enough written ones to train on; of the shards no more are written, or used, than it takes. None: all.
        temperatures: each prompt is answered once at each of them, by the target's own law there.
        max_new_tokens: of an answer; one that ends before that ends with its end-of-text id.
        max_prompt_tokens: longer prompts are left out, and counted.
        val_share: of the prompts, chosen by their hash, are kept for validation.
        seed: of the draws.
        rows: answers written in one pass.
        batch_size: documents in one optimiser step.
        folder: where the text is kept; None: in the cache, by a hash of all that it depends on.
    """

    def __init__(
        self,
        *,
        prompts: str | Items[str] | None = None,
        limit: int | None = None,
        tokens: int | None = None,
        temperatures: Items[float] = (0.0, 1.0),
        max_new_tokens: int = 128,
        max_prompt_tokens: int = 768,
        val_share: float = 0.05,
        seed: int = 0,
        rows: int = 32,
        batch_size: int = 16,
        folder: str | None = None,
    ) -> None:
        paths = [str(DEMO)] if prompts is None else [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(paths, Items) or not paths or not all(isinstance(path, str) for path in paths):
            raise UserError(f"{prompts!r} is not a file or a list of files.", key="prompts")
        self.limit = None if limit is None else integer("limit", limit, 1)
        self.tokens = None if tokens is None else integer("tokens", tokens, 1)
        if isinstance(temperatures, (str, float, int)) or not temperatures:
            raise UserError(f"{temperatures!r} is not a list of temperatures such as [0,1].", key="temperatures")
        self.temperatures = [number("temperatures", each, 0) for each in temperatures]
        self.max_new_tokens = integer("max_new_tokens", max_new_tokens, 2)
        self.max_prompt_tokens = integer("max_prompt_tokens", max_prompt_tokens, 1)
        self.val_share = number("val_share", val_share, 0, 0.5, above=True)
        self.seed, self.rows = integer("seed", seed, 0), integer("rows", rows, 1)
        self.batch_size = integer("batch_size", batch_size, 1)
        self.folder = None if folder is None else from_start(str(folder))
        self.texts = _texts(paths)

    def prepare(self, target: Target, note: Note) -> Corpus:
        """The text of these prompts, written by the target where it is not there yet.

        Raises:
            UserError: for too few prompts, a folder that holds the text of other prompts or another target, and a
                target whose law cannot be had from its states.
        """
        refuse_other_heads(target)
        origin = self._origin(target)
        folder = self.folder or cache_root() / "text" / _hash(json.dumps(origin, sort_keys=True))[:16]
        folder.mkdir(parents=True, exist_ok=True)
        wanted = self._wanted(target, note)
        lock = FileLock(folder / ".lock")
        with lock:
            known = read_manifest(folder)
            if known is None:  # before the first shard: no other text may go on with it, should this be interrupted
                known = {"origin": origin, "shards": {}}
                write_manifest(folder, known)
        if known["origin"] != origin:
            what = _differing(known["origin"], origin)
            raise UserError(f"{str(folder)!r} holds other text: {what}.", key="data.folder")
        needed = self._needed(folder, wanted)
        if fresh := needed is None:
            self._write(target, folder, wanted, note)
            needed = self._needed(folder, wanted)
        assert needed is not None  # they have been written
        with lock:
            shards = dict((read_manifest(folder) or known)["shards"])
            if new := [name for name in needed if name not in shards]:
                shards |= {name: describe(folder / name) for name in new}
                write_manifest(folder, {"origin": origin, "shards": shards})
        return Corpus(folder, origin, {name: shards[name] for name in needed}, target, fresh=fresh)

    def _needed(self, folder: Path, wanted: list[_Shard]) -> list[str] | None:
        """The shards that make enough tokens, in their order; None if some of them are not written yet."""
        names, tokens = [], 0
        for shard in wanted:
            if self.tokens is not None and tokens >= self.tokens:
                break
            if not (folder / shard.name).is_dir():
                return None
            names.append(shard.name)
            tokens += written_tokens(folder / shard.name) if shard.trains else 0
        return names

    def _origin(self, target: Target) -> dict[str, Any]:
        """All that a shard depends on. Rows are of it: a pass over other rows rounds differently."""
        return {
            "target": target.name,
            "weights": fingerprint(target.model),
            "vocabulary": vocabulary_hash(target.tokenizer),
            "template": _hash(str(getattr(target.tokenizer, "chat_template", None))),
            "dtype": target.describe()["dtype"],
            "prompts": _hash("\0".join(self.texts)),
            "temperatures": self.temperatures,
            "max_new_tokens": self.max_new_tokens,
            "max_prompt_tokens": self.max_prompt_tokens,
            "val_share": self.val_share,
            "seed": self.seed,
            "rows": self.rows,
        }

    def _wanted(self, target: Target, note: Note) -> list[_Shard]:
        """The shards of these prompts. A prompt's shard does not depend on `limit`, but for the last one's."""
        codec = TextCodec(target.tokenizer)
        longest = min(self.max_prompt_tokens, (target.context or sys.maxsize) - self.max_new_tokens)
        sides: dict[str, list[list[int]]] = {"val": [], "train": []}
        left_out = 0
        for text in self.texts[: self.limit]:
            ids = codec.encode(text)
            if len(ids) > longest:
                left_out += 1
            else:
                sides["val" if in_validation(text, self.val_share) else "train"].append(ids)
        if left_out:
            note(f"{left_out} prompts of more than {longest} tokens are left out")
        if few := [side for side, prompts in sides.items() if not prompts]:
            raise UserError(f"{len(self.texts)} prompts leave none for {few[0]!r}.", key="data.prompts")
        return [
            _Shard(_name(side, prompts[at : at + SHARD], at // SHARD), prompts[at : at + SHARD])
            for side, prompts in sides.items()
            for at in range(0, len(prompts), SHARD)
        ]

    def _write(self, target: Target, folder: Path, wanted: list[_Shard], note: Note) -> None:
        """Write the shards that are not on disk, finished ones of an interrupted run being there already.

        Processes that write one text at the same time share the work, a shard each.
        """
        todo = [shard for shard in wanted if not (folder / shard.name).is_dir()]
        answers = sum(len(shard.prompts) for shard in todo) * len(self.temperatures)
        prompt_tokens = sum(map(len, itertools.chain.from_iterable(shard.prompts for shard in todo)))
        hidden = target.model.config.get_text_config().hidden_size
        size = answers * self.max_new_tokens * (2 * hidden + 7) + 3 * prompt_tokens * len(self.temperatures)
        most = f"at most {answers * self.max_new_tokens:,} tokens, {size / 1e6:,.0f} MB"
        end = "" if self.tokens is None else f", until there are {self.tokens:,} to train on"
        note(f"{target.name} writes {answers:,} answers, {most}, to {folder}{end}")
        writer = Writer(target, self)
        for seconds in (0, -1):  # first what no other process is writing; then what one has left unfinished
            for shard in todo:
                if self._needed(folder, wanted) is not None:
                    return
                with contextlib.suppress(Timeout), FileLock(folder / f".{shard.name}.lock", timeout=seconds):
                    if not (folder / shard.name).is_dir():
                        written = write_shard(folder / shard.name, writer.answers(shard.prompts), target.vocabulary)
                        note(f"{shard.name}: {written['generated']:,} tokens, {writer.tokens_per_s:.0f} tokens/s")


@dataclass(frozen=True)
class _Shard:
    name: str
    prompts: list[list[int]]

    @property
    def trains(self) -> bool:
        return self.name.startswith("train")


class Corpus:
    """Text that is on disk, whole, for one target.

    folder: of the shards. origin: what the text depends on. shards: by name, what the manifest says of each. fresh:
    whether some of it was written a moment ago, by a target whose linear layers were compiled or packed for it.
    """

    def __init__(
        self, folder: Path, origin: dict[str, Any], shards: dict[str, Any], target: Target, *, fresh: bool
    ) -> None:
        self.folder, self.origin, self.shards, self.fresh = folder, origin, shards, fresh
        hidden = target.model.config.get_text_config().hidden_size
        self.train, self.val = (
            Text(
                [folder / name for name in shards if name.startswith(side)],
                vocabulary=target.vocabulary,
                hidden=hidden,
            )
            for side in ("train", "val")
        )

    def describe(self) -> dict[str, Any]:
        """What is told of it in results and cards: its origin and counts."""
        counts = {
            f"{side}_{what}": sum(shard[what] for name, shard in self.shards.items() if name.startswith(side))
            for side in ("train", "val")
            for what in ("documents", "generated")
        }
        checksum = _hash("".join(shard["sha256"] for _, shard in sorted(self.shards.items())))
        return {**self.origin, **counts, "sha256": checksum}


class Writer:
    """Lets a target answer prompts in batches, keeping the state that each token was drawn from."""

    def __init__(self, target: Target, text: TargetText) -> None:
        self._reader = CompiledVerifier(target, warn=False).reader
        self._eos = frozenset(target.eos_ids)
        self._text = text
        self._tokens = 0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / max(self._seconds, 1e-9)

    def answers(self, prompts: list[list[int]]) -> Iterator[Document]:
        """A document for each prompt and temperature, batches of similar length together."""
        numbers = range(len(self._text.temperatures))
        asked = [[_Answer(ids, index, self._text) for index in numbers] for ids in sorted(prompts, key=len)]
        size = max(1, self._text.rows // len(numbers))
        for at in range(0, len(asked), size):
            yield from self._batch(asked[at : at + size])

    def _batch(self, families: list[list[_Answer]]) -> Iterator[Document]:
        """The answers to some prompts; a family is those to one prompt."""
        start = time.monotonic()
        for group in of_similar_length(families):
            self._step(group)
        copies = [(family[0].sequence, answer.sequence) for family in families for answer in family[1:]]
        self._reader.copy_rows(copies)
        answers = going = list(itertools.chain.from_iterable(families))
        while going:
            self._step([[answer] for answer in going])
            ended = [answer.has_ended(self._eos) for answer in going]
            if sum(ended) >= ENDED * len(going):
                for answer in itertools.compress(going, ended):
                    answer.sequence.finish_reason = "stop"
                going = [answer for answer, over in zip(going, ended, strict=True) if not over]
        documents = [answer.document(self._eos) for answer in answers]
        self._seconds += time.monotonic() - start
        self._tokens += sum(len(document.states) for document in documents)
        yield from documents

    def _step(self, families: list[list[_Answer]]) -> None:
        """One more token for each answer. Of a family, whose texts are one so far, the first is read for all.

        Those that have ended go on until they are let go; what they write is cut off.
        """
        firsts = [family[0].sequence for family in families]
        logits = torch.cat(self._reader.read(firsts, Draft.of([[] for _ in firsts])))  # [B, V]
        logz = logits.float().logsumexp(-1)
        for first, family, row, total in zip(firsts, families, logits, logz, strict=True):
            for answer in family:
                answer.take(row, total)
            state = self._reader.state(first)
            assert state is not None  # it was read a moment ago
            for answer in family:
                answer.states.append(state)


class _Answer:
    """An answer while it is written, with the state and the logsumexp behind each of its tokens."""

    def __init__(self, prompt: list[int], index: int, text: TargetText) -> None:
        self.temperature = text.temperatures[index]
        self._settings = GenerationSettings(temperature=self.temperature, max_new_tokens=text.max_new_tokens)
        self.sequence = Sequence(prompt, self._settings, chance=Chance(text.seed, prompt, repeat=index))
        self.states: list[Tensor] = []
        self._logz: list[Tensor] = []

    def take(self, logits: Tensor, logz: Tensor) -> None:
        """Draw the next token from logits [V]."""
        if self.temperature == 0:
            token = int(logits.argmax())
        else:
            token = self.sequence.chance.draw(probabilities(logits, self._settings))
        self.sequence.commit([token], 0, [])
        self._logz.append(logz)

    def has_ended(self, eos: frozenset[int]) -> bool:
        return self.sequence.finish_reason is not None or not eos.isdisjoint(self.sequence.new_tokens)

    def document(self, eos: frozenset[int]) -> Document:
        """What was written, the first end-of-text id included."""
        written = self.sequence.new_tokens
        n = next((k + 1 for k, token in enumerate(written) if token in eos), len(written))
        ids = torch.tensor(self.sequence.tokens[: self.sequence.prompt_length + n])
        states = torch.stack(self.states[:n]).to("cpu", torch.bfloat16)
        logz = torch.stack(self._logz[:n]).cpu()
        return Document(ids, self.sequence.prompt_length, states, logz, self.temperature)


def of_similar_length(families: list[list[_Answer]]) -> Iterator[list[list[_Answer]]]:
    """Families, ascending by length of the prompt, in groups whose prompts are read in one pass with little padding."""
    group: list[list[_Answer]] = []
    for family in families:
        width = family[0].sequence.prompt_length
        if group and (width * (len(group) + 1) > PASS or width > PADDING * group[0][0].sequence.prompt_length):
            yield group
            group = []
        group.append(family)
    yield group


def in_validation(prompt: str, share: float) -> bool:
    """Whether a prompt is kept for validation: by its own hash, so that no other prompt has a say in it."""
    return int(_hash(f"{SALT}{prompt}"), 16) % PARTS < share * PARTS


def refuse_other_heads(target: Target) -> None:
    """Raise UserError unless the logits are the product of the last state and the head's rows, and nothing else.

    A student is taught with that product: caps, scales and biases of the logits would make it another law.
    """
    ids = torch.arange(1, 5, device=target.head_weight.device)[None] % target.vocabulary
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -1]
        state = target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        same = state.shape[-1] == target.head_weight.shape[1]
        off = difference(target.head_weight @ state, logits[: target.vocabulary]) if same else float("inf")
    if not off <= ROUNDING[logits.dtype]:
        what = f"{type(target.model).__name__} caps, scales or shifts its logits"
        raise UserError(f"{what}; students are taught by the product of state and head alone.", key="target")


def fingerprint(model: Any) -> str:
    """A hash of some numbers of every weight: differs for models that are not the same, and costs next to nothing."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLES)].float().cpu().numpy()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + some.tobytes())
    return digest.hexdigest()


def _texts(paths: Items[str]) -> list[str]:
    """Of all files, each once."""
    try:
        return list(dict.fromkeys(text for path in paths for text in jsonl(path=path).texts))
    except UserError as error:
        raise UserError(error.message, key="prompts") from error


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _name(side: str, prompts: Items[Any], index: int) -> str:
    """The last, shorter shard names its prompts: with a higher limit another one takes its place."""
    return f"{side}-{index:05}" + ("" if len(prompts) == SHARD else f"-{len(prompts)}")


def _differing(known: dict[str, Any], wanted: dict[str, Any]) -> str:
    key = next(key for key in wanted if known.get(key) != wanted[key])
    return f"its {key} is {known.get(key)!r}, not {wanted[key]!r}"
