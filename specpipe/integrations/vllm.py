"""Proposers that look into the text alone, inside vLLM: classes for its speculative method `custom_class`.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "specpipe.integrations.vllm.Ngram",
        "num_speculative_tokens": 4}'

vLLM says neither which request a row of its batch is, nor how its tokens are drawn; rows change places as requests come
and go. A request is known again by its text. vLLM verifies the drafts as deterministic ones, which keeps the law for
any guess that does not depend on the request's own random numbers.

Nothing of vLLM is imported here; it imports this where its workers run, so the package must be importable there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specpipe.chance import Chance
from specpipe.pipeline import bind
from specpipe.proposers import Proposer
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.suffix import SuffixProposer
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings

Ids = npt.NDArray[np.int32]
TO_THE_END = GenerationSettings(max_new_tokens=None)  # where a request ends is vLLM's matter


class HistoryProposer:
    """What vLLM calls. A subclass says in `make` what drafts; one of your own, with other settings, is three lines:

        class Mine(HistoryProposer):
            def make(self):
                return NgramProposer(max_ngram=5)

    Args:
        vllm_config: as vLLM hands it to the class that its `--speculative-config` names.
    """

    def __init__(self, vllm_config: Any) -> None:
        model = vllm_config.model_config
        self._gamma: int = vllm_config.speculative_config.num_speculative_tokens
        self._context: int = model.max_model_len
        self._stop_ids = _eos_ids(model)
        self._proposer = self.make()
        bind(self._proposer, Vocabulary(model.get_vocab_size()))
        self._known: dict[bytes, list[Sequence]] = {}  # by the text of each request behind the last call

    def make(self) -> Proposer:
        """The proposer; of the target it is told the size of the vocabulary."""
        raise NotImplementedError(f"{type(self).__name__} does not say what drafts")

    def load_model(self, target_model: Any) -> None:
        """Called once by vLLM. There is nothing to load: texts are all that is looked into."""

    def propose(
        self,
        sampled_token_ids: Items[Items[int]],
        num_tokens_no_spec: Items[int] | Ids,
        token_ids_cpu: Ids,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the R running requests, at most as many tokens as configured, none beyond the model's length.

        Args:
            sampled_token_ids: R lists of the ids just committed; an empty one where the prompt is still being read.
            num_tokens_no_spec: how many tokens each has, those included.
            token_ids_cpu: [rows, longest] the tokens of each, prompt first; R rows or more.
            slot_mappings: of vLLM's cache, which is not looked at.

        Returns:
            R lists of ids; an empty one for a request whose prompt is still being read.
        """
        asked = [row for row, new in enumerate(sampled_token_ids) if len(new)]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in asked]
        sequences = self._recognised(texts, [len(sampled_token_ids[row]) for row in asked])
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        draft = self._proposer.propose(sequences, [sequence.room(self._gamma) for sequence in sequences])
        for b, row in enumerate(asked):
            drafts[row], _ = draft.row(b)
        return drafts

    def _recognised(self, texts: list[Ids], new: list[int]) -> list[Sequence]:
        """The request of each text, whose last `new` tokens it did not have before.

        Requests that are not among them are forgotten: they have ended, or begin anew when they come back.
        """
        known: defaultdict[bytes, list[Sequence]] = defaultdict(list)
        sequences = []
        for ids, count in zip(texts, new, strict=True):
            before = self._known.get(ids[:-count].tobytes())
            sequence = before.pop() if before else self._new(ids[:-count].tolist())
            sequence.tokens += ids[-count:].tolist()
            known[ids.tobytes()].append(sequence)
            sequences.append(sequence)
        self._known = known
        return sequences

    def _new(self, prompt: list[int]) -> Sequence:
        return Sequence(prompt, TO_THE_END, stop_ids=self._stop_ids, context=self._context, chance=Chance(0, prompt))


class Ngram(HistoryProposer):
    """`proposer=ngram`: what followed the last occurrence of the text's final tokens."""

    def make(self) -> Proposer:
        return NgramProposer()


class Suffix(HistoryProposer):
    """`proposer=suffix` on each request's own text.

    Outputs of other requests are left out: a request with a `seed` that another one had draws the same random numbers,
    which the other's output depends on. Where no request has a seed, `SuffixProposer()` in a subclass uses them too.
    """

    def make(self) -> Proposer:
        return SuffixProposer(max_cached_tokens=0)


class SuffixThenNgram(HistoryProposer):
    """`proposer=cascade` of the two: n-grams where no suffix is sure enough. It needs Hydra where vLLM runs."""

    def make(self) -> Proposer:
        from specpipe.proposers.cascade import Cascade

        alone = {"_target_": "specpipe.proposers.suffix.SuffixProposer", "max_cached_tokens": 0}
        return Cascade(members=[alone, "ngram"])


@dataclass(frozen=True)
class Vocabulary:
    """What a proposer is told of the target here: how many ids there are."""

    vocabulary: int


def _eos_ids(model: Any) -> frozenset[int]:
    """The ids that end a text by themselves; nothing is worth guessing behind them."""
    ids = model.try_get_generation_config().get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    return frozenset(ids if isinstance(ids, list) else () if ids is None else (ids,))
