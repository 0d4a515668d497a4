"""From command line to components: composing the config, and the one place that instantiates it.

Imports Hydra and nothing heavier. What a key may hold is decided where it is used: top-level keys by the schema here,
keys of a component by its constructor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from specpipe.errors import UserError, flag, integer, nearest
from specpipe.settings import LARGEST_SEED, LONGEST_DRAFT

PACKAGE = Path(__file__).parent
# In a wheel the files lie inside the package, in a checkout beside it.
CONF = str(PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf")

QUOTING = """put a value with special characters into quotes inside quotes: 'prompt="a=b, {c}"'."""
ESCAPING = r"for the text itself write \${...}."
CONFIG_DIR = ("-cd", "--config-dir")
MOST_REPEATS = 1000  # of a bench
FLAG = {"flag": True}  # of a key that is true or false: as `bool`, OmegaConf would take 2 and `on` for true


def _from(low: int, default: int, high: int | None = None) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass
class TargetSchema:
    """Top-level keys of every command that decodes prompts with a target, and their types."""

    defaults: list[Any] = field(default_factory=list)
    target: Any = MISSING
    verifier: Any = MISSING
    sampler: Any = MISSING
    draft_length: Any = MISSING
    generation: Any = MISSING
    prompts: Any = MISSING
    wandb: Any = MISSING
    prompt: str | None = None
    num_speculative_tokens: int = _from(0, 5, LONGEST_DRAFT)
    seed: int = _from(0, 0, LARGEST_SEED)


@dataclass
class PipelineSchema(TargetSchema):
    """Those of a command that builds one pipeline."""

    proposer: Any = MISSING


@dataclass
class DecodeSchema(PipelineSchema):
    """Keys of `decode`; anything else in a YAML file or on the command line is refused."""

    batch_size: int = _from(1, 1)
    trace: Any = field(default=False, metadata=FLAG)
    profile: Any = field(default=False, metadata=FLAG)


@dataclass
class AuditSchema(PipelineSchema):
    """Keys of `audit`."""

    file: str | None = None
    tokens: int = _from(1, 3000)
    greedy_tokens: int = _from(1, 400)
    batch_size: int = _from(1, 8)


@dataclass
class SweepSchema:
    """What `bench` measures every combination of; null leaves a part at its one value."""

    num_speculative_tokens: Any = None
    temperature: Any = None
    batch_size: Any = None
    sampler: Any = None


@dataclass
class BenchSchema(TargetSchema):
    """Keys of `bench`."""

    proposers: Any = field(default_factory=list)
    sweep: SweepSchema = field(default_factory=SweepSchema)
    batch_size: int = _from(1, 1)
    repeats: int = _from(1, 2, MOST_REPEATS)
    predict: Any = field(default=True, metadata=FLAG)
    peers: Any = field(default_factory=list)
    resume: str | None = None


@dataclass(init=False, repr=False, eq=False)  # their code would not parse: the key `from` is a word of Python
class PlanSchema:
    """Keys of `plan`."""

    defaults: list[Any] = field(default_factory=list)
    alpha: Any = None
    cost_ratio: Any = None
    operations_ratio: Any = None
    gamma: int | None = None
    max_gamma: int = _from(1, 16)
    __annotations__["from"] = "str | None"
    vars()["from"] = None


@dataclass
class TrainSchema:
    """Keys of `train`."""

    defaults: list[Any] = field(default_factory=list)
    target: Any = MISSING
    data: Any = MISSING
    student: Any = MISSING
    loss: Any = MISSING
    optimizer: Any = MISSING
    trainer: Any = MISSING
    wandb: Any = MISSING
    task: str = "fit"
    resume: str | None = None
    num_speculative_tokens: int | None = None
    save_every: int = _from(1, 50)
    check_prompts: int = _from(1, 8)
    seed: int = _from(0, 0, LARGEST_SEED)


@dataclass
class ExportSchema:
    """Keys of `export`."""

    defaults: list[Any] = field(default_factory=list)
    target: Any = MISSING
    proposer: Any = MISSING
    format: str | None = None
    head: str | None = None
    flavour: str | None = None
    out: str | None = None
    bench: str | None = None


@dataclass
class ReportSchema:
    """Keys of `report`."""

    defaults: list[Any] = field(default_factory=list)
    folders: Any = None


@dataclass
class DashboardSchema:
    """Keys of `dashboard`."""

    defaults: list[Any] = field(default_factory=list)
    entity: str | None = None
    project: str = "specpipe"
    name: str = "specpipe"


SCHEMAS = {
    "decode": DecodeSchema,
    "bench": BenchSchema,
    "audit": AuditSchema,
    "plan": PlanSchema,
    "train": TrainSchema,
    "export": ExportSchema,
    "report": ReportSchema,
    "dashboard": DashboardSchema,
}
TYPES = {"int": "a whole number", "int | None": "a whole number", "str": "a text", "str | None": "a text"}


def register_schemas() -> None:
    """Make the schemas known to Hydra, so that the YAML files can build on them."""
    for command, schema in SCHEMAS.items():
        ConfigStore.instance().store(name=f"{command}_schema", node=schema)


def multirun() -> str | None:
    """Name of the folder of the multirun (`-m`) that this job belongs to; None for a single run."""
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return None
    return Path(HydraConfig.get().sweep.dir).name


# On import, because a launcher's processes import this module and call nothing else of it before they read the config.
OmegaConf.register_new_resolver("multirun", multirun, replace=True)


def compose(command: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The config of `command`, as the command line would make it; checked.

    Raises:
        UserError: for overrides that do not fit, in one line.
    """
    given = list(overrides)
    try:
        config = _compose(command, given)
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise explain(error, command, given) from error
    check(config, command, given)
    return config


def check(config: DictConfig, command: str, overrides: Sequence[str] = ()) -> None:
    """Refuse what can be refused before a model is loaded: unknown, doubled and missing keys, top-level values.

    Raises:
        UserError: naming the key.
    """
    _refuse_doubled(overrides)
    wanted = [each for each in dataclasses.fields(SCHEMAS[command]) if each.name != "defaults"]
    names = [each.name for each in wanted]
    for name in config:
        if name not in names:  # `+name=...` on the command line passes Hydra by
            raise UserError(f"no such key.{nearest(str(name), names)}", key=str(name))
    for each in wanted:
        if each.name not in config and not OmegaConf.is_missing(config, each.name):
            raise UserError("was removed, and is needed.", key=each.name)
        if OmegaConf.is_missing(config, each.name):  # `~proposer`
            raise UserError(f"is needed; there are {', '.join(_options(each.name))}.", key=each.name)
        if each.default is MISSING:
            _refuse_unknown(config[each.name], each.name)
        elif "low" in each.metadata:
            integer(each.name, config[each.name], each.metadata["low"], each.metadata["high"])
        elif "flag" in each.metadata:
            flag(each.name, config[each.name])
    plain(config)


def build(node: Any, key: str, **parts: Any) -> Any:
    """The component that a config node describes: `_target_` called with the node's values and `parts`.

    Raises:
        UserError: naming the key, for one that the component does not have, one that is missing, or a value it refuses.
    """
    call, parameters = _refuse_unknown(node, key)
    values = _values(node)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values and name not in parts and _named(parameter):
            typed = "." if "[" in key else f": {key}.{name}=..."  # an entry of a list has no word of its own
            raise UserError(f"has no value, and needs one{typed}", key=f"{key}.{name}")
    try:
        return call(**values, **parts)
    except UserError as error:
        raise error.under(key) from error


def option(group: str, name: str) -> DictConfig:
    """The option file of a group, by name, from the user's own folder (--config-dir) or ours.

    Raises:
        UserError: if there is none, with those there are.
    """
    folders = [Path(CONF)]
    if HydraConfig.initialized():
        sources = HydraConfig.get().runtime.config_sources
        folders = [Path(source.path) for source in sources if source.schema == "file"]
    for folder in folders:
        if (file := folder / group / f"{name}.yaml").is_file():
            loaded = OmegaConf.load(file)
            assert isinstance(loaded, DictConfig)
            return loaded
    options = sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
    raise UserError(f"no option {name!r}; there are {', '.join(options)}.{nearest(name, options)}", key=group)


def chosen(group: str, given: Any, key: str) -> tuple[str, dict[str, Any], DictConfig]:
    """An option in a list: its name, the settings that differ from its file's, and the whole as a config node.

    `given` is `ngram`, or `{ngram: {max_ngram: 4}}` with some settings, or a mapping with a `_target_`, whose name is
    that of its class.

    Raises:
        UserError: naming `key`, for anything else, an option that does not exist, or a key that it does not have.
    """
    if isinstance(given, Mapping) and "_target_" in given:
        return str(given["_target_"]).rpartition(".")[2], {}, OmegaConf.create(dict(given))
    name: Any = given
    changes: Mapping[Any, Any] = {}
    if isinstance(given, Mapping) and len(given) == 1:
        ((name, changes),) = given.items()
        if not isinstance(changes, Mapping):
            raise UserError(
                f"{given!r} is not a {group} with its settings, such as {{ngram: {{max_ngram: 4}}}}.", key=key
            )
    elif not isinstance(given, str):
        raise UserError(f"{given!r} is neither a {group}'s name nor one with its settings.", key=key)
    try:
        node = option(group, str(name))
    except UserError as error:
        raise UserError(error.message, key=key) from error
    for word in changes:
        if word not in node.keys():  # noqa: SIM118, a key without a value yet is one too
            known = [str(each) for each in node if each != "_target_"]
            raise UserError(f"{name} has no key {word!r}.{nearest(str(word), known)}", key=key)
    merged = OmegaConf.merge(node, changes)
    assert isinstance(merged, DictConfig)
    return str(name), dict(changes), merged


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as nested dictionaries and lists, interpolations resolved.

    Raises:
        UserError: for a mandatory value (`???`) that was never given, or an interpolation that leads nowhere.
    """
    try:
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise UserError(f"has no value, and needs one: {missing[0]}=...", key=missing[0])
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise _wrong_value(error) from error


def explain(error: Exception, command: str, overrides: Sequence[str] = ()) -> UserError:
    """One line for what Hydra, OmegaConf or a YAML reader said in several.

    Args:
        error: what was raised while composing the config, or while reading values from it.
        command: whose config it is.
        overrides: as typed; they tell which keys there could have been.
    """
    if isinstance(error, UserError):
        return error
    said = _explain(error, command, overrides)
    said.__cause__ = error
    return said


def _explain(error: Exception, command: str, overrides: Sequence[str]) -> UserError:
    if isinstance(error, OverrideParseException):
        return _unread(str(error.override))
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{_not_text(overrides)} is not UTF-8 text.")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_option(error)
    if isinstance(error, yaml.MarkedYAMLError):
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        return UserError(f"{place}not YAML ({error.problem}).")
    cause = next(
        (e for e in (error, error.__cause__, error.__context__) if isinstance(e, OmegaConfBaseException)), None
    )
    file = _quoted_after(str(error), "In ") if cause is not error else None
    said = _refused(error, cause, command, overrides)
    return UserError(f"{said.message} (In {file}.yaml.)", key=said.key) if file else said


def _refused(
    error: Exception, cause: OmegaConfBaseException | None, command: str, overrides: Sequence[str]
) -> UserError:
    """Where Hydra has no class for what is wrong, its words have to tell."""
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and cause.full_key:
        return _unknown_key(cause.full_key, command, overrides)
    if cause is not None:
        return _wrong_value(cause)
    text = str(error)
    for opening in ("Could not override ", "Could not delete from config. ", "Could not delete "):
        if key := _quoted_after(text, opening):
            return _unknown_key(key, command, overrides)
    if key := _quoted_after(text, "An item is already at "):
        return UserError("is there already; leave out the +.", key=key)
    if word := _quoted_after(text, "Ambiguous value for argument ") or _quoted_after(text, "Sweep parameters "):
        key, _, value = word.partition("=")
        return UserError(f"{value!r} are several values: key=[a,b] is a list, -m runs each; or {QUOTING}", key=key)
    if "Config group override" in text:
        for each in _parsed(overrides):
            if _options(each.key_or_group) and not isinstance(each.value(), (str, list, dict)):
                options = ", ".join(_options(each.key_or_group))
                return UserError(f"{each.value()!r} is not one of {options}.", key=each.key_or_group)
    if isinstance(error, OSError) and error.filename:
        return UserError(f"{error.filename!r}: {error.strerror}.")
    return UserError(_sentence(error))


def _unread(word: str) -> UserError:
    try:
        word.encode()
    except UnicodeEncodeError as error:  # how Python keeps a byte of the command line that is no text
        return UserError(f"holds {word[error.start]!r}, which is not a character.", key=word.partition("=")[0])
    return UserError(f"{word!r} is not key=value as Hydra reads it; {QUOTING}")


def _not_text(words: Sequence[str]) -> str:
    """The file of a user's own folder (--config-dir) that cannot be decoded; the reader does not say which."""
    for before, word in itertools.pairwise(["", *words]):
        flag, _, folder = word.partition("=") if before not in CONFIG_DIR else (before, "", word)
        for file in sorted(Path(folder).rglob("*.yaml")) if flag in CONFIG_DIR and folder else ():
            try:
                file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                return repr(str(file))
    return "a file of the config"


def _no_option(error: MissingConfigException) -> UserError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = [str(each) for each in error.options or ()]
    if not group:
        return UserError(f"there is no config {option!r}.")
    return UserError(f"no option {option!r}; there are {', '.join(options)}.{nearest(option, options)}", key=group)


def _unknown_key(key: str, command: str, overrides: Sequence[str]) -> UserError:
    known = sorted(_known_keys(key, command, overrides))
    group = key.rpartition(".")[0]
    siblings = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == group]
    listed = f"; {group} has {_names(siblings)}" if group and not group.startswith("hydra") else ""
    close = nearest(key, [each for each in known if not f"{key}.".startswith(f"{each}.") and "_target_" not in each])
    return UserError(f"no such key{listed}.{close}", key=key)


def _known_keys(key: str, command: str, overrides: Sequence[str]) -> Iterable[str]:
    if key.split(".")[0] == "hydra":
        return _keys(OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)}))
    groups = [each.input_line for each in _parsed(overrides) if _options(each.key_or_group)]
    try:
        return list(_keys(_compose(command, [line for line in groups if line])))
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError):  # an option from a user's own folder
        return _keys(_compose(command, []))


def _wrong_value(error: OmegaConfBaseException) -> UserError:
    key = error.full_key or None
    for schema in SCHEMAS.values():
        for each in dataclasses.fields(schema):
            if each.name == key and each.type in TYPES and not isinstance(error, InterpolationResolutionError):
                return UserError(f"{error.value!r} is not {TYPES[each.type]}.", key=key)
    is_interpolation = isinstance(error, (InterpolationResolutionError, GrammarParseError))
    return UserError(f"{_first_line(error)}; {ESCAPING}" if is_interpolation else _sentence(error), key=key)


def _refuse_doubled(overrides: Sequence[str]) -> None:
    seen: dict[tuple[str, str | None], str | None] = {}
    for each in _parsed(overrides):
        key = (each.key_or_group, each.package)
        if each.key_or_group.startswith("hydra."):
            continue  # a launcher that starts this program again for its other processes adds its own
        if key in seen:
            raise UserError(f"given twice: {seen[key]} and {each.input_line}.", key=each.key_or_group)
        seen[key] = each.input_line


def _refuse_unknown(node: Any, key: str) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    """What the node calls, and its parameters, which hold all of the node's keys."""
    call = _call(node, key)
    try:
        parameters = inspect.signature(call).parameters
    except ValueError:  # some builtins have none; they say themselves what they do not take
        return call, {}
    names = [name for name, parameter in parameters.items() if _named(parameter)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in _values(node, resolve=False):
            if name not in names:
                raise UserError(f"no such key; {key} has {_names(names)}.{nearest(name, names)}", key=f"{key}.{name}")
    return call, parameters


def _call(node: Any, key: str) -> Callable[..., Any]:
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise UserError("is not a component: choose an option of the group, or a YAML file with a `_target_`.", key=key)
    path = node._target_
    try:
        call = _imported(str(path))
    except Exception as error:  # whatever importing a user's module raises
        raise UserError(f"{path!r} cannot be imported: {_sentence(error)}", key=f"{key}._target_") from error
    if not callable(call):
        raise UserError(f"{path!r} is a {type(call).__name__}, which cannot be called.", key=f"{key}._target_")
    return call


def _imported(path: str) -> Any:
    """The object at a dotted path. Unlike Hydra's own search it lets the first error through, and logs nothing."""
    first, *names = path.split(".")
    found, reached = importlib.import_module(first), first
    for name in names:
        if not hasattr(found, name):
            if not hasattr(found, "__path__"):
                raise ImportError(f"{reached} has no {name!r}.{nearest(name, dir(found))}")
            importlib.import_module(f"{reached}.{name}")
        found, reached = getattr(found, name), f"{reached}.{name}"
    return found


def _compose(command: str, overrides: list[str]) -> DictConfig:
    register_schemas()
    with _hydra_set_aside(), initialize_config_dir(config_dir=CONF, version_base="1.3"):
        return hydra_compose(command, overrides=overrides)


@contextlib.contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """Hydra composes one application at a time; the one we may be called from finds everything as it was."""
    kinds = (GlobalHydra, VersionBase, JobRuntime)
    before: dict[type, Singleton] = {
        kind: Singleton._instances.pop(kind) for kind in kinds if kind in Singleton._instances
    }
    try:
        yield
    finally:
        for kind in kinds:
            Singleton._instances.pop(kind, None)
        Singleton._instances.update(before)


def _parsed(overrides: Iterable[str]) -> list[Override]:
    """The words that are overrides; flags of Hydra and what it could not read are left out."""
    parser, parsed = OverridesParser.create(), []
    for word in overrides:
        if not word.startswith("-"):
            with contextlib.suppress(HydraException):
                parsed.append(parser.parse_override(word))
    return parsed


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in Path(CONF, group).glob("*.yaml"))


def _values(node: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Without those that were never given (`???`)."""
    container = _container(node, resolve)
    return {str(name): value for name, value in container.items() if name != "_target_" and value != MISSING}


def _container(node: DictConfig, resolve: bool) -> dict[Any, Any]:
    container = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(container, dict)
    return container


def _named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _names(parameters: Iterable[str]) -> str:
    return ", ".join(name for name in parameters if name != "_target_") or "none"


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in map(str, config):
        yield f"{prefix}{name}"
        child = None if OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name) else config[name]
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{name}.")


def _quoted_after(text: str, opening: str) -> str | None:
    """`x` where `text` holds the opening followed by 'x'."""
    _, found, rest = text.partition(f"{opening}'")
    return rest.partition("'")[0] if found else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _sentence(error: BaseException) -> str:
    line = _first_line(error)
    return line if line.endswith((".", "?", "!")) else f"{line}."
