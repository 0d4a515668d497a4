"""From a step's logits to its verdicts: the sampler applied to each row, on the host or with one read of the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specpipe.distribution import Prefix, Rows, best_token, log_probabilities
from specpipe.draft import Draft
from specpipe.errors import ContractError
from specpipe.samplers import Sampler
from specpipe.samplers.block import Block
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection, draft_probability
from specpipe.sequence import Sequence, Step, TokenLogprobs
from specpipe.settings import GenerationSettings

# The accepted drafts and the token behind them; beta = sum_x min(p, q) of each verified place.
Verdict = tuple[list[int], list[float]]
# Rules that keep the law, and so agree where it leaves no choice.
AGREEING = (Rejection.accept, Block.accept, ExactMatch.accept)


def judge_row(sampler: Sampler, sequence: Sequence, draft: Draft, b: int, logits: Tensor) -> Verdict:
    """Row b's verdict, target laws made one by one as the sampler asks for them. logits: [k + 1, V]."""
    x, q = draft.row(b)
    before = sequence.prefix
    p = Rows(logits, sequence.settings, before, x)
    try:
        if sequence.settings.temperature == 0 and getattr(type(sampler), "accept", None) in AGREEING:
            return _greedy(sequence.settings, before, x, q, logits)
        n, y = sampler.accept(x, p, q, sequence.chance)
    except FloatingPointError as error:
        raise _with_its_place(error, sequence, p, logits) from None
    betas = [(p[i][x[i]] if q is None else torch.minimum(p[i], q[i]).sum()).item() for i in range(min(n + 1, len(x)))]
    return [*x[:n], y], betas


def _greedy(settings: GenerationSettings, before: Prefix, x: list[int], q: Tensor | None, logits: Tensor) -> Verdict:
    """What the rules of AGREEING come to at temperature 0: drafts stand while each is the best token.

    Looking for it takes a fraction of the time of making laws with all mass in one place and drawing from them.
    """
    best: list[int] = []
    betas: list[float] = []
    for i, row in enumerate(logits):
        best.append(best_token(row, settings, before.then(x[:i])))
        if i == len(x):
            break
        if q is not None:
            draft_probability(q, i, x[i])
        betas.append(float(best[i] == x[i]) if q is None else q[i, best[i]].item())
        if best[i] != x[i]:
            break
    return best, betas


def decides_on_device(sampler: Sampler) -> bool:
    """Whether the sampler's rule for devices belongs to its `accept`: a subclass may have replaced only the latter."""
    order = type(sampler).__mro__
    where = {
        name: next((i for i, kind in enumerate(order) if name in vars(kind)), len(order))
        for name in ("accept", "accept_on_device")
    }
    return where["accept_on_device"] <= where["accept"] < len(order)


def judge_on_device(sampler: Any, sequences: list[Sequence], draft: Draft, logits: list[Tensor]) -> list[Verdict]:
    """Every row's verdict, the host reading a single [B, 2 + 2K] tensor: count, next token, drafts, betas."""
    table = logits[0].new_zeros(len(sequences), 2 + 2 * max([*draft.lengths, 0]), dtype=torch.float64)
    for b, sequence in enumerate(sequences):
        k = draft.lengths[b]
        x = draft.tokens[b, :k].to(table.device)
        p = _all_rows(logits[b], sequence, x)
        q = None if (law := draft.law(b)) is None else law.to(table.device)
        u, v = sequence.chance.uniforms(k)
        u_v = torch.tensor([*u, v], dtype=torch.float64, device=table.device)
        table[b, :2] = sampler.accept_on_device(x, p, q, u_v[:k], u_v[k])
        table[b, 2 : 2 + k] = x
        table[b, 2 + k : 2 + 2 * k] = p[range(k), x] if q is None else torch.minimum(p[:k], q).sum(-1)
    verdicts = []
    for (n, y, *rest), k, row, sequence in zip(table.tolist(), draft.lengths, logits, sequences, strict=True):
        if n < 0:
            raise ContractError("a token was proposed although its q is 0")
        if y >= row.shape[-1]:
            laws = Rows(row, sequence.settings, sequence.prefix, [int(token) for token in rest[:k]])
            raise _with_its_place(FloatingPointError("a law cannot be drawn from"), sequence, laws, row)
        verified = min(int(n) + 1, k)
        sequence.chance.spend(verified)
        verdicts.append(([int(token) for token in rest[: int(n)]] + [int(y)], rest[k : k + verified]))
    return verdicts


def _with_its_place(error: FloatingPointError, sequence: Sequence, p: Rows, logits: Tensor) -> FloatingPointError:
    """What to raise where no token could be drawn: the error with the place of the first law that is none, and why.

    p: the laws of `logits`, [k + 1, V]. If all are sound, the rule asked for a draw from something else.
    """
    i = next((i for i in range(len(p)) if not 0 < p[i].sum().item() < math.inf), None)
    if i is None:
        return error
    token, before = len(sequence.new_tokens) + i + 1, len(sequence.tokens) + i
    place = f"for token {token} of an answer, {before} tokens into the text"
    if logits[i].amax().isfinite():
        return FloatingPointError(f"the settings leave nothing to draw {place}")
    return FloatingPointError(f"the target's logits are not numbers (NaN or infinite) {place}")


def _all_rows(logits: Tensor, sequence: Sequence, x: Tensor) -> Tensor:
    """[k + 1, V]; only settings that look at the drafts need them on the host."""
    drafts = x.tolist() if sequence.settings.depends_on_prefix else ()
    return Rows(logits, sequence.settings, sequence.prefix, drafts).all()


def draft_logprobs(sequence: Sequence, step: Step, draft: Draft, b: int, logits: Tensor) -> tuple[list[float], ...]:
    """(log p, log q) of every draft of a committed step, also of those behind a rejection. logits: [k + 1, V]."""
    x, q = draft.row(b)
    p = Rows(logits, sequence.settings, _before(sequence, step), x)
    log_p = [p[i][token].log().item() for i, token in enumerate(x)]
    return log_p, [0.0 if q is None else q[i, token].log().item() for i, token in enumerate(x)]


def _before(sequence: Sequence, step: Step) -> Prefix:
    """What the settings saw in front of the step that was committed last."""
    return Prefix(sequence.prefix.prompt, sequence.new_tokens[: -len(step.tokens)], sequence.stop_ids)


def emitted_logprobs(sequence: Sequence, step: Step, logits: Tensor) -> list[TokenLogprobs]:
    """One entry per token of a committed step. logits: [k + 1, V] of the step."""
    settings = sequence.settings
    rows = logits[: len(step.tokens)]
    if settings.logprobs_mode == "raw":
        laws = rows.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(-1)
    else:
        laws = Rows(rows, settings, _before(sequence, step), step.tokens).all().log()
    reported = log_probabilities(laws, step.tokens, settings.logprobs or 0)
    return [TokenLogprobs(token, own, top) for token, (own, top) in zip(step.tokens, reported, strict=True)]
