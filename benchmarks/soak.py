"""Does it stay sound for hours? Random requests in one process, as a service would see them, checked as they come.

    python benchmarks/soak.py [--requests 2000] [--seed 0] [words ...]

Groups of requests of random lengths are decoded with random settings, batch sizes, samplers, draft lengths and
proposers, which live as long as the process; some groups are left in the middle, as Ctrl-C does. Exit code 1 if

- the text of a greedy request is not that of plain decoding on the same engine, id by id;
- a request is still in memory when its group is done;
- the process grows by more than GROWTH from the second fifth of the requests to the last, by the median of either.

An error ends it with the group that it happened in. `words` are those of `decode`; without any they are
`target=tiny target.dtype=float32`, for which drafts are made on the spot. The real one in half an hour, with its own
drafts: `--requests 200 target=smollm2 target.dtype=float32`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakSet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specpipe.commands.parts import build_pipeline
from specpipe.config import build, compose, option
from specpipe.draft_length import Adaptive, Fixed
from specpipe.prompts import demo
from specpipe.proposers.counts import Origin, fit, save, vocabulary_hash
from specpipe.proposers.none import NoProposer
from specpipe.results import peak_memory
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.stats import ratio
from specpipe.verifier.quiet import quiet_transformers
from specpipe.verifier.targets import Target, tiny

TINY = ["target=tiny", "target.dtype=float32"]  # compiled: texts are equal to the last bit
GROWTH = 64_000_000  # bytes
CACHED = 5000  # tokens that `suffix` keeps of earlier requests: so few that it is full early
LEFT = 0.05  # share of groups that are left in the middle
LONGEST = 240  # tokens of a prompt, and of an answer
SAMPLERS = ("rejection", "block", "exact_match")

SUFFIX = f"{{_target_:specpipe.proposers.suffix.SuffixProposer,max_cached_tokens:{CACHED}}}"
PROPOSERS = {
    "none": ["proposer=none"],
    "ngram": ["proposer=ngram"],
    "suffix": ["proposer=suffix", f"proposer.max_cached_tokens={CACHED}"],
    "cascade": ["proposer=cascade", f"proposer.members=[{SUFFIX},ngram]", "proposer.extend=true"],
    "layer_skip": ["proposer=layer_skip", "proposer.layers=1"],
    "layer_skip, own cache": ["proposer=layer_skip", "proposer.layers=[1]"],
}
SHIPPED = {name: [f"proposer={name}"] for name in ("table", "mlp", "distilled")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of all that is chosen at random")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(asked.words or TINY, asked.seed, Path(folder))
        soak.run(asked.requests)
    return soak.report()


class Soak:
    """The process under test: one target, a proposer of each kind, and what was seen of them."""

    def __init__(self, words: list[str], seed: int, folder: Path) -> None:
        self.base = build_pipeline(compose("decode", words), NoProposer())
        target = self.base.verifier.target
        own = drafts_for_tiny(target, folder) if target.name == "tiny" else SHIPPED
        self.pipelines = {
            name: self.base.drafting_with(build(compose("decode", [*words, *chosen]).proposer, "proposer"))
            for name, chosen in (PROPOSERS | own).items()
        }
        self.text = [token for prompt in demo().texts for token in self.base.text.encode(prompt)]
        self.chance = random.Random(seed)
        self.alive: WeakSet[Sequence] = WeakSet()
        self.counts: Counter[str] = Counter()
        self.drafted: dict[str, Counter[str]] = {name: Counter() for name in self.pipelines}
        self.resident: list[int] = []  # bytes, behind each group
        self.faults: list[str] = []

    def run(self, requests: int) -> None:
        started = time.monotonic()
        while self.counts["requests"] < requests:
            name = self.chance.choice(list(self.pipelines))
            settings = self.settings()
            about = f"group {len(self.resident)}: {name}, {settings}"
            try:
                self.group(name, GenerationSettings(**settings), about)
            except Exception as error:
                raise RuntimeError(about) from error
            gc.collect()
            if self.alive:
                self.faults.append(f"{len(self.alive)} requests outlive {about}")
                self.alive.clear()
            self.resident.append(resident())
            done = self.counts["requests"]
            print(f"{done} requests, {self.resident[-1] / 1e6:.0f} MB", end="\r", file=sys.stderr, flush=True)
        self.seconds = time.monotonic() - started

    def group(self, name: str, settings: GenerationSettings, about: str) -> None:
        """Decode some requests together, and the greedy ones once more, alone and without drafts."""
        chance = self.chance
        pipeline = self.pipelines[name].variant(
            sampler=build(option("sampler", chance.choice(SAMPLERS)), "sampler"),
            settings=settings,
            num_speculative_tokens=chance.randint(1, 8),
            draft_length=Adaptive() if chance.random() < 0.3 else Fixed(),
        )
        sequences = pipeline.sequences([self.prompt() for _ in range(chance.randint(1, 12))])
        self.alive.update(sequences)
        steps = pipeline.decode_together(sequences, chance.randint(1, 8))
        if chance.random() < LEFT:
            steps = (each for _, each in zip(range(chance.randint(1, 30)), steps, strict=False))
        for _, step in steps:
            self.drafted[name].update(drafted=step.drafted, accepted=step.accepted)
        self.counts.update(requests=len(sequences), tokens=sum(len(each.new_tokens) for each in sequences))
        for each in sequences:
            if settings.temperature == 0 and each.finish_reason:
                self.compare(each, about)

    def compare(self, sequence: Sequence, about: str) -> None:
        plain = self.base.variant(
            sampler=Rejection(), settings=sequence.settings, num_speculative_tokens=0, draft_length=Fixed()
        )
        twin = plain.sequences([sequence.tokens[: sequence.prompt_length]])[0]
        for _ in plain.decode(twin):
            pass
        self.counts["compared"] += 1
        if (twin.tokens, twin.finish_reason) != (sequence.tokens, sequence.finish_reason):
            pairs = zip(twin.new_tokens, sequence.new_tokens, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), "its end")
            self.faults.append(f"a greedy text is not plain decoding's from token {place} on, {about}")

    def prompt(self) -> list[int]:
        """A piece of the demo prompts, short ones as often as long ones."""
        length = self.chance.choice((1, self.chance.randint(2, 20), self.chance.randint(20, LONGEST)))
        start = self.chance.randrange(len(self.text) - length)
        return self.text[start : start + length]

    def settings(self) -> dict[str, Any]:
        """Half of them greedy; up to four more, of which some do nothing at temperature 0."""
        chance, size = self.chance, self.base.verifier.target.vocabulary
        longest = chance.choice((1, chance.randint(2, 20), chance.randint(20, LONGEST)))
        some = {
            "top_k": chance.randint(1, 50),
            "top_p": chance.uniform(0.3, 1),
            "min_p": chance.uniform(0, 0.2),
            "typical_p": chance.uniform(0.3, 1),
            "repetition_penalty": chance.uniform(0.8, 1.5),
            "presence_penalty": chance.uniform(-1, 1),
            "frequency_penalty": chance.uniform(-1, 1),
            "logit_bias": {chance.randrange(size): chance.uniform(-5, 5)},
            "banned_token_ids": [chance.randrange(size) for _ in range(3)],
            "min_new_tokens": chance.randint(0, longest),
            "stop_token_ids": [chance.randrange(size) for _ in range(3)],
            "stop": [chance.choice("etaoinshr "), "ab"],
            "ignore_eos": True,
            "logprobs": chance.randint(0, 3),
        }
        chosen = chance.sample(sorted(some), chance.randint(0, 4))
        temperature = chance.choice((0.0, 0.0, 0.0, 0.6, 1.0, 1.4))
        return {"temperature": temperature, "max_new_tokens": longest, **{key: some[key] for key in chosen}}

    def report(self) -> int:
        counts, fifth = self.counts, len(self.resident) // 5
        early, late = median(self.resident[fifth : 2 * fifth + 1]), median(self.resident[-fifth - 1 :])
        if late - early > GROWTH:
            self.faults.append(f"the process has grown by {(late - early) / 1e6:.0f} MB, more than {GROWTH / 1e6:.0f}")
        rate = counts["tokens"] / self.seconds
        print(f"{counts['requests']} requests, {counts['tokens']} tokens in {self.seconds:.0f} s ({rate:.0f} tokens/s)")
        for name, drafts in self.drafted.items():
            accepted = ratio(drafts["accepted"], drafts["drafted"])
            share = "" if accepted is None else f", {accepted:.0%} accepted"
            print(f"  {name:<22}{drafts['drafted']:>8} drafted{share}")
        print(f"{counts['compared']} greedy texts compared with plain decoding")
        peak = (peak_memory()["process"] or 0) / 1e6
        print(f"memory: {early / 1e6:.0f} MB in the second fifth, {late / 1e6:.0f} MB in the last, peak {peak:.0f} MB")
        print(*(f"FAULT: {fault}" for fault in self.faults), "sound" if not self.faults else "not sound", sep="\n")
        return int(bool(self.faults))


def drafts_for_tiny(target: Target, folder: Path) -> dict[str, list[str]]:
    """Words for drafts that go with it: the same model and another one of its kind, and counts of the demo prompts."""
    table = folder / "table.safetensors"
    for seed, name in enumerate(("same", "other")):
        draft = tiny(seed=seed, device="cpu")
        with quiet_transformers():
            draft.model.save_pretrained(folder / name)
            draft.tokenizer.save_pretrained(folder / name)
    texts = [target.tokenizer(text)["input_ids"] for text in demo().texts]
    counts = fit(texts, order=2, size=target.vocabulary)
    save(counts, Origin(target.name, vocabulary_hash(target.tokenizer), "the demo prompts"), table)
    return {
        "draft, the same model": ["proposer=draft", f"proposer.model={folder / 'same'}", "proposer.dtype=float32"],
        "draft, another model": ["proposer=draft", f"proposer.model={folder / 'other'}", "proposer.dtype=float32"],
        "table": ["proposer=table", f"proposer.path={table}"],
    }


def resident() -> int:
    """Bytes of this process in main memory now; where that cannot be told, the most it has had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory()["process"] or 0


if __name__ == "__main__":
    raise SystemExit(main())
