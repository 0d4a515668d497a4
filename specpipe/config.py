"""From command line to components: composing the config, and the one place that instantiates it.

Imports Hydra and nothing heavier. What a key may hold is decided where it is used: top-level keys by the schema here,
keys of a component by its constructor.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specpipe.errors import UserError, nearest

PACKAGE = Path(__file__).parent
# In a wheel the files lie inside the package, in a checkout beside it.
CONF = str(PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf")


@dataclass
class DecodeSchema:
    """Top-level keys of `decode` and their types; anything else in a YAML file or on the command line is refused."""

    defaults: list[Any] = field(default_factory=list)
    target: Any = MISSING
    proposer: Any = MISSING
    verifier: Any = MISSING
    sampler: Any = MISSING
    generation: Any = MISSING
    prompts: Any = MISSING
    wandb: Any = MISSING
    prompt: str | None = None
    num_speculative_tokens: int = 5
    seed: int = 0
    trace: bool = False


def register_schemas() -> None:
    """Make the schemas known to Hydra, so that the YAML files can build on them."""
    ConfigStore.instance().store(name="decode_schema", node=DecodeSchema)


def compose(command: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The resolved config of `command`, as the command line would make it.

    Raises:
        UserError: for overrides that do not fit, in one line.
    """
    register_schemas()
    try:
        with initialize_config_dir(config_dir=CONF, version_base="1.3"):
            return hydra_compose(command, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, command) from error


def build(node: Any, key: str, **parts: Any) -> Any:
    """The component that a config node describes: `_target_` called with the node's values and `parts`.

    Raises:
        UserError: naming the key, for one that the component does not have, one that is missing, or a value it refuses.
    """
    call = _call(node, key)
    values = {name: value for name, value in OmegaConf.to_container(node, resolve=True).items() if name != "_target_"}
    parameters = inspect.signature(call).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in values:
            if name not in parameters:
                raise UserError(f"no such key; {key} has {_names(parameters)}.{nearest(name, parameters)}", key=f"{key}.{name}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values and name not in parts and _named(parameter):
            raise UserError("has no value, and needs one.", key=f"{key}.{name}")
    try:
        return call(**values, **parts)
    except UserError as error:
        raise error.under(key) from error


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as nested dictionaries and lists, interpolations resolved.

    Raises:
        UserError: for a mandatory value (`???`) that was never given, or an interpolation that leads nowhere.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError("has no value, and needs one.", key=missing[0])
    try:
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error), key=error.full_key or None) from error


def explain(error: Exception, command: str) -> UserError:
    """One line for what Hydra or OmegaConf said in several."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = f"{error}\n{error.__cause__ or ''}"
    if match := re.search(r"Could not find '([^']+)'\n\nAvailable options in '([^']+)':\n((?:\t.*\n?)+)", text):
        path, group, listed = match.groups()
        options = listed.split()
        option = path.removeprefix(f"{group}/")
        return UserError(f"no option {option!r}; there are {', '.join(options)}.{nearest(option, options)}", key=group)
    if match := re.search(r"Could not (?:override|append to|delete from config) *'([^']+)'", text):
        return _unknown_key(match[1], command)
    if match := re.search(r"Key '([^']+)' is not in struct|Key '([^']+)' not in '\w+'", text):
        return _unknown_key(getattr(cause, "full_key", None) or match[1] or match[2], command)
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        return _unknown_key(match[1], command)
    if "LexerNoViableAltException" in text or "Error parsing override" in text or "missing EQUAL" in text:
        override = re.search(r"Error parsing override '(.*?)'\n|See https", text, re.S)
        what = (override[1] if override and override[1] else _first_line(error)).split("\n")[0]
        hint = """put a value with special characters into quotes inside quotes: 'prompt="a=b, {c}"'."""
        return UserError(f"{what!r} is not key=value as Hydra reads it; {hint}")
    key = getattr(cause, "full_key", None) or None
    return UserError(_first_line(cause), key=key)


def _call(node: Any, key: str) -> Callable[..., Any]:
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise UserError("is not a component: choose an option of the group, or a YAML file with a `_target_`.", key=key)
    try:
        return get_object(node._target_)
    except Exception as error:  # whatever importing a user's module raises
        raise UserError(f"{node._target_!r} cannot be imported: {_first_line(error)}", key=f"{key}._target_") from error


def _named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _names(parameters: Iterable[str]) -> str:
    return ", ".join(parameters) or "none"


def _unknown_key(key: str, command: str) -> UserError:
    known = sorted(_keys(compose(command)))
    return UserError(f"no such key.{nearest(key, known)}", key=key)


def _keys(config: DictConfig, prefix: str = "") -> Iterable[str]:
    for name in config:
        yield f"{prefix}{name}"
        child = None if OmegaConf.is_missing(config, name) else config[name]
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{name}.")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
