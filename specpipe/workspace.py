"""The wandb workspace in which runs of decode, bench and train are read, as code.

Names what `specpipe.logged` and a training log, and computes nothing. Needs the package wandb-workspaces.
"""

from __future__ import annotations

from typing import Any

import wandb_workspaces.reports.v2 as panels
from wandb_workspaces import workspaces

REQUEST, ROUND, STEP = "request/index", "round/index", "trainer/global_step"
COLUMNS = ("speedup/mean", "alpha/mean", "tokens_per_s", "tau")  # beside each run's name


def workspace(entity: str, project: str, name: str) -> workspaces.Workspace:
    """A section for each command. A panel shows the chosen runs that have what it names."""
    sections = {"decode": _decode(), "bench": _bench(), "train": _train()}
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[workspaces.Section(name=title, panels=each, is_open=True) for title, each in sections.items()],
        runset_settings=workspaces.RunsetSettings(pinned_columns=[f"summary:{name}" for name in COLUMNS]),
    )


def serialised(made: workspaces.Workspace) -> dict[str, Any]:
    """What wandb stores of it, as nested dictionaries and lists."""
    return made._to_model().spec.model_dump(mode="json", by_alias=True, exclude_none=True)  # no public method has it


def _decode() -> list[Any]:
    parts = ("prefill", "draft", "verify", "accept", "other")
    return [
        _lines("alpha", REQUEST, "request/alpha"),
        _lines("tokens per second", REQUEST, "request/tokens_per_s"),
        _lines("tokens per target pass", REQUEST, "request/tokens_per_target_pass"),
        _lines("seconds by part", REQUEST, *(f"request/{part}_s" for part in parts)),
        _bars("acceptance by position", "per_position_acceptance", "position", "acceptance"),
        _bars("accepted tokens of a step", "acceptance_histogram", "accepted", "steps"),
        panels.BarPlot(title="tokens per second by run", metrics=["tokens_per_s"]),
        panels.BarPlot(title="alpha by run", metrics=["alpha/mean"]),
        panels.WeavePanelSummaryTable(table_name="requests"),
    ]


def _bench() -> list[Any]:
    return [
        panels.BarPlot(title="speedup by run", metrics=["speedup/mean"]),
        panels.BarPlot(title="alpha of the fastest by run", metrics=["alpha/mean"]),
        panels.ScatterPlot(
            title="speedup over alpha", x=panels.SummaryMetric("alpha/mean"), y=panels.SummaryMetric("speedup/mean")
        ),
        panels.LinePlot(title="speedup by round", x=ROUND, metric_regex="round/speedup/.*"),
        panels.LinePlot(title="alpha by round", x=ROUND, metric_regex="round/alpha/.*"),
        _bars("speedup by category", "speedup_by_category", "category", "speedup"),
        panels.CustomChart(
            query={"summaryTable": {"tableKey": "acceptance_by_position_table"}},
            chart_name="wandb/lineseries/v0",
            chart_fields={"step": "step", "lineKey": "lineKey", "lineVal": "lineVal"},
            chart_strings={"title": "acceptance by position", "xname": "position"},
        ),
        panels.BarPlot(
            title="error of the predicted speedups", metrics=["prediction_error/formula", "prediction_error/costs"]
        ),
        panels.WeavePanelSummaryTable(table_name="cells"),
        panels.WeavePanelSummaryTable(table_name="categories"),
        panels.MediaBrowser(title="report", media_keys=["report"]),
    ]


def _train() -> list[Any]:
    return [
        panels.LinePlot(title="tokens per target pass", x=STEP, metric_regex="val/tau_.*"),
        panels.LinePlot(title="alpha by head", x=STEP, metric_regex="val/alpha.*"),
        panels.LinePlot(title="acceptance by position", x=STEP, metric_regex="val/acc_pos.*"),
        _lines("loss", STEP, "train/loss", "val/loss"),
        _lines("training tokens per second", STEP, "train/tokens_per_s"),
        panels.MediaBrowser(title="report", media_keys=["report"]),
    ]


def _lines(title: str, axis: str, *metrics: str) -> Any:
    return panels.LinePlot(title=title, x=axis, y=list(metrics))


def _bars(title: str, chart: str, label: str, value: str) -> Any:
    """A chart that was logged as bars: wandb keeps its numbers in a table of their own."""
    return panels.CustomChart(
        query={"summaryTable": {"tableKey": f"{chart}_table"}},
        chart_name="wandb/bar/v0",
        chart_fields={"label": label, "value": value},
        chart_strings={"title": title},
    )
