"""Mixes public prompt sets into one file for training: `data.prompts` of `python -m train`.

    python benchmarks/training_prompts.py prompts.jsonl --gsm8k gsm8k/train.jsonl \\
        --instructions gpteacher/codegen-instruct.json gpteacher/roleplay-instruct.json \\
        --seed-tasks self_instruct/seed_tasks.jsonl self_instruct/user_oriented_instructions.jsonl \\
        --prompts oasst_octopack/oasst_commitpackft.jsonl \\
        --pairs tldr_pages/parallel_en_de.jsonl tldr_pages/parallel_en_fr.jsonl [--documents RUN ...]

A draft learns what the target says to the prompts it will be served, so the mixture is broad: arithmetic, code,
role play and writing, everyday instructions, questions, translation and, with `--documents`, long prompts that ask
about several answers of earlier `decode` runs of the target (their result.json). Instructions alone are taken, the
target writes the answers. Sources and licences: GSM8K (MIT), GPTeacher (MIT), Self-Instruct (Apache-2.0), OASST of
OctoPack (Apache-2.0), tldr-pages (CC BY 4.0). The order is shuffled, so the first n are a smaller mixture.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str]  # prompt, category

LANGUAGES = {"de": "German", "fr": "French"}
TRANSLATE = ("Translate {language} to English: {text}", "What does this {language} text mean in English?\n\n{text}")
ASK_LONG = (
    "Summarize: {text}",
    "{text}\n\nSummarize the text above in a few sentences.",
    "Read the following passages and answer the question.\n\n{text}\n\nWhat are the main points?",
    "{text}\nWhat can be learned from these texts?",
)
PIECES = range(3, 7)  # answers in a long prompt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name in ("gsm8k", "instructions", "seed-tasks", "prompts", "pairs", "documents"):
        parser.add_argument(f"--{name}", type=Path, nargs="*", default=[])
    parser.add_argument("--each", type=int, default=600, help="prompts taken of each file, at most")
    parser.add_argument("--pairs-each", type=int, default=200, help="sentences taken of each file of --pairs")
    parser.add_argument("--long", type=int, default=150, help="prompts about documents")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    rows: list[Row] = []
    for paths, reader in ((asked.gsm8k, math), (asked.instructions, instructions), (asked.seed_tasks, tasks)):
        rows += sampled(paths, reader, asked.each, chance)
    rows += sampled(asked.prompts, plain, asked.each, chance)
    rows += sampled(asked.pairs, lambda path: translations(path, chance), asked.pairs_each, chance)
    rows += long(asked, chance)
    chance.shuffle(rows)
    lines = [json.dumps({"prompt": text, "category": category}, ensure_ascii=False) for text, category in rows]
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    counts = {kind: sum(category == kind for _, category in rows) for kind in dict.fromkeys(c for _, c in rows)}
    print(f"{len(rows)} prompts: {counts}")
    return 0


def sampled(paths: list[Path], reader: Callable[[Path], Iterator[Row]], most: int, chance: random.Random) -> list[Row]:
    """At most so many rows of each file."""
    kept: list[Row] = []
    for path in paths:
        rows = list(reader(path))
        kept += chance.sample(rows, min(most, len(rows)))
    return kept


def math(path: Path) -> Iterator[Row]:
    return ((row["question"], "math") for row in _lines(path))


def instructions(path: Path) -> Iterator[Row]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    return ((_with_input(row["instruction"], row.get("input")), path.stem) for row in rows)


def tasks(path: Path) -> Iterator[Row]:
    return ((_with_input(row["instruction"], row["instances"][0].get("input")), "tasks") for row in _lines(path))


def plain(path: Path) -> Iterator[Row]:
    return ((row["prompt"], "questions") for row in _lines(path))


def translations(path: Path, chance: random.Random) -> Iterator[Row]:
    for row in _lines(path):
        language = next(code for code in LANGUAGES if code in row)
        yield chance.choice(TRANSLATE).format(language=LANGUAGES[language], text=row[language]), "translation"


def long(asked: argparse.Namespace, chance: random.Random) -> Iterator[Row]:
    """Prompts that hold some earlier answers: long contexts in the target's own words."""
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in asked.documents]
    texts = [request["text"].strip() for result in results for request in result["requests"]]
    for _ in range(asked.long if texts else 0):
        pieces = chance.sample(texts, min(len(texts), chance.choice(PIECES)))
        yield chance.choice(ASK_LONG).format(text="\n\n".join(pieces)), "long"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _with_input(instruction: str, given: str | None) -> str:
    return f"{instruction}\n\n{given}" if given else instruction


if __name__ == "__main__":
    raise SystemExit(main())
