"""Reads an offline wandb run back: its records by wandb's own protocol, its tables and pages from beside them."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Stored(NamedTuple):
    """What one offline run wrote."""

    folder: Path  # in which `wandb/` lies
    config: dict[str, Any]
    history: list[dict[str, Any]]
    metrics: dict[str, str]  # name or pattern -> the metric that is its axis
    summary: dict[str, Any]
    exit_code: int | None  # None: the run was not ended
    job_type: str
    group: str
    run_id: str
    artifacts: list[Any]  # records

    @property
    def files(self) -> list[str]:
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]

    def logged(self, name: str) -> dict[str, Any]:
        """The record of a table, a chart's table or a page that was logged under this name."""
        (record,) = (
            {key.removeprefix(f"{name}."): value for key, value in row.items() if key.startswith(f"{name}.")}
            for row in self.history
            if f"{name}.path" in row
        )
        return record

    def media(self, name: str) -> str:
        """The text of the file that was logged under this name."""
        (file,) = self.folder.glob(f"wandb/offline-run-*/files/{self.logged(name)['path']}")
        return file.read_text()

    def table(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table, or of the one behind a chart (`<chart>_table`)."""
        content = json.loads(self.media(name))
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def stored(folder: Path) -> Stored:
    """The one run below `folder`, when its service has written it; fails when there is none or more than one."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 10
    while (run := _read(file)).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return run._replace(folder=folder)


def _read(file: Path) -> Stored:
    from wandb.proto import wandb_internal_pb2

    run = Stored(file, {}, [], {}, {}, None, "", "", "", [])
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
            one = record.run
            run = run._replace(job_type=one.job_type, group=one.run_group, run_id=one.run_id)
        elif kind == "history":
            run.history.append({_key(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "metric":
            run.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "summary":
            run.summary.update({_key(item): json.loads(item.value_json) for item in record.summary.update})
        elif kind == "artifact":
            run.artifacts.append(record.artifact)
        elif kind == "exit":
            run = run._replace(exit_code=record.exit.exit_code)
    return run


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB; each piece has a checksum, a length and its place (1: whole,
    2: first, 3: middle, 4: last). The file begins with 7 bytes of wandb's own."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # no room for a header: the block is filled up
            position += left
            continue
        _, length, place = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if place in (1, 4):
            yield record
            record = b""
