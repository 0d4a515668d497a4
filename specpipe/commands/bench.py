"""`specpipe bench`: is speculation faster for these prompts, by how much, and how sure is that?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specpipe.bench.answer import answer, best_cells
from specpipe.bench.figures import costs_by_drafted, steps_of, summary
from specpipe.bench.forecast import Guesses, expected_error, overhear, predicted
from specpipe.bench.grid import PLAIN, Cell, Grid, Setting
from specpipe.bench.record import FILE, Decoded, Record, Round
from specpipe.bench.rounds import Bench, Runner, named_prompts
from specpipe.bench.terminal import BenchView
from specpipe.commands.parts import INTERRUPTED, build_pipeline, chosen_prompts, ending, head
from specpipe.config import build, plain
from specpipe.draft_length import Fixed
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.proposers.none import NoProposer
from specpipe.report.bench import bench_page
from specpipe.results import RunFolder, folder_of_run, peak_memory, read_result
from specpipe.theory import speedup

PAGE = "report.html"
PARTS = ("sampler", "verifier", "draft_length", "generation")  # of a config, whose options' names are in result.json
NOT_REPRODUCED = 1
FREE = ("resume", "wandb", "repeats")  # keys in which a run may differ from the one that it goes on from
Peers = Callable[[Setting], dict[Cell, Callable[[int], Runner]]]


def run(config: DictConfig) -> int:
    """Measure every cell of the config; returns the exit code."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    choices = dict(HydraConfig.get().runtime.choices)
    if config.resume is not None:
        config, choices = resumed(config, choices)
    settled = plain(config)
    grid = Grid(config, str(choices["sampler"]))
    asked = chosen_prompts(config)
    _build_all(grid)
    tracker = build(config.wandb, "wandb")
    base = build_pipeline(config, NoProposer())
    base.verifier.expect(grid.longest)
    record = Record()
    bench = Bench(config, grid, base, asked, _peers(config, grid, base, asked), record)
    figures = Figures(grid, bench, record)
    constant = head("bench", base, settled, choices) | {"prompts": _said_of(asked, config)}
    if config.resume is not None and constant["verifier"] != choices.get("verifier"):
        what = f"{config.resume!r} ran {choices.get('verifier')}, and here the target runs {constant['verifier']}"
        raise UserError(f"{what}: their times do not belong together.", key="resume")
    out = RunFolder(folder, constant, figures.summary)
    record.keep(out.folder / FILE)
    tracker.start("bench", settled, out.folder)
    foretold = config.predict and isinstance(base.draft_length, Fixed)  # other lengths depend on the clock
    listened = len({setting.temperature for setting in grid.settings}) * len(asked.texts) if foretold else 0
    view = BenchView(sum(map(bench.stretches, bench.rounds)) + listened)

    def last() -> None:
        out.written_by(lambda folder: record.close())
        out.put(**figures.refresh())
        out.write(PAGE, bench_page(out.result))
        tracker.log_page(out.folder / PAGE)

    with ending(out, tracker, view.note, done=(0, NOT_REPRODUCED, INTERRUPTED), last=last) as end:
        if config.resume is not None:
            record.take_over(folder_of_run(config.resume) / FILE)
        with view:
            for round_ in bench.rounds:
                if round_ in record.done:
                    view.skip(bench.stretches(round_))
                else:
                    _measure(bench, round_, view)
                    out.put(**figures.refresh())
                    tracker.log_round(len(record.done), out.result["cells"])
            if foretold:
                figures.guesses = _overheard(bench, grid, asked, view)
        out.put(**figures.refresh())
        view.result(out.result)
        end.code = _reproduced(out.result, view)
    return end.code


def _measure(bench: Bench, round_: Round, view: BenchView) -> None:
    for cell in bench.run(round_):
        view.advance(cell.proposer)


class Figures:
    """What result.json says of what was decoded so far.

    `guesses` holds what was overheard, by temperature and proposer; as long as there is none nothing is predicted.
    """

    def __init__(self, grid: Grid, bench: Bench, record: Record) -> None:
        self._grid, self._bench, self._record = grid, bench, record
        self.guesses: dict[float, dict[str, list[Guesses]]] = {}
        self._summary: dict[str, Any] = {}

    def summary(self) -> dict[str, Any]:
        """The `summary` block as of the last `refresh`."""
        return self._summary

    def refresh(self) -> dict[str, Any]:
        """`cells`, `costs`, `summary` and what stands beside them, made anew."""
        cells: list[dict[str, Any]] = []
        costs: list[dict[str, Any]] = []
        for setting in self._grid.settings:
            measured = self._record.whole(self._bench.cells(setting))
            if not any(measured.values()):
                continue
            baseline = next(requests for cell, requests in measured.items() if cell.proposer == PLAIN)
            cells += [self._cell(cell, requests, baseline) for cell, requests in measured.items()]
            costs += _costs(measured)
        best = best_cells(cells)
        self._summary = {"answer": answer(best, cells), "best": best, "prediction_error": _errors(cells)}
        if best:
            self._summary |= {name: best[0][name] for name in ("speedup", "alpha", "tokens_per_s")}
        rounds = {"done": len(self._record.done), "wanted": len(self._bench.rounds)}
        beside = {"rounds": rounds, "peak_memory_bytes": peak_memory(), "summary": self._summary}
        return {"cells": cells, "costs": costs, **beside}

    def _cell(self, cell: Cell, requests: list[Decoded], plainly: list[Decoded]) -> dict[str, Any]:
        result = cell.names() | {
            "repeats": len({each.repeat for each in requests}),
            "lossless": True if cell.peer else bool(getattr(self._grid.sampler(cell.sampler), "lossless", False)),
            "summary": summary(cell, requests, plainly),
        }
        if not cell.peer and cell.gamma:
            result["summary"]["predicted_speedup"] = self._predicted(cell, requests, plainly, result["summary"])
        if any(each.category for each in requests):
            names = dict.fromkeys(each.category or "none" for each in requests)
            result["categories"] = {name: summary(cell, _of(name, requests), _of(name, plainly)) for name in names}
        return result

    def _predicted(
        self, cell: Cell, requests: list[Decoded], plainly: list[Decoded], measured: Mapping[str, Any]
    ) -> dict[str, float | None]:
        alpha, c = measured["alpha"]["mean"], measured["cost_ratio"]
        known = alpha is not None and c is not None
        heard = self.guesses.get(cell.setting.temperature, {}).get(cell.proposer)
        return {
            "formula": speedup(min(1.0, alpha), cell.gamma or 0, c) if known else None,
            "costs": predicted(heard, cell.gamma or 0, str(cell.sampler), requests, plainly) if heard else None,
        }


def resumed(config: DictConfig, choices: dict[str, str]) -> tuple[DictConfig, dict[str, str]]:
    """The config and the options' names of the run to go on from, if the words typed do not ask for another one.

    Raises:
        UserError: if the folder is not that of a bench, and for a key that differs.
    """
    earlier = read_result(config.resume, "resume")
    whole = earlier.get("command") == "bench" and isinstance(earlier.get("config"), dict)
    if not whole or not (folder_of_run(config.resume) / FILE).is_file():
        raise UserError(f"{config.resume!r} is not the folder of a bench.", key="resume")
    own, theirs = plain(config), earlier["config"]
    typed = [word.lstrip("+~").partition("=")[0].partition(".")[0] for word in HydraConfig.get().overrides.task]
    for key in typed:
        if key not in FREE and own.get(key) != theirs.get(key):
            raise UserError(f"is not that of {config.resume!r}; a bench goes on with its own config.", key=key)
    merged = OmegaConf.create(theirs | {key: own[key] for key in FREE if key in typed or key == "resume"})
    assert isinstance(merged, DictConfig)
    return merged, choices | {part: earlier[part] for part in PARTS if earlier.get(part)}


def _build_all(grid: Grid) -> None:
    """Mistakes in a part show before a model is loaded."""
    for name, node in grid.proposers.items():
        build(node, f"proposers[{name}]")
    for setting in grid.settings:
        grid.generation(setting)
        for cell in grid.cells(setting):
            grid.sampler(cell.sampler)


def _peers(config: DictConfig, grid: Grid, base: Pipeline, prompts: Prompts) -> Peers:
    if not grid.peers:
        return lambda setting: {}
    from specpipe.bench.peers import HuggingFace, assistant_of

    target = build(config.target, "target")
    proposers = (build(node, f"proposers[{name}]") for name, node in grid.proposers.items())
    engine = HuggingFace(target, base, prompts, grid.longest, assistant_of(proposers, target))
    return lambda setting: engine.cells(setting, grid)


def _overheard(bench: Bench, grid: Grid, prompts: Prompts, view: BenchView) -> dict[float, dict[str, list[Guesses]]]:
    """For each temperature what every proposer would draft behind every token of the target's own texts."""
    smallest = {setting.temperature: setting for setting in sorted(grid.settings, key=lambda each: -each.batch_size)}
    found = {}
    for temperature, setting in smallest.items():
        base = bench.pipeline(Cell(setting, PLAIN, None, 0))
        proposers = {name: bench.proposer(name) for name in grid.proposers}
        told = partial(view.advance, "predicting")
        heard = overhear(base, proposers, grid.longest, prompts, setting.batch_size, told)
        found[temperature] = {
            name: texts
            for name, texts in heard.items()
            if not any(each.drawn for each in texts) or getattr(proposers[name], "q_by_prefix", False)
        }
    return found


def _of(category: str, requests: list[Decoded]) -> list[Decoded]:
    return [each for each in requests if (each.category or "none") == category]


def _costs(measured: Mapping[Cell, list[Decoded]]) -> list[dict[str, Any]]:
    """Seconds of steps by how many tokens they drafted, over all draft lengths of a proposer and sampler."""
    together: dict[tuple[str, str | None], tuple[Cell, list[Decoded]]] = {}
    for cell, requests in measured.items():
        if not cell.peer:
            together.setdefault((cell.proposer, cell.sampler), (cell, []))[1].extend(requests)
    names = ("proposer", "sampler", "temperature", "batch_size")
    return [
        {name: value for name, value in cell.names().items() if name in names}
        | {
            "by_drafted": [
                {"drafted": k, "steps": c.steps, "draft": c.draft, "verify": c.verify, "other": c.other}
                for k, c in costs_by_drafted(steps_of(requests)).items()
            ]
        }
        for cell, requests in together.values()
    ]


def _errors(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean |predicted / measured - 1| of the cells that both predictions are known for."""
    pairs = [
        (said, cell["summary"]["speedup"]["mean"])
        for cell in cells
        if (said := cell["summary"].get("predicted_speedup")) and None not in said.values()
    ]
    errors = {name: expected_error((said[name], measured) for said, measured in pairs) for name in ("formula", "costs")}
    return {name: error for name, (error, _) in errors.items()} | {"cells": errors["costs"][1]}


def _reproduced(result: Mapping[str, Any], view: BenchView) -> int:
    """0, or 1 if a text of temperature 0 is not plain decoding's where rounding is no excuse."""
    if result["target"]["dtype"] not in ("float32", "float64"):
        return 0
    wrong = [cell for cell in result["cells"] if cell["summary"].get("texts") != cell["summary"].get("identical_texts")]
    for cell in wrong:
        counts = cell["summary"]
        what = f"{cell['proposer']}, gamma {cell['num_speculative_tokens']}"
        view.note(
            f"not reproduced: {what}: {counts['identical_texts']} of {counts['texts']} texts are plain decoding's"
        )
    return NOT_REPRODUCED if wrong else 0


def _said_of(prompts: Prompts, config: DictConfig) -> dict[str, Any]:
    return named_prompts(prompts) | {"max_new_tokens": config.generation.max_new_tokens}
