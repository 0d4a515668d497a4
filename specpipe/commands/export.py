"""`specpipe export`: a proposer as files that other engines load, checked by loading them back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from safetensors import SafetensorError

from specpipe.commands.parts import ending
from specpipe.config import build, plain
from specpipe.console import written
from specpipe.errors import UserError, choice, one_line
from specpipe.export import Export
from specpipe.export.card import README, Subject, bias_left_out, card
from specpipe.export.causal_lm import export_distilled, export_draft
from specpipe.export.check import Check, NotTheSame
from specpipe.export.heads import ARCHITECTURES, MedusaExport, MlpSpeculatorExport
from specpipe.export.history import HistoryExport
from specpipe.export.serving import SPECULATION, best_of_bench
from specpipe.paths import from_start
from specpipe.proposers.bound_heads import TrainedHeads
from specpipe.proposers.cascade import Cascade
from specpipe.proposers.distilled import DistilledDraft
from specpipe.proposers.draft import DraftModel
from specpipe.proposers.layer_skip import LayerSkip
from specpipe.proposers.mlp import HeadsProposer
from specpipe.proposers.ngram import NgramProposer
from specpipe.proposers.none import NoProposer
from specpipe.proposers.suffix import SuffixProposer
from specpipe.proposers.table import CountsProposer
from specpipe.results import RunFolder, provenance
from specpipe.tracking import NoRun
from specpipe.verifier.smollm2 import sha256_of
from specpipe.verifier.targets import Target

FORMATS = ("hf", "vllm", "medusa", "mlp_speculator")
MLP = "mlp_speculator"
ARTEFACT = "artifact"  # in the run folder, where no other place is named
OURS_ALONE = ("min_confidence", "quantize")  # settings of proposers that no format holds

Fitting = tuple[tuple[str, ...], str]  # what a proposer can be written as, and why not as something else
FITTING: dict[type, Fitting] = {
    DistilledDraft: (("hf", "vllm"), "it is a causal language model"),
    DraftModel: (("hf", "vllm"), "it is a causal language model"),
    NgramProposer: (("vllm",), "it has no weights, and vLLM has a method of that kind"),
    SuffixProposer: (("vllm",), "it has no weights, and vLLM has a method of that kind"),
    NoProposer: ((), "it drafts nothing"),
    CountsProposer: ((), "no engine reads its counts"),
    LayerSkip: ((), "its layers are the target's own; `python -m train student=distilled` makes a draft of them"),
    Cascade: ((), "it is several proposers, and engines take one"),
}
HEADS_FITTING: dict[str, Fitting] = {
    "medusa": (("medusa",), "they are Medusa heads, which do not see the drafted tokens"),
    "mlp": ((MLP,), "they are heads that see the drafted tokens, which vLLM does not load"),
}
IMPORTED: Fitting = ((), "its heads were made elsewhere, and their files are in a format of engines as they are")
UNKNOWN: Fitting = ((), "no format is known for it")


def run(config: DictConfig) -> int:
    """Write the artefact, unless what is loaded back is not the proposer; the exit code."""
    settled = plain(config)
    hydra = HydraConfig.get().runtime
    form, name = _format(settled), str(hydra.choices.get("proposer"))
    out, shown = _place(settled["out"], Path(hydra.output_dir))
    benched = [] if settled["bench"] is None else best_of_bench(settled["bench"], name, settled["target"])
    export, subject, target = _export(config, settled, form, str(hydra.choices.get("target")))
    gamma = export.serving.gamma(benched[0]["num_speculative_tokens"] if benched else None)
    constant = {"command": "export", "target": target, "proposer": name, "format": form, "head": export.head}
    summary: dict[str, Any] = {}
    folder = RunFolder(Path(hydra.output_dir), {**constant, "config": settled}, lambda: summary)
    told = export.serving.speculation(shown, gamma)
    left_out = bias_left_out(settled["proposer"].get("copy_bias"))
    with ending(folder, NoRun(), _note) as end:
        try:
            with _new_folder(out) as half:
                check = _written(export, half, folder)
                if told:
                    (half / SPECULATION).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
                page = card(
                    export,
                    subject,
                    proposer=name,
                    form=form,
                    folder=shown,
                    gamma=gamma,
                    left_out=left_out,
                    check=check,
                    benched=benched,
                    origin=provenance(),
                )
                (half / README).write_text(page, encoding="utf-8")
                files = _files(half)
            summary |= _summary(files, check)
            folder.put(artifact=str(out), speculative_config=told, files=files)
            _note(f"written{' and loaded back' if check else ''}: {out}")
            for line in left_out:
                _note(f"note: {line}")
            _show(export.serving.command(subject.served, shown, gamma))
            end.code = 0
        except NotTheSame as fault:
            _note(f"specpipe: {fault}; {shown} was not kept")
    return end.code


def _format(settled: Mapping[str, Any]) -> str:
    """The format asked for; UserError if there is none of the name, and for a flavour where there is no choice."""
    if settled["format"] is None:
        raise UserError(f"has no value, and needs one: {', '.join(FORMATS)}.", key="format")
    form, flavour = choice("format", settled["format"], FORMATS), settled["flavour"]
    if form != MLP and flavour is not None:
        raise UserError(f"{flavour!r} is for format={MLP}; leave it out.", key="flavour")
    if form == MLP and flavour is None:
        raise UserError(f"has no value, and needs one: {', '.join(ARCHITECTURES)}.", key="flavour")
    if form == MLP:
        choice("flavour", flavour, ARCHITECTURES)
    return form


def _place(given: str | None, run_folder: Path) -> tuple[Path, str]:
    """Where the artefact goes, and how the user calls that; UserError for a place where something is."""
    if given is None:
        out, start = run_folder / ARTEFACT, from_start(".")
        return out, str(out.relative_to(start) if out.is_relative_to(start) else out)
    out = from_start(given)
    try:
        taken = out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir())))
    except OSError as error:
        raise UserError(f"{given!r} cannot be read: {error.strerror}.", key="out") from error
    if taken:
        raise UserError(f"{given!r} is there already, and is written over by nothing; name a new folder.", key="out")
    return out, given


def _export(
    config: DictConfig, settled: Mapping[str, Any], form: str, target_option: str
) -> tuple[Export, Subject, dict[str, Any]]:
    """What is exported, for whom, and the `target` block of result.json.

    Raises:
        UserError: for a proposer that the format does not fit, and a setting that no artefact can hold.
    """
    proposer = build(config.proposer, "proposer")
    _refuse_unfit(proposer, form, settled["proposer"])
    if isinstance(proposer, (NgramProposer, SuffixProposer)):
        if settled["head"] is not None:
            raise UserError(f"{settled['head']!r} is for a trained draft, and this proposer has no head.", key="head")
        subject = Subject.of(settled["target"], target_option, None)
        return HistoryExport(proposer), subject, {"model": subject.name}
    target = build(config.target, "target")
    subject, about = Subject.of(settled["target"], target.name, target.path), target.describe()
    return _of_weights(proposer, target, settled, form, subject.served), subject, about


def _of_weights(proposer: Any, target: Target, settled: Mapping[str, Any], form: str, served: str) -> Export:
    """What is exported of a proposer with weights; `served` is the target's hub id or directory."""
    head, draw = settled["head"], settled["proposer"].get("draw", "sample")
    if isinstance(proposer, DistilledDraft):
        return export_distilled(proposer, target, form, head=head, draw=draw)
    if isinstance(proposer, DraftModel):
        return export_draft(proposer, target, form, head=head, draw=draw)
    if form == MLP:
        return MlpSpeculatorExport(proposer.heads, target, head, flavour=settled["flavour"], base=served)
    return MedusaExport(proposer.heads, target, head)


def _refuse_unfit(proposer: Any, form: str, asked: Mapping[str, Any]) -> None:
    """Raise UserError, with the reason, for a proposer that cannot be written in the format as it was asked for."""
    able, reason = _fitting(proposer)
    if form not in able:
        there_is = f"; there is {', '.join(able)}" if able else ""
        raise UserError(f"{type(proposer).__name__} does not go into {form}: {reason}{there_is}.", key="format")
    for key in OURS_ALONE:
        if asked.get(key):
            what = f"{asked[key]!r} is nothing that an artefact can hold"
            raise UserError(f"{what}; leave it out.", key=f"proposer.{key}")


def _fitting(proposer: Any) -> Fitting:
    if isinstance(proposer, HeadsProposer):
        return HEADS_FITTING[proposer.heads.card.kind] if isinstance(proposer.heads, TrainedHeads) else IMPORTED
    return next((fitting for kind, fitting in FITTING.items() if isinstance(proposer, kind)), UNKNOWN)


def _written(export: Export, folder: Path, run_folder: RunFolder) -> Check | None:
    """Write, load back and compare; raises NotTheSame, with the figures in the run folder."""
    export.write(folder)
    check = export.check(folder)
    run_folder.put(check=check and asdict(check))
    if check:
        check.demand()
    return check


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, which becomes `out` if all goes well, and goes away if not.

    Raises:
        UserError: if it cannot be written, or is full.
    """
    half = out.with_name(f".{out.name}.{os.getpid()}")
    missing = [folder for folder in half.parents if not folder.exists()]  # the innermost first
    try:
        half.mkdir(parents=True)
        yield half
        if out.exists():
            out.rmdir()
        os.replace(half, out)
    except (OSError, SafetensorError) as error:
        what = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{str(out)!r} cannot be written: {what}.", key="out") from error
    finally:
        shutil.rmtree(half, ignore_errors=True)
        with contextlib.suppress(OSError):  # where `out` is there now
            for folder in missing:
                folder.rmdir()


def _files(folder: Path) -> list[dict[str, Any]]:
    """Name, bytes and sha256 of each."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [
        {"name": file.relative_to(folder).as_posix(), "bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in files
    ]


def _summary(files: Sequence[Mapping[str, Any]], check: Check | None) -> dict[str, Any]:
    found = None if check is None else {"difference": check.difference, "outside": check.outside}
    return {"files": len(files), "bytes": sum(file["bytes"] for file in files), "check": found}


def _show(command: str | None) -> None:
    """The line that serves it, on standard output, if there is one."""
    if command:
        with written(sys.stdout):
            print(command, flush=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
