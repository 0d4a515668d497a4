"""`specpipe report`: one page and one table that compare earlier runs, from what they wrote. Loads no model.

What can be compared is decided here: the rows, what differs between the runs' configs, and where a comparison would
mislead.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.table import Table
from rich.text import Text

from specpipe.commands.parts import ending
from specpipe.config import plain
from specpipe.console import Console, written
from specpipe.errors import UserError
from specpipe.report.comparison import comparison_page, mean, shown
from specpipe.report.page import interval, number
from specpipe.results import PROVENANCE, RESULT, RunFolder, folder_of_run, read_result
from specpipe.tracking import NoRun

Row = dict[str, Any]  # what one run measured with one setting; `run` is its number
Run = Mapping[str, Any]  # number, folder, result, provenance

PAGE = "report.html"
UNNAMED = "unnamed"  # a proposer of which a result says nothing
SETTINGS = ("proposer", "sampler", "num_speculative_tokens", "temperature", "batch_size")
FIGURES = ("speedup", "tokens_per_s", "tokens_per_target_pass", "alpha", "cost_ratio")


def run(config: DictConfig) -> int:
    """Compare the runs in `folders`; returns the exit code.

    Raises:
        UserError: naming `folders`, before anything is written.
    """
    settled = plain(config)
    folders, empty = _with_results(_folders(settled["folders"]))
    runs = [_earlier(i, folder) for i, folder in enumerate(folders, 1)]
    head = {
        "command": "report",
        "config": settled,
        "runs": [_about(each) for each in runs],
        "rows": [row for each in runs for row in ROWS[each["result"]["command"]](each)],
        "differences": differences(runs),
        "mixed": mixed(runs),
        "warnings": [*warnings(runs), *(f"{folder!r} has no {RESULT} and is left out." for folder in empty)],
    }
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir), head, dict)
    with ending(folder, NoRun(), _note) as end:
        folder.write(PAGE, comparison_page(folder.result))
        _show(folder.result)
        for warning in head["warnings"]:
            _note(f"warning: {warning}")
        _note(f"report: {folder.folder / PAGE}")
        end.code = 0
    return end.code


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """By key of the config, the runs' values, where they differ; None where a run has no such key.

    A key that only another command has is no difference.
    """
    configs = [dict(_flat(each["result"].get("config") or {})) for each in runs]
    found = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        commands = {each["result"]["command"] for each, config in zip(runs, configs, strict=True) if key in config}
        comparable = [c for each, c in zip(runs, configs, strict=True) if each["result"]["command"] in commands]
        if any(config.get(key, ...) != comparable[0].get(key, ...) for config in comparable):
            found[key] = [config.get(key) for config in configs]
    return found


def mixed(runs: Sequence[Run]) -> list[str]:
    """In what the runs differ that a comparison needs to be the same: `targets`, `prompts`, `machines`, `engines`."""
    return [what for what, (of, _) in NEEDED.items() if len(_grouped(runs, of)) > 1]


def warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Where the runs cannot be compared, or hold less than they were to."""
    for what in mixed(runs):
        of, harm = NEEDED[what]
        told = "; ".join(f"{_numbers(numbers)}: {value}" for value, numbers in _grouped(runs, of).items())
        yield f"the runs have different {what}, {harm} ({told})."
    for each in runs:
        rounds = each["result"].get("rounds") or {}
        requests = each["result"].get("requests") or ()
        if (done := rounds.get("done", 0)) < (wanted := rounds.get("wanted", 0)):
            yield f"run {each['number']} is unfinished: {done} of {wanted} rounds."
        elif any(request.get("finish_reason") == "interrupted" for request in requests):
            yield f"run {each['number']} was interrupted, after {len(requests)} prompts."


def _folders(given: Any) -> list[str]:
    folders = [given] if isinstance(given, str) else given
    if not folders:
        raise UserError("none is given: specpipe report outputs/bench/*", key="folders")
    if not isinstance(folders, list) or not all(isinstance(each, str) and each for each in folders):
        raise UserError(f"{given!r} is not a list of run folders: specpipe report outputs/bench/*", key="folders")
    places = [folder_of_run(folder).resolve() for folder in folders]
    for place, folder in zip(places, folders, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{folder!r} is given twice.", key="folders")
    return folders


def _with_results(folders: list[str]) -> tuple[list[str], list[str]]:
    """Those of runs that came to a result, and those of others, such as refused ones; all, if none has one."""
    has = {each: (folder_of_run(each) / RESULT).exists() or not folder_of_run(each).is_dir() for each in folders}
    if not any(has.values()):
        return folders, []
    return [each for each in folders if has[each]], [each for each in folders if not has[each]]


def _earlier(number: int, folder: str) -> Run:
    result = read_result(folder, "folders")
    if result.get("command") not in ROWS:
        what = f"{folder!r} is a run of {result.get('command')}; there is something to compare in runs of"
        raise UserError(f"{what} {', '.join(ROWS)}.", key="folders")
    return {
        "number": number,
        "folder": folder_of_run(folder),
        "result": result,
        "provenance": _provenance(folder_of_run(folder)),
    }


def _provenance(folder: Path) -> dict[str, Any]:
    """Empty where it is lost: what was measured stands without it."""
    try:
        found = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _about(run: Run) -> dict[str, Any]:
    result, provenance = run["result"], run["provenance"]
    proposers = dict.fromkeys(cell["proposer"] for cell in result.get("cells") or ())
    return {
        "run": run["number"],
        "folder": str(run["folder"]),
        "command": result["command"],
        "time": provenance.get("time"),
        "target": result.get("target"),
        "engine": result.get("verifier"),
        "proposer": result.get("proposer") or ", ".join(proposers) or None,
        "prompts": _count(result),
        "git": provenance.get("git"),
        "version": result.get("version"),
    }


def _decode_rows(run: Run) -> Iterator[Row]:
    result, summary = run["result"], run["result"].get("summary") or {}
    generation = (result.get("config") or {}).get("generation") or {}
    yield {
        **_row(run, result, summary),
        "temperature": generation.get("temperature"),
        "batch_size": result.get("batch_size"),
    }


def _bench_rows(run: Run) -> Iterator[Row]:
    for cell in run["result"].get("cells") or ():
        yield {**_row(run, cell, cell.get("summary") or {}), "peer": bool(cell.get("peer"))}


def _train_rows(run: Run) -> Iterator[Row]:
    """Tokens per target pass are tau, of a walk over held-out text whose steps all have a draft; nothing is timed."""
    result, summary = run["result"], run["result"].get("summary") or {}
    alpha = {"mean": summary.get("alpha"), "low": summary.get("alpha_low"), "high": summary.get("alpha_high")}
    yield _row(run, result, {"tokens_per_target_pass": summary.get("tau"), "alpha": alpha})


ROWS: Mapping[str, Callable[[Run], Iterator[Row]]] = {
    "decode": _decode_rows,
    "bench": _bench_rows,
    "train": _train_rows,
}


def _row(run: Run, settings: Mapping[str, Any], summary: Mapping[str, Any]) -> Row:
    return {
        "run": run["number"],
        **{name: settings.get(name) for name in SETTINGS},
        "proposer": settings.get("proposer") or UNNAMED,
        "peer": False,
        "lossless": settings.get("lossless"),
        **{name: summary.get(name) for name in FIGURES},
    }


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _grouped(runs: Iterable[Run], of: Callable[[Run], str | None]) -> dict[str, list[int]]:
    """The numbers of the runs by what they have; a run of which that is not known is in no group."""
    groups: dict[str, list[int]] = {}
    for each in runs:
        if (value := of(each)) is not None:
            groups.setdefault(value, []).append(each["number"])
    return groups


def _numbers(numbers: Sequence[int]) -> str:
    return f"run{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _target(run: Run) -> str | None:
    target = run["result"].get("target") or {}
    return ", ".join(str(target[name]) for name in ("model", "dtype") if target.get(name)) or None


def _prompts(run: Run) -> str | None:
    """What the config says of them and how many there were; a training's are those it was not trained on."""
    result, config = run["result"], run["result"].get("config") or {}
    if result["command"] == "train":
        return f"held-out text {((result.get('data') or {}).get('sha256') or '')[:8]}".rstrip()
    if config.get("prompt") is not None:
        return repr(config["prompt"])
    group = config.get("prompts") or {}
    chosen = [str(group.get("_target_", "")).rpartition(".")[2]]
    chosen += [f"{key}={value}" for key, value in group.items() if key != "_target_" and value is not None]
    return f"{' '.join(chosen)} ({_count(result) or 0} of them)" if group else None


def _count(result: Mapping[str, Any]) -> int | None:
    return (result.get("prompts") or {}).get("count") or len(result.get("requests") or ()) or None


def _machine(run: Run) -> str | None:
    machine = run["provenance"].get("machine") or {}
    told = (
        machine.get("gpu"),
        machine.get("cpu"),
        f"{machine.get('threads')} threads" if machine.get("threads") else None,
    )
    return ", ".join(str(each) for each in told if each) or None


NEEDED: Mapping[str, tuple[Callable[[Run], str | None], str]] = {
    "targets": (_target, "nothing here compares across them"),
    "prompts": (_prompts, "acceptance and speed depend on them"),
    "machines": (_machine, "compare acceptance, not speed"),
    "engines": (lambda run: run["result"].get("verifier"), "compare acceptance, not speed"),
}


def _show(result: Mapping[str, Any]) -> None:
    """The rows that the page's charts show, on standard output.

    Raises:
        OutputClosed: when its reader has gone.
        UserError: when it cannot be written.
    """
    console = Console(file=sys.stdout, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("run", "proposer", "gamma", "T", "batch", "speedup", "tokens/s", "per pass", "alpha"):
        table.add_column(head, justify="left" if head in ("run", "proposer") else "right")
    for row in shown(result["rows"]):
        settings = (row["num_speculative_tokens"], row["temperature"], row["batch_size"])
        figures = (interval(row["speedup"]), row["tokens_per_s"], row["tokens_per_target_pass"], mean(row["alpha"]))
        table.add_row(str(row["run"]), row["proposer"], *(str(number(each)) for each in (*settings, *figures)))
    with console.capture() as capture:
        for each in result["runs"]:
            console.print(Text(f"{each['run']}  {each['command']}  {os.path.relpath(each['folder'])}"), soft_wrap=True)
        console.print()
        console.print(table)
    with written(sys.stdout):
        sys.stdout.write(capture.get())
        sys.stdout.flush()


def _note(line: str) -> None:
    """One line beside the results."""
    Console(file=sys.stderr, highlight=False).print(Text(line), soft_wrap=True)
