"""The requests of a run: one for each turn of each prompt, a later turn's when the one before it is answered.

Knows prompts and the pipeline; knows nothing of commands, screens or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.sequence import Sequence

AS_IDS, AS_TEXT = "ids", "text"


@dataclass(eq=False)
class Request:
    """One turn of one prompt.

    `number` counts all turns of all prompts in their order, `conversation` is the number of the prompt, `turn` counts
    within it, all from 0. `said` holds the texts of user and model in turn up to `text`, what the user says now.
    `history` says how the answers so far stand in the prompt: as the `ids` that were committed, or, where the last one
    could not stay as it was (`TextCodec.encode_next`), encoded anew from `text`; None for a first turn.
    """

    number: int
    conversation: int
    turn: int
    said: list[str]
    sequence: Sequence
    category: str | None = None
    history: str | None = None

    @property
    def text(self) -> str:
        return self.said[-1]

    @property
    def does_not_fit(self) -> bool:
        """Whether the conversation has outgrown the target's context, so that this turn has no answer."""
        return self.turn > 0 and self._no_room

    @property
    def fills_context(self) -> bool:
        """Whether the prompt, the first turn, is just as long as the target's context, so that it has no answer."""
        return self.turn == 0 and self._no_room

    @property
    def _no_room(self) -> bool:
        return self.sequence.finish_reason == "context" and not self.sequence.steps


class Requests:
    """All requests for some prompts. Iterating gives them one by one; each must be decoded before the next is taken.

    For several at a time hand `firsts` and `follow` to `Pipeline.decode_together`. `len` counts all turns there are.

    Args:
        pipeline: that decodes them.
        prompts: with all turns, or first turns only.

    Raises:
        UserError: for a first turn that is empty or does not fit the target's context.
    """

    def __init__(self, pipeline: Pipeline, prompts: Prompts) -> None:
        self._pipeline = pipeline
        self._later = prompts.later or [[] for _ in prompts.texts]
        self._with_turns = prompts.later is not None
        self.categories = prompts.categories
        *starts, self._total = accumulate((1 + len(later) for later in self._later), initial=0)
        self.firsts = pipeline.sequences(prompts.texts)
        self._made: dict[int, Request] = {}  # by number
        self._of: dict[Sequence, Request] = {}
        self._passed = 0  # number of the first that `finished` has not given yet
        for conversation, (text, sequence) in enumerate(zip(prompts.texts, self.firsts, strict=True)):
            category = self.categories[conversation] if self.categories else None
            self._add(Request(starts[conversation], conversation, 0, [text], sequence, category))

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[Request]:
        for sequence in self.firsts:
            following: Sequence | None = sequence
            while following is not None:
                yield self.of(following)
                following = self.follow(following)

    def of(self, sequence: Sequence) -> Request:
        """The request that a sequence is decoded for."""
        return self._of[sequence]

    def follow(self, sequence: Sequence) -> Sequence | None:
        """What comes behind a finished request: its conversation's next turn, None behind the last."""
        before = self.of(sequence)
        later = self._later[before.conversation]
        if before.turn == len(later):
            return None
        said = [*before.said, self._pipeline.text.answer(sequence), later[before.turn]]
        following, as_it_is = self._pipeline.next_turn(said, sequence)
        history = AS_IDS if as_it_is and before.history != AS_TEXT else AS_TEXT
        number, turn = before.number + 1, before.turn + 1
        self._add(Request(number, before.conversation, turn, said, following, before.category, history))
        return following

    def made(self) -> list[Request]:
        """Those there are so far, in order."""
        return [self._made[number] for number in sorted(self._made)]

    def finished(self) -> Iterator[Request]:
        """In order, those that are finished and were not given before, up to the first that is not finished."""
        while (request := self._made.get(self._passed)) and request.sequence.finish_reason:
            self._passed += 1
            yield request

    def labels(self, request: Request) -> dict[str, object]:
        """What result.json says of a request beside its completion: category and place, where there are such."""
        labels: dict[str, object] = {"category": request.category} if self.categories else {}
        if self._with_turns:
            labels |= {name: getattr(request, name) for name in ("number", "conversation", "turn", "history")}
        return labels

    def _add(self, request: Request) -> None:
        self._made[request.number] = self._of[request.sequence] = request
