"""The README.md of an artefact: what it is, how it is served, who loads it, how it came about."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.bench.answer import said
from specpipe.export import Export
from specpipe.export.check import Check

README = "README.md"
SMOLLM2 = "SmolLM2-135M-Instruct"
LICENCES = {SMOLLM2: "apache-2.0"}
HUB = {SMOLLM2: f"HuggingFaceTB/{SMOLLM2}"}
UNKNOWN_LICENCE = "not known here, see the target's own card"
HEADS = {
    "penalty": "the other ids have rows that put them far below: their probability is zero in float32",
    "zero": "the other ids have rows of zeros: use it with greedy drafts alone",
    "small": "the model knows these ids alone, by numbers of its own, and has a tokenizer of them",
}
FIGURES = {
    "alpha": "alpha, at temperature 1",
    "tau": "tokens per target pass, greedy",
    "tau_T1": "tokens per target pass, temperature 1",
    "coverage": "share of the target's tokens that it can say",
    "tokens": "tokens trained on, each as often as it was used",
    "steps": "steps",
    "minutes": "minutes",
}
SNIPPET = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained({target!r})
    draft = AutoModelForCausalLM.from_pretrained({folder!r})
    tokens = AutoTokenizer.from_pretrained({target!r})("Hello", return_tensors="pt")
    target.generate(**tokens, assistant_model=draft{more})"""
BY_TOKENS = (
    ", tokenizer=AutoTokenizer.from_pretrained({target!r})"
    ", assistant_tokenizer=AutoTokenizer.from_pretrained({folder!r})"
)


@dataclass(frozen=True)
class Subject:
    """Whom an artefact is for.

    name: of the target, for people. served: its hub id or directory. licence: None if it is not known.
    """

    name: str
    served: str
    licence: str | None

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str, path: str | None) -> Subject:
        """Of the target that `config` asks for.

        Args:
            config: of the group `target`.
            name: of the target, or of its option where it was not loaded.
            path: it was loaded from, None if it was not.
        """
        name = SMOLLM2 if name == "smollm2" else name
        served = config.get("model") or path or HUB.get(name, name)
        licence = LICENCES.get(name) or (None if path is None else _told_licence(Path(path) / README))
        return cls(name, served, licence)


def card(
    export: Export,
    subject: Subject,
    *,
    proposer: str,
    form: str,
    folder: str,
    gamma: int,
    left_out: Sequence[str],
    check: Check | None,
    benched: Sequence[Mapping[str, Any]],
    origin: Mapping[str, Any],
) -> str:
    """The page.

    Args:
        proposer: name of its option.
        form: the format.
        folder: the artefact's, as the user typed it.
        gamma: tokens of a step in the serve command.
        left_out: what the proposer does here and does not there, a line each.
        check: None where nothing was compared.
        benched: what a bench found, as `best_of_bench` gives it.
        origin: as `results.provenance` gives it.
    """
    parts = [
        "\n".join(_front(subject)),
        f"# {proposer} for {subject.name} ({form})",
        f"A draft for speculative decoding: it guesses tokens, and {subject.name} accepts or corrects them. "
        "In an engine that verifies without loss it changes the speed of the text and nothing else.",
        "## Serve",
        *_serve(export, subject, form, folder, gamma),
        *_benched(benched, gamma),
        "## Who loads it",
        "\n".join(f"- {line}" for line in export.loaded_by),
        "## What it is",
        "\n".join(f"- {line}" for line in (*_facts(export, subject, check), *left_out)),
        *_training(export.training),
        "## Made by",
        f"    {origin['command_line']}",
        f"specpipe {origin['specpipe']}, revision {origin['git'] or 'unknown'}, {origin['time']}",
    ]
    return "\n\n".join(parts) + "\n"


def bias_left_out(copy_bias: Sequence[float] | None) -> list[str]:
    """A line for a `copy_bias`, which is how specpipe drafts and no weight."""
    if not copy_bias:
        return []
    what = f"copy_bias={[*copy_bias]} is not in it: specpipe raises logits by it as it drafts, engines do not"
    return [f"{what}, and may accept fewer tokens"]


def _front(subject: Subject) -> Iterator[str]:
    """What the Hugging Face hub reads."""
    yield "---"
    if subject.licence:
        yield f"license: {subject.licence}"
    yield "tags: [speculative-decoding]"
    yield "---"


def _serve(export: Export, subject: Subject, form: str, folder: str, gamma: int) -> Iterator[str]:
    if form == "hf":
        places = {"target": subject.served, "folder": folder}
        translated = (export.serving.keys or {}).get("use_heterogeneous_vocab")
        yield SNIPPET.format(**places, more=BY_TOKENS.format(**places) if translated else "")
    if line := export.serving.command(subject.served, folder, gamma):
        yield f"    {line}"
    if told := export.serving.speculation(folder, gamma):
        yield "`--speculative-config`, the same as `LLM(speculative_config=...)`:"
        yield f"    {json.dumps(told)}"


def _benched(benched: Sequence[Mapping[str, Any]], gamma: int) -> Iterator[str]:
    if not benched:
        return
    yield f"{gamma} tokens a step are from a bench of specpipe, on the machine and prompts of that bench:"
    rows = ["| temperature | batch size | tokens a step | speedup | alpha |", "|---|---|---|---|---|"]
    for each in benched:
        alpha = (each["alpha"] or {}).get("mean")
        found = (f"{each['temperature']:g}", each["batch_size"], each["num_speculative_tokens"], said(each["speedup"]))
        rows.append("| " + " | ".join(map(str, (*found, "n/a" if alpha is None else f"{alpha:.3f}"))) + " |")
    yield "\n".join(rows)


def _facts(export: Export, subject: Subject, check: Check | None) -> Iterator[str]:
    yield f"target: {subject.name} (`{subject.served}`)"
    yield f"licence of the target: {subject.licence or UNKNOWN_LICENCE}"
    if export.head:
        yield f"head: {export.head}. The draft was trained to say some ids alone; {HEADS[export.head]}"
    if check:
        compared = (
            f"logits of {check.places} places are those of the proposer to {check.difference:.2g} of their spread"
        )
        yield f"loaded back: {compared}; at most {check.outside:.2g} of the probability is on ids that it cannot say"


def _training(training: Mapping[str, Any]) -> Iterator[str]:
    if not training:
        return
    yield "## How it was trained"
    yield f"    {training.get('command')}"
    figures, data = training.get("figures") or {}, training.get("data") or {}
    rows = [f"| {text} | {_number(figures[key])} |" for key, text in FIGURES.items() if figures.get(key) is not None]
    yield "\n".join(["| held-out text of the target | |", "|---|---|", *rows])
    rows = [f"| {key} | {_number(value)} |" for key, value in data.items()]
    yield "\n".join(["| data: what the target wrote itself | |", "|---|---|", *rows])
    yield f"revision {training.get('git') or 'unknown'}"


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _told_licence(file: Path) -> str | None:
    """What the front matter of a model card says."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    if lines[:1] != ["---"]:
        return None
    front = lines[1 : lines.index("---", 1)] if "---" in lines[1:] else []
    return next((line.partition(":")[2].strip() for line in front if line.startswith("license:")), None) or None
