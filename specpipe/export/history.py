"""Proposers that look into the text alone: vLLM has its own of that kind, and a config is all that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpipe.export.serving import Serving
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.suffix import SuffixProposer

NGRAM_DRAFTED, SUFFIX_DRAFTED = 5, 24  # tokens of a step, where nothing was measured
SUFFIX_REQUESTS = 10_000  # vLLM's own default, in requests; ours is in tokens


class HistoryExport:
    """Nothing but the config of vLLM's own method."""

    head: str | None = None
    training: Mapping[str, Any] = {}

    def __init__(self, proposer: NgramProposer | SuffixProposer) -> None:
        if isinstance(proposer, NgramProposer):
            keys = {
                "method": "ngram",
                "prompt_lookup_min": proposer.min_ngram,
                "prompt_lookup_max": proposer.max_ngram,
            }
            self.serving = Serving(keys, NGRAM_DRAFTED, weights=False)
            self.loaded_by: tuple[str, ...] = ("vLLM: its own `ngram`; nothing of specpipe runs there",)
            return
        keys = {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": proposer.max_depth,
            "suffix_decoding_max_cached_requests": 0 if proposer.keeps_nothing else SUFFIX_REQUESTS,
            "suffix_decoding_max_spec_factor": 1.0,
            "suffix_decoding_min_token_prob": proposer.min_probability,
        }
        self.serving = Serving(keys, SUFFIX_DRAFTED, weights=False)
        self.loaded_by = (
            "vLLM: its own `suffix`, which has another estimate of what is likely; nothing of specpipe runs there",
            "it needs `pip install arctic-inference==0.1.1`; by its sources, not tried",
        )

    def write(self, folder: Path) -> None:
        """The config and the card are all there is."""

    def check(self, folder: Path) -> None:
        return None
