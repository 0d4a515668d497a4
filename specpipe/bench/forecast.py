"""What each cell should take, from what was measured elsewhere: costs on other prompts, one pass over plain texts.

`overhear` decodes plainly and asks each proposer at every place what it would draft there. That fixes, for every gamma
and rule, where steps begin (theory.md section 11); what a step costs is measured on the other half of the prompts. So
nothing is predicted from its own measurement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpipe.bench.figures import Cost, cost, costs_by_drafted, steps_of
from specpipe.bench.record import Decoded
from specpipe.chance import Chance
from specpipe.distribution import Rows
from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.proposers import Proposer
from specpipe.sequence import Sequence as Request
from specpipe.turns import Requests
from specpipe.walk import greedy_visits, sampled_visits

HALVES = 2  # prompts are dealt out in turn; each part is predicted with the costs of the others


@dataclass
class Guesses:
    """What a proposer would draft at each place of a text that the target wrote by itself.

    drafted: tokens that a step from there would draft, of at most the longest gamma. kept: of a deterministic draft,
    how many are the text's next tokens. p, q: of a drawn one, the probability of the text's token under both laws; the
    walk by them is right where a law depends on the text before its place alone (`Proposer`).
    """

    conversation: int
    drafted: list[int]
    kept: list[int]
    p: list[float]
    q: list[float]

    @property
    def drawn(self) -> bool:
        return bool(self.q)


class Overhearing:
    """Proposer and sampler of plain decoding, which notes beside it what others would have drafted.

    Args:
        proposers: by name, bound to the target; each is asked for every request at every place.
        gamma: how many tokens at most.
    """

    lossless = True

    def __init__(self, proposers: Mapping[str, Proposer], gamma: int) -> None:
        self._proposers, self._gamma = proposers, gamma
        self._depths: dict[str, int] = {}  # of proposers with a law: one token is enough
        self._drafts: dict[int, dict[str, tuple[list[int], Tensor | None]]] = {}  # by the chance of a request
        self.heard: dict[str, dict[int, list[tuple[list[int], float | None, float]]]] = {
            name: defaultdict(list) for name in proposers
        }

    def propose(self, sequences: list[Request], lengths: list[int]) -> Draft:
        """Nothing; but it asks the others first."""
        for name, proposer in self._proposers.items():
            depth = self._depths.get(name, self._gamma)
            draft = proposer.propose(sequences, [sequence.room(depth) for sequence in sequences])
            for b, sequence in enumerate(sequences):
                x, q = draft.row(b)
                if q is not None and x:
                    self._depths[name] = 1
                self._drafts.setdefault(id(sequence.chance), {})[name] = (x, q)
        return Draft.of([[] for _ in sequences])

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        """The target's own token; what was drafted for its place is noted."""
        y = chance.draw(p[0])
        for name, (drafted, law) in self._drafts.pop(id(chance), {}).items():
            q_y = None if law is None or not drafted else law[0, y].item()
            self.heard[name][id(chance)].append((drafted, q_y, p[0][y].item()))
        return 0, y


def overhear(
    base: Pipeline,
    proposers: Mapping[str, Proposer],
    gamma: int,
    prompts: Prompts,
    batch_size: int,
    told: Callable[[], None],
) -> dict[str, list[Guesses]]:
    """Decode the prompts plainly; what each proposer would have drafted at every place of every answer.

    Args:
        base: the pipeline of plain decoding, with its settings.
        proposers: by name; those that remember requests must be new.
        gamma: longest draft.
        prompts: to decode.
        batch_size: requests of a pass.
        told: called behind each answer.
    """
    ears = Overhearing(proposers, gamma)
    pipeline = base.drafting_with(ears).variant(
        sampler=ears, settings=base.settings, num_speculative_tokens=gamma, draft_length=base.draft_length
    )
    requests = Requests(pipeline, prompts)
    for sequence, _ in pipeline.decode_together(requests.firsts, batch_size, requests.follow):
        if sequence.finish_reason is not None:
            told()
    found: dict[str, list[Guesses]] = {name: [] for name in proposers}
    for request in requests.made():
        for name in proposers:
            heard = ears.heard[name].get(id(request.sequence.chance), [])
            found[name].append(_guesses(request.conversation, request.sequence.new_tokens, heard))
    return found


def _guesses(conversation: int, text: list[int], heard: Sequence[tuple[list[int], float | None, float]]) -> Guesses:
    drawn = any(q is not None for _, q, _ in heard)
    return Guesses(
        conversation,
        drafted=[len(drafted) for drafted, _, _ in heard],
        kept=[_kept(drafted, text[t:]) for t, (drafted, _, _) in enumerate(heard)],
        p=[p for _, _, p in heard] if drawn else [],
        q=[q or 0.0 for _, q, _ in heard] if drawn else [],
    )


def _kept(drafted: list[int], text: list[int]) -> int:
    """How many of the drafted tokens, from the first on, are the text's."""
    same = [x == y for x, y in zip(drafted, text, strict=False)]
    return same.index(False) if False in same else len(same)


def predicted(
    guesses: Iterable[Guesses], gamma: int, rule: str, requests: Sequence[Decoded], plain: Sequence[Decoded]
) -> float | None:
    """Speedup of a cell, each half of its prompts with what steps cost in the other half.

    Args:
        guesses: of the cell's proposer for all texts.
        gamma: longest draft of the cell.
        rule: its sampler, by name.
        requests, plain: what was decoded in the cell and plainly; only their times are used.

    Returns:
        None where a half has no steps to learn from.
    """
    tokens = seconds = base = 0.0
    for half in range(HALVES):
        costs = costs_by_drafted(steps_of(each for each in requests if each.conversation % HALVES != half))
        token = cost(steps_of(each for each in plain if each.conversation % HALVES != half))
        texts = [each for each in guesses if each.conversation % HALVES == half]
        if not texts:
            continue
        if not costs or token is None:
            return None
        for text in texts:
            emitted, spent = _walked(text, gamma, rule, costs)
            tokens, seconds, base = tokens + emitted, seconds + spent, base + emitted * token.total
    return base / seconds if tokens and seconds else None


def _walked(text: Guesses, gamma: int, rule: str, costs: Mapping[int, Cost]) -> tuple[float, float]:
    """Tokens and seconds behind the prompt pass."""
    places = len(text.drafted)
    left = np.arange(places)[::-1]
    if text.drawn:
        q, p = torch.tensor(text.q), torch.tensor(text.p)
        visits, first = sampled_visits(q if rule == "exact_match" else q / p, gamma, rule)
        drafted = np.minimum(np.where(np.array(text.drafted) > 0, gamma, 0), left)
    else:
        drafted = np.minimum(np.minimum(text.drafted, gamma), left)
        match = torch.arange(gamma) < torch.tensor(text.kept)[:, None]
        visits = greedy_visits(match, gamma)
        first = float(min(text.kept[0], gamma, places - 1) + 1) if places else 0.0
    known = sorted(costs)
    each = np.interp(drafted, known, [costs[k].total for k in known])
    return places - first, float((visits * each)[1:].sum())


def expected_error(pairs: Iterable[tuple[float | None, float | None]]) -> tuple[float | None, int]:
    """Mean of |predicted / measured - 1| over the pairs that have both, and how many those are."""
    known = [(p, m) for p, m in pairs if p is not None and m]
    return (sum(abs(p / m - 1) for p, m in known) / len(known) if known else None), len(known)
