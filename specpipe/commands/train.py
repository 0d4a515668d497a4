"""`train`: forwards to the training package, which lies in a checkout beside this one."""

from __future__ import annotations

from omegaconf import DictConfig

from specpipe.errors import UserError


def run(config: DictConfig) -> int:
    """Train as configured; returns the exit code. Raises UserError where training is not installed."""
    try:
        from train.run import run as train
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lightning":
            raise
        raise UserError("training needs the packages of the extra `train`: pip install -e '.[train]'.") from error
    return train(config)
