"""Suffix decoding: continue as the texts seen so far mostly did behind the longest suffix they share with this one.

Two tries of counted windows (Oliaro et al., arXiv 2411.04975): one of the request's own prompt and output, one of the
outputs of all requests of the run. Both grow with each committed token; rejected drafts do not enter them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary, ref

from specpipe.draft import Draft
from specpipe.errors import integer, number
from specpipe.sequence import Sequence

LONGEST = 2**32  # tokens of a text, at most


class SuffixProposer:
    """Follows the most frequent continuation of the longest suffix that occurred before.

    The request's own text and the outputs of the run each give a draft; the one with the higher expected number of
    right tokens (the sum of its paths' probabilities, the paper's score) is proposed, the own one if they are equal.
    Prompts of other requests are not used: one long document would push all outputs out.

    With the global part a draft depends on the requests before and beside this one. The law of the text does not, and
    at temperature 0 neither does the text; but a sampled text is then fixed by its seed only for the same requests in
    the same order and batches. `max_cached_tokens=0` makes each request reproducible by itself. The law needs drafts
    that are independent of the request's own `Chance`: a prompt sampled again with the same stream (equal seed and
    repeat, as in two `generate` calls of one pipeline) is drafted from its own text alone, since the outputs hold what
    that stream has put out before.

    Memory, measured on CPython 3.11 at depth 24: 200 to 300 bytes per token of prose or code and at most 1.1 kB where
    everything occurs exactly twice, so 100,000 cached tokens take 30 MB, seldom 100 MB. Each running request has a trie
    of its own prompt and output of the same density, freed with the request.

    Args:
        max_depth: longest path in a trie, in tokens: a suffix of up to `max_depth - 1` and what followed it.
        max_spec_factor: a draft has at most this many times the tokens of the suffix it rests on.
        min_probability: a draft ends before the product of its tokens' relative frequencies falls below this.
        max_cached_tokens: outputs kept in the global part, in tokens; the oldest output goes first, from its
            beginning. 0: no global part.
    """

    def __init__(
        self,
        *,
        max_depth: int = 24,
        max_spec_factor: float = 4.0,
        min_probability: float = 0.1,
        max_cached_tokens: int = 100_000,
    ) -> None:
        self.max_depth = integer("max_depth", max_depth, 2)
        self.max_spec_factor = number("max_spec_factor", max_spec_factor, 0, above=True)
        self.min_probability = number("min_probability", min_probability, 0, 1)
        self._texts: WeakKeyDictionary[Sequence, OwnText] = WeakKeyDictionary()
        self._outputs = Outputs(self.max_depth, integer("max_cached_tokens", max_cached_tokens, 0))
        self._streams: dict[bytes, ref[Sequence]] = {}  # who drew from each stream of random numbers first

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        self._outputs.catch_up(sequences)
        return Draft.of([self._propose_one(sequence, k) for sequence, k in zip(sequences, lengths, strict=True)])

    def _is_first_of_its_stream(self, sequence: Sequence) -> bool:
        key = getattr(sequence.chance, "key", None)
        return key is None or self._streams.setdefault(key, ref(sequence))() is sequence

    def _propose_one(self, sequence: Sequence, k: int) -> list[int]:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = OwnText(self.max_depth)
        text.catch_up(sequence.tokens)
        context = sequence.tokens[1 - self.max_depth :]
        own = self._draft(text.trie, text.match(), context, k, sequence.stop_ids)
        if not self._is_first_of_its_stream(sequence):
            return own[0]
        shared = self._draft(self._outputs.trie, self._outputs.trie.longest(context), context, k, sequence.stop_ids)
        return max(own, shared, key=lambda scored: scored[1])[0]

    def _draft(
        self, trie: Trie, match: Place | None, context: list[int], k: int, stop_ids: Collection[int]
    ) -> tuple[list[int], float]:
        """Up to k tokens behind `match`, as far as length, probability and stops allow, and their score."""
        draft: list[int] = []
        score = 0.0
        if match is not None:
            k = min(k, int(self.max_spec_factor * match[1]))
            for token, probability in trie.continuation(match, context):
                if len(draft) >= k or probability < self.min_probability:
                    break
                draft.append(token)
                score += probability
                if token in stop_ids:
                    break  # nothing is worth guessing behind a stop
        return draft, score


class OwnText:
    """The trie of one request's prompt and output."""

    def __init__(self, max_depth: int) -> None:
        self.trie = Trie(max_depth)
        self._document = Document(0)

    def catch_up(self, tokens: Tokens[int]) -> None:
        for i in range(len(self._document.tokens), len(tokens)):
            self.trie.append(self._document, tokens[i])

    def match(self) -> Place | None:
        """Where the longest suffix lies that has a token behind an earlier occurrence; the trie knows all ends."""
        end = len(self._document.tokens)
        return next(((node, end - window.start) for window, node in self._document.ends if node.followed), None)


class Outputs:
    """The trie of the run's outputs, at most `max_tokens` of them; it holds no request alive.

    Args:
        max_depth: of the trie, in tokens.
        max_tokens: tokens kept.
    """

    def __init__(self, max_depth: int, max_tokens: int) -> None:
        self.trie = Trie(max_depth)
        self.max_tokens = max_tokens
        self.size = 0  # tokens kept
        self._documents: deque[Document] = deque()  # oldest request first
        self._sources: dict[ref[Sequence], Source] = {}

    def catch_up(self, sequences: list[Sequence]) -> None:
        """Read what these requests and all earlier ones have put out since the last call."""
        if not self.max_tokens:
            return
        for sequence in sequences:
            self._source(sequence).tokens = sequence.tokens
        for request, source in list(self._sources.items()):
            for token in source.unread():
                self._append(source.document, token)
            sequence_left = request()
            if sequence_left is None or sequence_left.finish_reason is not None:
                source.document.close()
                del self._sources[request]

    def _source(self, sequence: Sequence) -> Source:
        request = ref(sequence)
        if request not in self._sources:
            self._documents.append(Document(self._documents[-1].number + 1 if self._documents else 0))
            self._sources[request] = Source(sequence, self._documents[-1])
        return self._sources[request]

    def _append(self, document: Document, token: int) -> None:
        self.trie.append(document, token)
        self.size += 1
        if self.size > self.max_tokens:
            self._evict()

    def _evict(self) -> None:
        """Take the first token of the oldest output out."""
        while self._documents[0].empty and not self._documents[0].grows:
            self._documents.popleft()
        self.trie.remove_first(next(document for document in self._documents if not document.empty))
        self.size -= 1


class Source:
    """A request whose output is being read. It keeps the tokens, not the request: the last ones come after its end."""

    def __init__(self, sequence: Sequence, document: Document) -> None:
        self.tokens = sequence.tokens
        self.prompt_length = sequence.prompt_length
        self.document = document

    def unread(self) -> list[int]:
        return self.tokens[self.prompt_length + len(self.document.tokens) :]


class Document:
    """A text in a trie, as far as it was read.

    Args:
        number: its age; a higher one is later.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.head = 0  # tokens before it were removed from the trie
        self.grows = True
        self.ends: list[End] = []  # where the text stands in the trie: its suffixes that are nodes, longest first

    @property
    def empty(self) -> bool:
        return self.head == len(self.tokens)

    def close(self) -> None:
        self.grows, self.ends = False, []


class Window:
    """The tokens from `start` on in one text, up to the depth of the trie. As a leaf: a path that occurred once."""

    __slots__ = ("age", "document", "start")
    times = 1

    def __init__(self, document: Document, start: int) -> None:
        self.document, self.start = document, start
        self.age = document.number * LONGEST + start  # higher is later

    @property
    def last(self) -> Window:
        return self

    def most_frequent(self, depth: int) -> tuple[int, Child, float] | None:
        """The token behind the first `depth` ones, where the path goes on, and the relative frequency."""
        i, tokens = self.start + depth, self.document.tokens
        return (tokens[i], self, 1.0) if i < len(tokens) else None


class Node:
    """A path that occurred at least twice (and the root), with a child for each token that followed it.

    A single child needs no dictionary, which saves most of the memory where long passages repeat. `last` is the latest
    window on the path: removing older ones never changes it.
    """

    __slots__ = ("best", "children", "followed", "last", "only", "times")

    def __init__(self, times: int, last: Window) -> None:
        self.times = times  # occurrences of the path
        self.followed = 0  # those with a token behind them: a text's own end has none
        self.last = last
        self.best = UNKNOWN  # the most frequent child's token, of equals the latest
        self.only: Child | None = None
        self.children: dict[int, Child] | None = None

    def child(self, token: int) -> Child | None:
        if self.children is None:
            return self.only if token == self.best else None
        return self.children.get(token)

    def put(self, token: int, child: Child) -> None:
        """Set the child for a token; `best` is not decided here."""
        if self.children is not None:
            self.children[token] = child
        elif self.only is None or token == self.best:
            self.best, self.only = token, child
        else:
            self.children, self.only = {self.best: self.only, token: child}, None

    def drop(self, token: int) -> None:
        if self.children is None:
            self.best, self.only = UNKNOWN, None
            return
        del self.children[token]
        if len(self.children) == 1:
            ((self.best, self.only),) = self.children.items()
            self.children = None

    def gained(self, token: int, child: Child) -> None:
        """`child` occurred once more: it may be the best now."""
        if token != self.best and self.best != UNKNOWN:
            best = self.child(self.best)
            if best is not None and _ahead(child, best):
                self.best = token

    def lost(self, token: int) -> None:
        """The child for `token` occurred once less: another may be the best now, which is found out when asked."""
        if token == self.best and self.children is not None:
            self.best = UNKNOWN

    def most_frequent(self, depth: int) -> tuple[int, Child, float] | None:
        """As in `Window`."""
        if not self.followed:
            return None
        if self.best == UNKNOWN and self.children is not None:
            self.best = _front(self.children)
        child = self.child(self.best)
        return None if child is None else (self.best, child, child.times / self.followed)


UNKNOWN = -1
Child = Node | Window
End = tuple[Window, Node]
Place = tuple[Child, int]  # node or leaf of a path and the path's length, which may end inside a leaf


def _ahead(one: Child, other: Child) -> bool:
    """Whether a child is preferred: more occurrences, or as many and a later one."""
    return one.times > other.times or (one.times == other.times and one.last.age > other.last.age)


def _front(children: dict[int, Child]) -> int:
    """The token of the preferred child."""
    return max(children, key=lambda token: (children[token].times, children[token].last.age))


class Trie:
    """Counts of all paths of up to `max_depth` tokens in some texts.

    A path that occurred once is a leaf, the window itself, wherever it branches off; only paths that occurred twice
    have nodes. Texts may grow in turns; they are removed token by token from their beginnings, the oldest text first.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = Node(0, Window(Document(0), 0))  # its `times` and `last` mean nothing

    def append(self, document: Document, token: int) -> None:
        """O(max_depth): every suffix of the text that occurred before takes the token, and one more begins with it."""
        end = len(document.tokens)
        ends = [*document.ends, (Window(document, end), self.root)]
        document.tokens.append(token)
        document.ends = []
        for window, node in ends:
            depth = end + 1 - window.start
            child = self._step(window, node, token, depth)
            if isinstance(child, Node) and depth < self.max_depth:
                document.ends.append((window, child))

    def _step(self, window: Window, node: Node, token: int, depth: int) -> Child:
        """Count a window that goes on from a node to a path of `depth` tokens; what that path is now."""
        node.followed += 1
        child = node.child(token)
        if isinstance(child, Node):
            child.times += 1
            if window.age > child.last.age:
                child.last = window
        else:
            child = window if child is None else self._split(child, depth, window)
            node.put(token, child)
        node.gained(token, child)
        return child

    def _split(self, leaf: Window, depth: int, window: Window) -> Node:
        """The node at `depth` where a second window arrives at a leaf."""
        node = Node(2, max(leaf, window, key=lambda each: each.age))
        behind = leaf.most_frequent(depth)
        if depth < self.max_depth and behind is not None:
            node.followed = 1
            node.put(behind[0], leaf)
        elif depth < self.max_depth and leaf.document.grows:  # the other text ends right here and goes on later
            insort(leaf.document.ends, (leaf, node), key=lambda end: end[0].start)
        return node

    def remove_first(self, document: Document) -> None:
        """Take the first window of the oldest text out, O(max_depth): as if the text had begun one token later."""
        start = document.head
        document.head += 1
        if document.ends and document.ends[0][0].start == start:
            del document.ends[0]
        node = self.root
        for token in document.tokens[start : start + self.max_depth]:
            child = node.child(token)
            assert child is not None, "a window that was counted is gone"
            node.followed -= 1
            if not isinstance(child, Node) or child.times == 1:
                node.drop(token)
                return
            child.times -= 1
            node.lost(token)
            if child.times == 1 and self._settled(child.last):
                node.put(token, child.last)
                return
            node = child

    def _settled(self, window: Window) -> bool:
        """Whether it has stopped growing, so that its text can stand at none of its nodes."""
        return not window.document.grows or window.start + self.max_depth <= len(window.document.tokens)

    def find(self, path: Tokens[int]) -> Place | None:
        """Where a path of less than `max_depth` tokens lies, if it occurred with a token behind it. O(len(path))."""
        child: Child | None = self.root
        for depth, token in enumerate(path):
            if isinstance(child, Window):
                if child.document.tokens[child.start + depth : child.start + len(path)] != path[depth:]:
                    return None
                break
            if child is None:
                return None
            child = child.child(token)
        return None if child is None or child.most_frequent(len(path)) is None else (child, len(path))

    def longest(self, text: Tokens[int]) -> Place | None:
        """Where the longest suffix of a text lies. If one occurred, so did all shorter ones: bisection."""
        low, high = 0, min(len(text), self.max_depth - 1)
        place = None
        while low < high:
            middle = (low + high + 1) // 2
            found = self.find(text[len(text) - middle :])
            if found is None:
                high = middle - 1
            else:
                low, place = middle, found
        return place

    def continuation(self, place: Place, text: Tokens[int]) -> Iterator[tuple[int, float]]:
        """Tokens behind a place that the text ends at, each with the probability of the path up to it.

        A path that has reached `max_depth` goes on from its last `max_depth // 2` tokens: O(1) per token.
        """
        path, probability = list(text), 1.0
        found: Place | None = place
        while found is not None:
            child, depth = found
            step = child.most_frequent(depth)
            if step is None:
                return
            token, child, frequency = step
            probability *= frequency
            path.append(token)
            yield token, probability
            found = (child, depth + 1) if depth + 1 < self.max_depth else self.find(path[-(self.max_depth // 2) :])
