"""What commands share: the pipeline and the prompts of a config, and the head of result.json.

Pulls in the models' libraries only when a pipeline is built: commands without one start at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specpipe import prompts
from specpipe.config import build
from specpipe.console import OutputClosed
from specpipe.errors import UserError
from specpipe.prompts import Prompts
from specpipe.results import RunFolder, undisturbed

if TYPE_CHECKING:
    from specpipe.pipeline import Pipeline
    from specpipe.proposers import Proposer

NOT_SAVED = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # as for a program that a closed pipe ends (128 + SIGPIPE)


def build_pipeline(config: DictConfig, proposer: Proposer | None = None) -> Pipeline:
    """The configured pipeline, with another proposer if one is given.

    Cheap parts are built first, so that their mistakes show before a model is loaded.
    """
    from specpipe.pipeline import Pipeline

    parts = {
        "settings": build(config.generation, "generation"),
        "proposer": proposer or build(config.proposer, "proposer"),
        "sampler": build(config.sampler, "sampler"),
        "draft_length": build(config.draft_length, "draft_length"),
    }
    target = build(config.target, "target")
    try:
        verifier = build(config.verifier, "verifier", target=target)
    except UserError as error:
        raise UserError(error.message, key="target") if error.key == "verifier.model" else error from error
    return Pipeline(
        verifier=verifier,
        **parts,
        num_speculative_tokens=config.num_speculative_tokens,
        seed=config.seed,
        chat=config.prompts.get("chat"),
        score_drafts=bool(config.get("trace")),
    )


def another_proposer(config: DictConfig, pipeline: Pipeline) -> Proposer:
    """One more like the pipeline's, with a state of its own."""
    from specpipe.pipeline import bind

    proposer = build(config.proposer, "proposer")
    bind(proposer, pipeline.verifier.target)
    return proposer


def chosen_prompts(config: DictConfig) -> Prompts:
    """`prompt`, or the group `prompts`; both at once are refused."""
    if config.prompt is None:
        return build(config.prompts, "prompts")
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+").partition("=")[0]
        if (key == "prompts" or key.startswith("prompts.")) and key != "prompts.chat":
            raise UserError(f"given beside {override}; only one of the two can be decoded.", key="prompt")
    return prompts.one(config.prompt, config.prompts.get("chat"))


def head(command: str, pipeline: Pipeline, config: dict[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """What result.json says of the parts: the options' names, by which runs are compared, and the config that ran.

    Of the verifier it is what `auto` came to.
    """
    return {
        "command": command,
        "seed": pipeline.seed,
        "target": pipeline.verifier.target.describe(),
        **{part: choices.get(part) for part in ("proposer", "sampler", "draft_length", "generation")},
        "verifier": getattr(pipeline.verifier, "engine", choices.get("verifier")),
        "num_speculative_tokens": pipeline.gamma,
        "lossless": bool(getattr(pipeline.sampler, "lossless", False)),
        "config": config,
    }


@dataclass
class Ending:
    """How a run ends: the exit code, as far as it is known."""

    code: int


@contextmanager
def ending(
    folder: RunFolder,
    tracker: Any,
    note: Callable[[str], None],
    *,
    crashed: int = 1,
    done: Collection[int] = (0,),
    last: Callable[[], None] = lambda: None,
) -> Iterator[Ending]:
    """What a command does once its folder is there: however that ends, what there is is saved.

    The command sets the code when it knows it. Afterwards it is not 0 if something could not be saved.

    Args:
        crashed: the code until then.
        done: codes of runs that came to their end, so that the result is worth pointing at.
        last: writes what is made of the whole result, such as its page.
    """
    end = Ending(crashed)
    saving = ExitStack()
    try:
        yield end
        saving.enter_context(undisturbed())  # up to here Ctrl-C ends the run; from here on it waits until all is saved
    except OutputClosed:
        end.code = OUTPUT_CLOSED
    except KeyboardInterrupt:
        end.code = INTERRUPTED
        raise
    finally:
        saving.enter_context(undisturbed())
        problems: list[str | None] = []
        saving.callback(lambda: problems.append(folder.finish()))
        saving.callback(last)  # the latest is called first, and each whatever the others raise
        try:
            saving.close()
        finally:
            if problem := next(iter(problems), None):
                note(f"specpipe: {problem}")
                end.code = end.code or NOT_SAVED
            elif end.code in done:
                note(f"result: {folder.folder / 'result.json'}")
            tracker.finish(folder.result, end.code)
