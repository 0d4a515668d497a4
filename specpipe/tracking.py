"""The wandb run of one job: one class owns it, and nothing it does can break or hold up a decode, bench or training.

Knows wandb's runs; what a run holds of result.json is made in `specpipe.logged`. Knows nothing about models, Hydra or
the file result.json. wandb is imported when the run starts, never before.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from specpipe.errors import UserError, choice
from specpipe.logged import plain, request_metrics, round_metrics, summary, tables_and_charts

INIT_SECONDS = 20.0  # wandb's own limit for an answer of its server
START_SECONDS = 60.0  # importing wandb, starting its service process, and the above
LOG_SECONDS = 10.0  # a healthy call takes about 1 ms
FINISH_SECONDS = 60.0  # online with the upload of tables and page
ARTIFACT_SECONDS = 600.0  # reading the files, and online their upload
ABANDON_SECONDS = 3.0
REASON_LIMIT = 250  # characters of wandb's own message in the warning
STEP = "trainer/global_step"
AXES = {  # of what is logged -> over what it is drawn
    "request/*": "request/index",
    "round/*": "round/index",
    "train/*": STEP,
    "val/*": STEP,
}


class NoRun:
    """Stands in for `WandbRun` where no run is wanted: writes nothing, imports nothing."""

    run_id: str | None = None

    def start(self, command: str, config: Mapping[str, Any], folder: Path, *, resume: str | None = None) -> None:
        """Nothing is started."""

    def log_request(self, index: int, request: Mapping[str, Any], num_spec_tokens: int) -> None:
        """Nothing is logged."""

    def log_round(self, index: int, cells: Iterable[Mapping[str, Any]]) -> None:
        """Nothing is logged."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing is logged."""

    def log_artifact(self, name: str, kind: str, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def log_page(self, page: Path) -> None:
        """Nothing is kept."""

    def finish(self, result: Mapping[str, Any], exit_code: int) -> None:
        """Nothing is left to finish."""


class WandbRun:
    """The wandb run of one job: `start`, then what there is to log, `finish` in any case.

    A decode logs each request, a bench each round, a training its metrics by step and at its end the draft. After
    `start` no method raises, whatever wandb does. The first failure prints one line to stderr and ends the tracking of
    this job. The environment variable WANDB_MODE can only make a run more private: `disabled` and `offline` win over
    `online`, `online` does not win over `offline`.

    Args:
        mode: offline (files below the run's folder, no network) or online.
        project: the wandb project.
        entity: user or team that owns the project; None is wandb's default.
        name: name of the run; None lets wandb invent one.
        group: runs of one group are shown together.
        tags: words to filter runs by.

    Raises:
        UserError: naming the key, the value and what is allowed.
    """

    def __init__(
        self,
        *,
        mode: str,
        project: str,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._mode = choice("mode", mode, ("offline", "online"))
        self._project = _label("project", project, without="/\\#?%:")
        self._entity = None if entity is None else _label("entity", entity)
        self._name = None if name is None else _label("name", name)
        self._group = None if group is None else _label("group", group)
        self._tags = _labels("tags", tags)
        self._folder = Path()
        self._command = ""
        self._run: Any = None  # None: not started, failed, or finished
        self._run_id: str | None = None

    @property
    def run_id(self) -> str | None:
        """wandb's id of the run, with which a later job goes on as the same run; None where there was never one."""
        return self._run_id

    def start(self, command: str, config: Mapping[str, Any], folder: Path, *, resume: str | None = None) -> None:
        """Begins a run in `folder`/wandb; a run that an earlier job left open is finished first.

        Args:
            command: the specpipe command; becomes wandb's job type.
            config: the resolved configuration.
            folder: the run's folder.
            resume: `run_id` of the run to go on as; None begins a new one. Offline, each part has files of its own
                under the one id, which `wandb sync` uploads one after the other.
        """
        self._command, self._folder, self._run_id = command, folder, resume
        if os.environ.get("WANDB_MODE") != "disabled":
            self._run = self._guard(lambda: self._open(command, config, folder, resume), START_SECONDS)
            self._run_id = self._run.id if self._run is not None else resume

    def log_request(self, index: int, request: Mapping[str, Any], num_spec_tokens: int) -> None:
        """Logs the numbers of one finished request, on an axis of their own: `request/index`.

        Args:
            index: position of the request in the run, from 0.
            request: the request as it stands in result.json, with `alpha`, `tokens_per_s`, `tokens_per_target_pass`.
            num_spec_tokens: drafted tokens per step that were asked for.
        """
        run = self._run
        if run is not None:
            self._guard(lambda: run.log(request_metrics(index, request, num_spec_tokens)), LOG_SECONDS)

    def log_round(self, index: int, cells: Iterable[Mapping[str, Any]]) -> None:
        """Logs the speedup and alpha of every cell of a bench after one more round, over `round/index`.

        Args:
            index: rounds that are done, this one included.
            cells: as they stand in result.json.
        """
        run = self._run
        if run is not None:
            self._guard(lambda: run.log(round_metrics(index, cells)), LOG_SECONDS)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs one point of the curves of a training.

        wandb's own step is left to count the calls: told to go back, as a resumed training must, it would drop points.

        Args:
            metrics: by name, `train/...` and `val/...`.
            step: optimizer steps done; the axis of all curves, as `trainer/global_step`.
        """
        run = self._run
        if run is not None:
            self._guard(lambda: run.log({**metrics, STEP: step}), LOG_SECONDS)

    def log_artifact(self, name: str, kind: str, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Logs the files of a folder as a versioned artifact of this run.

        Offline the run notes where they lie, without a copy: `wandb sync` uploads them from there. Online this waits
        until they are uploaded.

        Args:
            name: of the artifact; a character that wandb does not allow becomes a dash.
            kind: wandb's type of the artifact, such as `model`.
            folder: all files below it.
            metadata: what they are: figures, the command, the data. Shown beside the files.
        """
        run = self._run
        if run is not None:
            self._guard(lambda: _upload(run, _artifact(name, kind, folder, metadata)), ARTIFACT_SECONDS)

    def log_page(self, page: Path) -> None:
        """Logs a page of this run for people, if it is there: as a panel of its own, and as a versioned artifact.

        Waits for no upload; `finish` does.

        Args:
            page: an HTML file without others, such as report.html: the panel `report` and the artifact
                `<command>-report` of the type `report`.
        """
        run = self._run
        if run is not None and page.is_file():
            self._guard(lambda: _show(run, f"{self._command}-{page.stem}", page), LOG_SECONDS)

    def finish(self, result: Mapping[str, Any], exit_code: int) -> None:
        """Logs the tables and charts that the result has something for, and the summary, and ends the run.

        Args:
            result: the content of result.json; after an interruption, as much of it as there is.
            exit_code: 0 marks the run finished, anything else failed.
        """
        run, self._run = self._run, None
        if run is not None:
            self._guard(lambda: _close(run, result, exit_code, self._folder), FINISH_SECONDS)

    def _open(self, command: str, config: Mapping[str, Any], folder: Path, resume: str | None) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK):  # wandb would quietly write to /tmp instead
            raise PermissionError(f"{folder} is not writable")
        import wandb

        mode = self._mode_in_force()
        # For the whole process, because wandb's login prompt and its telemetry read the process-wide settings:
        # silent never prompts, and offline sends nothing.
        with home_below(folder / "wandb"):
            wandb.setup(wandb.Settings(mode=mode, silent=True))
        run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=self._name,
            id=resume,
            resume=None if resume is None else "allow",  # `must` would refuse a run that was never synced
            group=self._group,
            tags=self._tags,
            job_type=command,
            config=plain(config),
            dir=str(folder),
            mode=mode,
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_SECONDS,
                disable_code=True,
                disable_git=True,
                allow_offline_artifacts=False,  # so that `wandb sync` needs nothing but the run's files
                x_disable_machine_info=True,  # provenance.json has it; a monitor would run inside what is measured
            ),
        )
        for axis in dict.fromkeys(AXES.values()):
            run.define_metric(axis)
        for names, axis in AXES.items():
            run.define_metric(names, step_metric=axis)
        return run

    def _mode_in_force(self) -> Literal["offline", "online"]:
        """`online` only where nobody asked for `offline` (`dryrun` is wandb's old word for it)."""
        private = self._mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        return "offline" if private else "online"

    def _guard(self, call: Callable[[], Any], seconds: float) -> Any:
        """The one way to wandb: what `call` returns, or None after the one warning of this run.

        `call` runs in a thread, so that a service that is dead, stopped or without a network cannot hold up the
        job; a KeyboardInterrupt reaches the main thread and passes through.
        """
        value, problem = within(seconds, call)
        if problem is None:
            return value
        self._run = None
        print(f"wandb: {_reason(problem)} - {self._command} goes on without it", file=sys.stderr, flush=True)
        within(ABANDON_SECONDS, abandon)
        return None


def within(seconds: float, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `call` returned and what it raised; a TimeoutError when it is still at work after `seconds`."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as problem:  # wandb also raises SystemExit
            outcome.append((None, problem))

    thread = threading.Thread(target=work, name="specpipe-wandb", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else (None, TimeoutError(f"no answer within {seconds:g} s"))


def abandon() -> None:
    """Drops wandb's session: the next job gets a new service process, and no exit hook waits for the dead one."""
    import wandb

    wandb.teardown(exit_code=1)


def _reason(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    cut = text[:REASON_LIMIT] + "..." if len(text) > REASON_LIMIT else text.rstrip(".")
    return f"{cut} ({type(problem).__name__})" if text else type(problem).__name__


def _label(key: str, value: Any, *, without: str = "", longest: int = 128) -> str:
    """`value` as a text that wandb takes; a number is a text too, so that `wandb.name=7` works."""
    is_text = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if not is_text or not 0 < len(str(value).strip()) <= longest or set(without) & set(str(value)):
        unwanted = f" without any of {' '.join(without)}" if without else ""
        raise UserError(f"{value!r} is not a text of 1 to {longest} characters{unwanted}.", key=key)
    return str(value)


def _labels(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UserError(f"{value!r} is not a list of words such as [ngram,cpu].", key=key)
    return tuple(_label(key, item, longest=64) for item in value)


def _show(run: Any, name: str, page: Path) -> None:
    import wandb

    run.log({page.stem: wandb.Html(str(page), inject=False)})
    run.log_artifact(_artifact(name, page.stem, page, {}))


def _artifact(name: str, kind: str, source: Path, metadata: Mapping[str, Any]) -> Any:
    """A file, or all files below a folder."""
    import wandb

    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name, flags=re.ASCII), kind, metadata=plain(metadata))
    add = artifact.add_file if source.is_file() else artifact.add_dir
    # immutable, skip_cache: wandb reads the files where they are, instead of two copies of them below its folders
    add(str(source.absolute()), policy="immutable", skip_cache=True)
    return artifact


def _upload(run: Any, artifact: Any) -> None:
    logged = run.log_artifact(artifact)
    if not run.offline:
        logged.wait()


def _close(run: Any, result: Mapping[str, Any], exit_code: int, folder: Path) -> None:
    if shown := tables_and_charts(result):
        with home_below(folder / "wandb"):
            run.log(shown)
    run.summary.update(summary(result))
    run.finish(exit_code=exit_code)


@contextlib.contextmanager
def home_below(folder: Path) -> Iterator[None]:
    """Keeps in the run's folder what wandb leaves in the user's home: its service's log and copies of tables.

    Where the home is not writable the service would print its log instead. A choice of the user's own stands.
    """
    names = [name for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR") if name not in os.environ]
    os.environ.update(dict.fromkeys(names, str(folder.absolute())))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
