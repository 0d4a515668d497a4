"""What is measured: every combination of the config's lists, with plain decoding beside each. Knows no model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specpipe.config import build, chosen, option
from specpipe.errors import UserError, choice, integer, number
from specpipe.settings import LONGEST_DRAFT

PLAIN = "none"
PEERS = ("hf",)


FULL_PASSES = 4  # prompts of a stretch for each request of a batch; alone, prompts take turns one by one


@dataclass(frozen=True)
class Setting:
    """What plain decoding depends on too: speedups are ratios within one."""

    temperature: float
    batch_size: int

    @property
    def stretch(self) -> int:
        """Prompts that a cell decodes before the next one's turn; where they are several, they share passes."""
        return 1 if self.batch_size == 1 else FULL_PASSES * self.batch_size


@dataclass(frozen=True)
class Cell:
    """One combination. `sampler` is None where nothing is drafted, `gamma` 0; of a peer both are None."""

    setting: Setting
    proposer: str
    sampler: str | None
    gamma: int | None
    peer: bool = False

    def names(self) -> dict[str, Any]:
        """As result.json has it."""
        return {
            "proposer": self.proposer,
            "peer": self.peer,
            "sampler": self.sampler,
            "temperature": self.setting.temperature,
            "batch_size": self.setting.batch_size,
            "num_speculative_tokens": self.gamma,
        }


class Grid:
    """All cells of a bench.

    Args:
        config: of `bench`.
        sampler: name of the option that `config.sampler` is.

    Raises:
        UserError: naming the key, for a list or a value that cannot be measured.
    """

    def __init__(self, config: DictConfig, sampler: str) -> None:
        self._config = config
        self.proposers = _proposers(config.proposers)
        sweep = config.sweep
        self._gammas = _values("num_speculative_tokens", sweep, config.num_speculative_tokens, _gamma)
        self._samplers = _values("sampler", sweep, sampler, lambda key, name: _known(key, name, sampler))
        temperatures = _values("temperature", sweep, config.generation.temperature, lambda key, t: number(key, t, 0))
        sizes = _values("batch_size", sweep, config.batch_size, lambda key, size: integer(key, size, 1))
        self.settings = [Setting(float(t), size) for t, size in itertools.product(temperatures, sizes)]
        self.peers = _peers(config.peers)
        self._own_sampler = sampler

    @property
    def longest(self) -> int:
        """The longest draft of all cells."""
        return max(self._gammas)

    def cells(self, setting: Setting) -> Iterator[Cell]:
        """Plain decoding, then everything that is compared with it; peers are added by who runs them."""
        yield Cell(setting, PLAIN, None, 0)
        for proposer, sampler, gamma in itertools.product(self.proposers, self._samplers, self._gammas):
            yield Cell(setting, proposer, sampler, gamma)

    def generation(self, setting: Setting) -> Any:
        """The request settings of a cell."""
        node = OmegaConf.merge(self._config.generation, {"temperature": setting.temperature})
        return build(node, "generation")

    def sampler(self, name: str | None) -> Any:
        """A sampler of the grid, or the one that draws for plain decoding."""
        own = name is None or name == self._own_sampler
        return build(self._config.sampler if own else option("sampler", str(name)), "sampler")


def _proposers(given: Any) -> dict[str, DictConfig]:
    """The options by what they are called, in order; plain decoding, which always runs, is left out."""
    entries = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise UserError(f"{entries!r} is not a list of proposers such as [ngram,suffix].", key="proposers")
    nodes = dict(_proposer(entry, f"proposers[{place}]") for place, entry in enumerate(entries))
    if len(nodes) < len(entries):
        raise UserError("names one proposer twice.", key="proposers")
    nodes.pop(PLAIN, None)
    return nodes


def _proposer(entry: Any, key: str) -> tuple[str, DictConfig]:
    name, changes, node = chosen("proposer", entry, key)
    words = ", ".join(f"{word}={value}" for word, value in changes.items())
    return f"{name}({words})" if words else name, node


def _values(name: str, sweep: Any, single: Any, check: Any) -> list[Any]:
    given = sweep[name]
    if given is None:
        return [check(name if name != "temperature" else "generation.temperature", single)]
    key = f"sweep.{name}"
    values = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    if not isinstance(values, list):
        raise UserError(f"{values!r} is not a list.", key=key)
    checked = [check(key, value) for value in values]
    if not checked or len(set(checked)) < len(checked):
        raise UserError(f"{values!r} is empty or has a value twice.", key=key)
    return checked


def _gamma(key: str, value: Any) -> int:
    if value == 0:
        raise UserError("0 is plain decoding, which always runs beside the rest.", key=key)
    return integer(key, value, 1, LONGEST_DRAFT)


def _known(key: str, sampler: Any, own: str) -> str:
    """A sampler that there is; the configured one is, wherever its file lies."""
    try:
        if sampler != own:
            option("sampler", str(sampler))
    except UserError as error:
        raise UserError(error.message, key=key) from error
    return str(sampler)


def _peers(given: Any) -> list[str]:
    entries = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    if not isinstance(entries, list):
        raise UserError(f"{entries!r} is not a list such as [hf].", key="peers")
    return [choice("peers", each, PEERS) for each in entries]
