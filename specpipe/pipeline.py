"""The decoding loop. Proposer, verifier and sampler meet here and nowhere else."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

from torch import Tensor

from specpipe.acceptance import Verdict, decides_on_device, draft_logprobs, emitted_logprobs, judge_on_device, judge_row
from specpipe.chance import Chance
from specpipe.clock import StepClock
from specpipe.draft import Draft, asked_of
from specpipe.draft_length import DraftLength, Fixed
from specpipe.errors import ContractError, UserError, having, integer, ran_out_of_memory
from specpipe.proposers import Proposer
from specpipe.samplers import Sampler
from specpipe.sequence import Sequence, Step
from specpipe.settings import LONGEST_DRAFT, GenerationSettings
from specpipe.stats import Completion, completion
from specpipe.text import Piece, StopWatch, TextCodec


class Pipeline:
    """Decodes prompts: proposer x verifier x sampler.

    Args:
        verifier: the target behind one call (`score`, `roll_back`, `forget`, `target`, `device`); `expect`, if there is
            one, is told gamma.
        proposer: who guesses.
        sampler: who accepts.
        settings: how tokens are drawn and when a request ends.
        num_speculative_tokens: gamma, the longest draft of a step, LONGEST_DRAFT at most; 0 is plain decoding.
        draft_length: how many of them each step asks for; all, if None.
        seed: of the run; a request's randomness depends on it and on the request alone.
        chat: apply the tokenizer's chat template; None applies it if there is one.
        score_drafts: note each draft and its probability under target and proposer, `Step.draft_token_ids`, `log_p` and
            `log_q`; the laws behind a rejection are then made too, which takes time.
    """

    def __init__(
        self,
        *,
        verifier: Any,
        proposer: Proposer,
        sampler: Sampler,
        settings: GenerationSettings,
        num_speculative_tokens: int = 5,
        draft_length: DraftLength | None = None,
        seed: int = 0,
        chat: bool | None = None,
        score_drafts: bool = False,
    ) -> None:
        for key, part, method in (("proposer", proposer, "propose"), ("draft_length", draft_length, "choose")):
            if part is not None:
                having(key, part, method)
        self.verifier = verifier
        self.proposer = proposer
        self.sampler = sampler
        self.settings = settings
        self.gamma = integer("num_speculative_tokens", num_speculative_tokens, 0, LONGEST_DRAFT)
        self.draft_length = draft_length or Fixed()
        self.seed = integer("seed", seed, 0)
        self.score_drafts = score_drafts
        if hasattr(verifier, "expect"):
            verifier.expect(self.gamma)
        _refuse_foreign_ids(settings, verifier.target)
        bind(proposer, verifier.target)
        if hasattr(proposer, "attach"):
            proposer.attach(verifier)
        self.text = TextCodec(verifier.target.tokenizer, chat)

    def drafting_with(self, proposer: Proposer) -> Pipeline:
        """A pipeline with the same target and settings, and another proposer.

        Raises:
            UserError: for a proposer that does not go with the target.
        """
        return Pipeline(
            verifier=self.verifier,
            proposer=proposer,
            sampler=self.sampler,
            settings=self.settings,
            num_speculative_tokens=self.gamma,
            draft_length=self.draft_length,
            seed=self.seed,
            chat=self.text.chat,
            score_drafts=self.score_drafts,
        )

    def variant(
        self, *, sampler: Sampler, settings: GenerationSettings, num_speculative_tokens: int, draft_length: DraftLength
    ) -> Pipeline:
        """A pipeline with the same target and proposer, which is not bound anew, under other conditions."""
        other = copy.copy(self)
        _refuse_foreign_ids(settings, self.verifier.target)
        other.sampler, other.settings, other.draft_length = sampler, settings, draft_length
        other.gamma = integer("num_speculative_tokens", num_speculative_tokens, 0, LONGEST_DRAFT)
        return other

    def step(self, sequences: list[Sequence]) -> list[Step]:
        """One round for B requests: propose, verify, accept, commit, roll back. One pass of the target."""
        clock = StepClock(self.verifier.device)
        first = not sequences[0].steps  # this pass also reads the prompt
        with clock.part("draft"):
            k = self._lengths(sequences)
            draft = self._proposed(sequences, k)  # x [B, K] ~ q [B, K, V]
        with clock.part("prefill" if first else "verify"):
            logits = self.verifier.score(sequences, draft)  # B x [k + 1, V]
        with clock.part("accept"):
            verdicts = self._accept(sequences, draft, logits)  # B x (x_1 .. x_n, y; beta_1 .. beta_n+1)
        steps = [
            sequence.commit(block, drafted, betas, prefill=first)
            for sequence, drafted, (block, betas) in zip(sequences, draft.lengths, verdicts, strict=True)
        ]
        self.verifier.roll_back(sequences)
        self._report(sequences, steps, draft, logits)
        seconds = clock.stop()
        for b, step in enumerate(steps):
            step.asked, step.has_q, step.seconds, step.rows = k[b], draft.law(b) is not None, seconds, len(sequences)
            step.source = draft.sources[b] if draft.sources else None
        return steps

    def decode(self, sequence: Sequence) -> Iterator[Step]:
        """Steps of one request until it is finished."""
        while sequence.finish_reason is None:
            yield self.step([sequence])[0]

    def decode_together(
        self, sequences: Items[Sequence], batch_size: int, follow: Callable[[Sequence], Sequence | None] | None = None
    ) -> Iterator[tuple[Sequence, Step]]:
        """Steps of all requests, at most `batch_size` of them in a pass; the place of a finished one is taken at once.

        Newcomers have their prompts read in a pass of their own, beside which the others' one-token passes would wait.
        `follow` makes the request that comes behind a finished one, such as a conversation's next turn, and has first
        claim to its place; None for nothing. Where there is no memory for so many, half of them go on and the others as
        soon as there is room, which is said once; their texts are what they would have been.
        """
        waiting = deque(_unfinished(sequences, follow))
        running: list[Sequence] = []
        size = batch_size
        while waiting or running:
            new = [waiting.popleft() for _ in range(min(len(waiting), size - len(running)))]
            together, begun = new or running, [*running, *new]
            steps = self.step(together) if len(begun) == 1 else self._attempt(together)
            if steps is None:
                if size == batch_size:
                    what = f"there is no memory for {len(begun)} requests at a time"
                    warnings.warn(f"{what}; decoding goes on with {len(begun) // 2} at most", stacklevel=2)
                size = len(begun) // 2
                waiting.extendleft(reversed([*running[size:], *new]))
                running = running[:size]
                continue
            yield from zip(together, steps, strict=True)
            ended = [sequence for sequence in together if sequence.finish_reason is not None]
            running = [sequence for sequence in begun if sequence.finish_reason is None]
            waiting.extendleft(reversed(list(_unfinished(ended, follow))))

    def _attempt(self, sequences: list[Sequence]) -> list[Step] | None:
        """Their step, or None, with everything as it was before, if there is no memory for it."""
        done = [len(sequence.steps) for sequence in sequences]
        for sequence in sequences:
            sequence.chance.mark()
        try:
            return self.step(sequences)
        except Exception as error:
            if not ran_out_of_memory(error) or [len(sequence.steps) for sequence in sequences] != done:
                raise
        for sequence in sequences:
            sequence.chance.rewind()
        self.verifier.forget()
        if hasattr(self.proposer, "forget"):
            self.proposer.forget()
        return None

    def sequences(
        self, prompts: Items[str | Items[int]], seen: Counter[tuple[int, ...]] | None = None
    ) -> list[Sequence]:
        """Requests for texts or token ids, checked against the target's limits before anything is decoded.

        `seen` counts equal prompts, which have streams of their own; pass one where requests are made in several calls.
        """
        seen = Counter() if seen is None else seen
        made = []
        for number, prompt in enumerate(prompts):
            try:
                ids = self._ids(prompt)
                made.append(self._sequence(ids, seen[tuple(ids)], self.verifier.target.context))
            except UserError as error:
                where = f"number {number + 1}: " if len(prompts) > 1 else ""
                raise UserError(f"{where}{error.message}", key=error.key) from error
            seen[tuple(ids)] += 1
        return made

    def next_turn(self, said: Items[str], before: Sequence) -> tuple[Sequence, bool]:
        """The request for a conversation's next turn, and whether its prompt holds the last answer's ids as they are.

        One that no longer fits the target's context is finished at once, for the reason `context`. Conversations that
        began alike keep streams of their own. See `TextCodec.encode_next`.
        """
        encoded, as_it_is = self.text.encode_next(said, before)
        ids, context = self._ids(encoded), self.verifier.target.context
        return self._sequence(ids, before.chance.repeat, None if context is None else max(context, len(ids))), as_it_is

    def _sequence(self, ids: list[int], repeat: int, context: int | None) -> Sequence:
        return Sequence(
            ids,
            self.settings,
            stop_ids=self.settings.stop_ids(self.verifier.target.eos_ids),
            stop_text=StopWatch(self.text, self.settings.stop) if self.settings.stop else None,
            context=context,
            chance=Chance(self.seed, ids, repeat=repeat),
        )

    def _ids(self, prompt: str | Items[int]) -> list[int]:
        ids = self.text.encode(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(ids, Items) or not all(isinstance(token, int) for token in ids):
            raise UserError(f"{prompt!r} is neither a text nor a list of token ids.", key="prompt")
        size = self.verifier.target.vocabulary
        if beyond := [token for token in ids if not 0 <= token < size]:
            raise UserError(f"holds the id {beyond[0]}, but the target's ids end at {size - 1}.", key="prompt")
        return list(ids)

    def generate(self, prompts: str | Items[str | Items[int]]) -> list[Completion]:
        """Decode each prompt to its end.

        Args:
            prompts: one text, or several texts or lists of token ids (taken as they are, without chat template).

        Raises:
            UserError: for an empty prompt or one that does not fit the target's context.
        """
        if not isinstance(prompts, (str, Items)):
            raise UserError(
                f"{prompts!r} is neither a text nor a list of texts or of lists of token ids.", key="prompt"
            )
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        done = []
        for prompt, sequence in zip(asked, self.sequences(asked), strict=True):
            for _ in self.decode(sequence):
                pass
            done.append(completion(prompt, sequence, self.text.answer(sequence), self.gamma))
        return done

    def stream(self, prompt: str | Items[int]) -> Iterator[Piece]:
        """Text as it is emitted, each piece with the kind of token that completed it; never half a character."""
        sequence = self.sequences([prompt])[0]
        yield from self.text.stream(sequence, self.decode(sequence))

    def _report(self, sequences: list[Sequence], steps: list[Step], draft: Draft, logits: list[Tensor]) -> None:
        """Log-probabilities where they were asked for, each from its own row."""
        for b, (sequence, step, rows) in enumerate(zip(sequences, steps, logits, strict=True)):
            if self.settings.logprobs is not None:
                step.logprobs = emitted_logprobs(sequence, step, rows)
            if self.score_drafts:
                step.draft_token_ids, _ = draft.row(b)
                step.log_p, step.log_q = draft_logprobs(sequence, step, draft, b, rows)

    def _lengths(self, sequences: list[Sequence]) -> list[int]:
        """At most how many tokens to draft for each request: what the policy wants and the request has room for."""
        wanted = self.draft_length.choose(sequences, self.gamma)
        fits = isinstance(wanted, Items) and len(wanted) == len(sequences)
        if not fits or not all(isinstance(length, int) and 0 <= length <= self.gamma for length in wanted):
            what = f"chose {wanted!r} for {len(sequences)} requests and at most {self.gamma} tokens"
            raise ContractError(f"{type(self.draft_length).__name__} {what}")
        return [sequence.room(length) for sequence, length in zip(sequences, wanted, strict=True)]

    def _proposed(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        """The proposer's draft, if it keeps its contract as far as that can be seen."""
        before = [len(sequence.tokens) for sequence in sequences]
        propose = partial(self.proposer.propose, sequences, lengths)
        draft = asked_of(self._proposer_name, propose, lengths, self.verifier.target.vocabulary)
        if [len(sequence.tokens) for sequence in sequences] != before:
            raise ContractError(f"{self._proposer_name} changed the tokens of a request, which are read-only")
        return draft

    def _accept(self, sequences: list[Sequence], draft: Draft, logits: list[Tensor]) -> list[Verdict]:
        try:
            if self.verifier.device.type != "cpu" and decides_on_device(self.sampler):
                return judge_on_device(self.sampler, sequences, draft, logits)
            return [judge_row(self.sampler, s, draft, b, logits[b]) for b, s in enumerate(sequences)]
        except ContractError as error:
            raise ContractError(f"{self._proposer_name}: {error}") from None

    @property
    def _proposer_name(self) -> str:
        return type(inspect.unwrap(self.proposer)).__name__  # type: ignore[arg-type]


def _unfinished(
    sequences: Iterable[Sequence], follow: Callable[[Sequence], Sequence | None] | None
) -> Iterator[Sequence]:
    """What there is to decode: of each request itself, or if it is finished the first behind it that is not."""
    for each in sequences:
        current: Sequence | None = each
        while current is not None and current.finish_reason is not None:
            current = follow(current) if follow else None
        if current is not None:
            yield current


def bind(proposer: Any, target: Any) -> None:
    """Hand the target to a proposer that wants it."""
    if hasattr(proposer, "bind"):
        try:
            proposer.bind(target)
        except UserError as error:
            raise error.under("proposer") from error


def _refuse_foreign_ids(settings: GenerationSettings, target: Any) -> None:
    try:
        settings.refuse_ids_from(target.vocabulary)
    except UserError as error:
        raise error.under("generation") from None
