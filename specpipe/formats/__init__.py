"""Heads in the formats of other projects: names, tensors and forward; nothing of proposers, requests or engines.

`export` loads back by these what it wrote, and `proposer=mlp` drafts by them with what others trained.
"""

from __future__ import annotations

from pathlib import Path

from specpipe.errors import UserError
from specpipe.formats.checkpoint import HeadsCheckpoint, load_files
from specpipe.formats.medusa import MedusaCheckpoint
from specpipe.formats.mlp_speculator import MlpSpeculatorCheckpoint

FORMATS: tuple[type[MedusaCheckpoint | MlpSpeculatorCheckpoint], ...] = (MedusaCheckpoint, MlpSpeculatorCheckpoint)
LSTM = "sum_lstm"  # ArcticInference's other speculator


def load_heads(folder: Path) -> HeadsCheckpoint:
    """The heads in a folder, of the format that its config.json tells.

    Raises:
        UserError: if it is none of those that are known, or damaged.
    """
    config, tensors = load_files(folder)
    if config.get("method") == LSTM:
        raise UserError(f"{str(folder)!r} is an LSTM speculator, which is not supported.", key="path")
    kind = next((kind for kind in FORMATS if kind.recognises(config)), None)
    if kind is None:
        what = f"{str(folder)!r} holds neither Medusa heads nor an MLP speculator; config.json says model_type"
        raise UserError(f"{what} {config.get('model_type')!r}. A causal LM is for proposer=draft.", key="path")
    try:
        return kind(config, tensors)
    except UserError as error:
        raise UserError(f"{str(folder)!r} cannot be used: {error.message}", key="path") from error
