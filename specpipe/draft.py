"""What passes from a proposer to the verifier and the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from specpipe.errors import ContractError, ProposerFailed, UserError, one_line, ran_out_of_memory

SLACK = 1e-3  # by which rounding may keep a law from summing to one


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of B requests, K being the longest proposal.

    Args:
        tokens: [B, K] int64; a row's entries beyond its length mean nothing.
        lengths: B lengths; 0 means a plain step.
        probs: [B, K, V] the law each token was drawn from, after the request's settings, or None if the proposal was
            deterministic (q is one-hot at the token). That each token was drawn from exactly its row is a contract:
            the output law is only right if it holds.
        sources: for proposers made of several, who drafted each row; counted separately.
        drawn: where only some rows have a q, whether each has; the others are deterministic as if `probs` were None.
    """

    tokens: Tensor
    lengths: list[int]
    probs: Tensor | None = None
    sources: Sequence[str | None] | None = None
    drawn: Sequence[bool] | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """A deterministic draft from Python lists, one per request."""
        longest = max((len(row) for row in rows), default=0)
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        return cls(torch.tensor(padded, dtype=torch.long, device=device), [len(row) for row in rows])

    @classmethod
    def joined(
        cls,
        rows: Sequence[tuple[Sequence[int], Tensor | None]],
        vocabulary: int,
        sources: Sequence[str | None] | None = None,
    ) -> Draft:
        """One draft from rows as `row` gives them, (tokens, q [k, V] or None), over `vocabulary` ids."""
        plain = cls.of([x for x, _ in rows])
        some = next((q for _, q in rows if q is not None), None)
        if some is None:
            return cls(plain.tokens, plain.lengths, None, sources)
        if len(rows) == 1:
            return cls(plain.tokens, plain.lengths, some[None], sources)
        probs = some.new_zeros(*plain.tokens.shape, vocabulary)
        for b, (x, q) in enumerate(rows):
            if q is not None:
                probs[b, : len(x)] = q
        return cls(plain.tokens, plain.lengths, probs, sources, [q is not None for _, q in rows])

    def row(self, b: int) -> tuple[list[int], Tensor | None]:
        """Row b as (tokens, q): a list of k tokens, and q [k, V] or None."""
        k = self.lengths[b]
        return self.tokens[b, :k].tolist(), self.law(b)

    def law(self, b: int) -> Tensor | None:
        """q of row b, [k, V]; None if it is deterministic."""
        if self.probs is None or (self.drawn is not None and not self.drawn[b]):
            return None
        return self.probs[b, : self.lengths[b]]


def asked_of(who: str, propose: Callable[[], object], asked: Sequence[int], vocabulary: int) -> Draft:
    """What a proposer answers when it is asked for drafts, if it keeps its contract as far as that can be seen.

    Args:
        who: its name, for messages.
        propose: asks it.
        asked: the longest draft allowed, for each request.
        vocabulary: ids of the target.

    Raises:
        ContractError: for an answer that is not what it must be.
        ProposerFailed: for an error of its own; what the user can mend, and a lack of memory, pass as they are.
    """
    try:
        draft = propose()
    except (UserError, ContractError, ProposerFailed):
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        what = f"raised {type(error).__name__} ({one_line(error)}) where it had to return a Draft"
        raise ProposerFailed(f"{who} {what}; an empty one is always allowed") from error
    if fault := fault_of(draft, asked, vocabulary):
        raise ContractError(f"{who} {fault}")
    assert isinstance(draft, Draft)  # without a fault it is
    return draft


def fault_of(draft: object, asked: Sequence[int], vocabulary: int) -> str | None:
    """What is wrong with a proposer's answer to `asked` lengths, for a target of so many ids; None if nothing is.

    Values are looked at on the host only: on a device it would have to be waited for.
    """
    if not isinstance(draft, Draft):
        return f"returned a {type(draft).__name__}, not a Draft"
    if fault := _form_fault(draft):
        return fault
    rows, longest = len(asked), max(draft.lengths, default=0)
    if len(draft.lengths) != rows or any(k > limit for k, limit in zip(draft.lengths, asked, strict=False)):
        return f"returned drafts of {draft.lengths} tokens where at most {list(asked)} were asked"
    if draft.tokens.shape[0] != rows or draft.tokens.shape[1] < longest:
        return f"returned tokens of shape {list(draft.tokens.shape)} for drafts of {draft.lengths}"
    if draft.probs is not None:
        shape = draft.probs.shape
        if shape[:1] != (rows,) or shape[1] < longest or shape[2:] != (vocabulary,):
            return f"returned q of shape {list(shape)}, not [{rows}, {longest}, {vocabulary}]"
        if not draft.probs.is_floating_point():
            return f"returned q of type {draft.probs.dtype}, not floating point"
    if draft.tokens.device.type != "cpu":
        return None
    return next((fault for b in range(rows) if (fault := _row_fault(draft, b, vocabulary))), None)


def _form_fault(draft: Draft) -> str | None:
    """What keeps the parts of a draft from being compared with each other and with what was asked."""
    for name, part in (("tokens", draft.tokens), ("q", draft.probs)):
        if part is not None and not isinstance(part, Tensor):
            return f"returned {name} as a {type(part).__name__}, not a tensor"
    if draft.tokens.dim() != 2 or draft.tokens.is_floating_point() or draft.tokens.is_complex():
        return f"returned tokens of shape {list(draft.tokens.shape)} and type {draft.tokens.dtype}, not [B, K] of ids"
    if not isinstance(draft.lengths, Sequence) or not all(isinstance(k, Integral) and k >= 0 for k in draft.lengths):
        return f"returned lengths {draft.lengths!r}, not a list of whole numbers from 0 up"
    for name, labels in (("sources", draft.sources), ("drawn", draft.drawn)):
        if labels is not None and len(labels) != len(draft.lengths):
            return f"returned {len(labels)} {name} for {len(draft.lengths)} drafts"
    return None


def _row_fault(draft: Draft, b: int, vocabulary: int) -> str | None:
    x, q = draft.row(b)
    if any(not 0 <= token < vocabulary for token in x):
        return f"proposed {x}, but the target's ids end at {vocabulary - 1}"
    if q is None or q.device.type != "cpu" or not x:
        return None
    if not ((q.sum(-1) - 1).abs() < SLACK).all():
        return f"returned q that sums to {q.sum(-1).tolist()}, not to 1"
    return "returned q with a negative probability" if q.amin() < 0 else None
