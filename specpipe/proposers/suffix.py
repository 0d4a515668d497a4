"""Suffix decoding: continue as the texts seen so far mostly did behind the suffixes they share with this one.

Two tries of counted windows (after Oliaro et al., arXiv 2411.04975): one of the request's own prompt and output, one of
the outputs of all requests of the run. Both grow with each committed token; rejected drafts do not enter them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from itertools import zip_longest
from weakref import WeakKeyDictionary, ref

from specpipe.draft import Draft
from specpipe.errors import integer, number
from specpipe.sequence import Sequence

LONGEST = 2**32  # tokens of a text, at most
OUTPUT_WEIGHT = 0.1  # of an occurrence in the outputs, beside one in the request's own text
ESCAPE = 2.0  # occurrences that the shorter suffixes count for beside those of a suffix, divided by its length


class SuffixProposer:
    """Drafts the likeliest next token, then the likeliest behind it, and so on while the draft is likely enough.

    The likelihood of a token x blends the counts behind the suffixes of 1, 2, ... tokens up to the longest that
    occurred before, as prediction by partial matching does:

        p_m(x) = (c_m(x) + (2 / m) p_(m-1)(x)) / (n_m + 2 / m),    p_0 = 0,    n_m = sum_x c_m(x)

    c_m(x) is how often x followed the last m tokens in the own text, plus a tenth of how often in the outputs of the
    run: they decide where the own text knows little. What followed one token once gets 1/3, six tokens 3/4 and more,
    which is about how often such guesses are right. So a draft grows with the match and the evidence, and where the
    longest match meets the end of a text a shorter one goes on. Of equally likely tokens the one behind the longest
    suffix of the own text is drafted, the latest of equally frequent ones.

    Prompts of other requests are not used: one long document would push all outputs out.

    With the outputs a draft depends on the requests before and beside this one. The law of the text does not, and
    at temperature 0 neither does the text; but a sampled text is then fixed by its seed only for the same requests in
    the same order and batches. `max_cached_tokens=0` makes each request reproducible by itself. The law needs drafts
    that are independent of the request's own `Chance`: a prompt sampled again with the same stream (equal seed and
    repeat, as in two `generate` calls of one pipeline) is drafted from its own text alone, since the outputs hold what
    that stream has put out before.

    Memory, measured on CPython 3.11 at depth 24: 200 to 320 bytes per token of prose, code or answers and at most
    1.1 kB where everything occurs exactly twice, so 100,000 cached tokens take 30 MB, seldom 100 MB. Each running
    request has a trie of its own prompt and output of the same density, freed with the request.

    Args:
        max_depth: longest path in a trie, in tokens: a suffix of up to `max_depth - 1` and what followed it.
        min_probability: a draft ends before the product of its tokens' likelihoods falls below this. Scoring one token
            more takes about 0.06 of a pass on a CPU: what is less likely than 0.1 to be reached and right is not worth
            it. On a device where scoring is nearly free, 0 gives the most tokens per pass.
        max_cached_tokens: outputs kept for other requests, in tokens; the oldest output goes first, from its
            beginning. 0: none.
    """

    def __init__(self, *, max_depth: int = 24, min_probability: float = 0.1, max_cached_tokens: int = 100_000) -> None:
        self.max_depth = integer("max_depth", max_depth, 2)
        self.min_probability = number("min_probability", min_probability, 0, 1)
        self.keeps_nothing = max_cached_tokens == 0
        self._texts: WeakKeyDictionary[Sequence, OwnText] = WeakKeyDictionary()
        self._outputs = Outputs(self.max_depth, integer("max_cached_tokens", max_cached_tokens, 0))
        self._streams: dict[bytes, ref[Sequence]] = {}  # who drew from each stream of random numbers first

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """As in `Extender`: what `propose` would give behind the drafts, had they been committed.

        They count as part of the own text until they are extended; among the outputs only what was committed counts.
        """
        self._outputs.catch_up(sequences)
        rows = zip(sequences, drafts, lengths, strict=True)
        return Draft.of([self._continue(sequence, draft, k) for sequence, draft, k in rows])

    def _is_first_of_its_stream(self, sequence: Sequence) -> bool:
        key = getattr(sequence.chance, "key", None)
        return key is None or self._streams.setdefault(key, ref(sequence))() is sequence

    def _continue(self, sequence: Sequence, draft: list[int], k: int) -> list[int]:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = OwnText(self.max_depth)
        text.catch_up(sequence.tokens)
        context = [*sequence.tokens[1 - self.max_depth :], *draft]
        shared = self._outputs.trie.places(context) if self._is_first_of_its_stream(sequence) else []
        with text.followed_by(draft) as own:
            return self._follow(own, shared, k, sequence.stop_ids)

    def _follow(self, own: list[Place], shared: list[Place], k: int, stop_ids: Collection[int]) -> list[int]:
        """Up to k tokens, as far as likelihood and stops allow."""
        draft: list[int] = []
        probability = 1.0
        while len(draft) < k:
            token, likelihood = likeliest(own, shared)
            probability *= likelihood
            if token == UNKNOWN or probability < self.min_probability:
                break
            draft.append(token)
            if token in stop_ids:
                break  # nothing is worth guessing behind a stop
            own, shared = behind(own, token, self.max_depth), behind(shared, token, self.max_depth)
        return draft


def likeliest(own: list[Place], shared: list[Place]) -> tuple[int, float]:
    """The likeliest token and its likelihood, as in `SuffixProposer`; UNKNOWN if there is none.

    Only the most frequent token behind each suffix is looked at: O(max_depth) for each of these few.

    Args:
        own: where the suffixes of 0, 1, 2, ... tokens lie in the trie of the own text.
        shared: where they lie in the trie of the outputs, or [].
    """
    fronts = [child.front(depth) for places in (own, shared) for child, depth in reversed(places[1:])]
    orders = list(zip_longest(own[1:], shared[1:], fillvalue=NOWHERE))
    best, highest = UNKNOWN, 0.0
    for token in dict.fromkeys(front for front in fronts if front != UNKNOWN):
        p = 0.0
        for m, ((one, i), (other, j)) in enumerate(orders, 1):
            count = times(one, token, i) + OUTPUT_WEIGHT * times(other, token, j)
            n = one.followers(i) + OUTPUT_WEIGHT * other.followers(j)
            p = (count + ESCAPE / m * p) / (n + ESCAPE / m)
        if p > highest:
            best, highest = token, p
    return best, highest


def times(child: Child, token: int, depth: int) -> int:
    """How often a path of `depth` tokens was followed by a token."""
    follower = child.behind(token, depth)
    return 0 if follower is None else follower.times


def behind(places: list[Place], token: int, max_depth: int) -> list[Place]:
    """Where the suffixes lie when one more token follows, as far as they occurred."""
    if not places:
        return []
    found = [(child.behind(token, depth), depth + 1) for child, depth in places if depth + 1 < max_depth]
    return [places[0], *((child, depth) for child, depth in found if child is not None)]


class OwnText:
    """The trie of one request's prompt and output."""

    def __init__(self, max_depth: int) -> None:
        self.trie = Trie(max_depth)
        self._document = Document(0)

    def catch_up(self, tokens: Tokens[int]) -> None:
        for i in range(len(self._document.tokens), len(tokens)):
            self.trie.append(self._document, tokens[i])

    @contextmanager
    def followed_by(self, draft: Tokens[int]) -> Iterator[list[Place]]:
        """Where the suffixes of the text and a draft lie, which counts as part of the text inside the block only."""
        document, trials = self._document, [self.trie.try_out(self._document, token) for token in draft]
        try:
            ends = reversed(document.ends)
            yield [(self.trie.root, 0), *((node, len(document.tokens) - window.start) for window, node in ends)]
        finally:
            for trial in reversed(trials):
                self.trie.take_back(document, trial)


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

    def front(self, depth: int) -> int:
        """The most frequent token behind the first `depth` ones, of equals the latest; UNKNOWN behind the end."""
        i, tokens = self.start + depth, self.document.tokens
        return tokens[i] if i < len(tokens) else UNKNOWN

    def followers(self, depth: int) -> int:
        """How often the first `depth` tokens occurred with a token behind them."""
        return int(self.front(depth) != UNKNOWN)

    def behind(self, token: int, depth: int) -> Child | None:
        """Where the path goes on when `token` follows the first `depth` ones, if it ever did."""
        return self if self.front(depth) == token else None


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

    def front(self, depth: int) -> int:
        """As in `Window`."""
        if self.best == UNKNOWN and self.children is not None:
            self.best = _front(self.children)
        return self.best

    def followers(self, depth: int) -> int:
        """As in `Window`."""
        return self.followed

    def behind(self, token: int, depth: int) -> Child | None:
        """As in `Window`."""
        return self.child(token)


UNKNOWN = -1
Child = Node | Window
End = tuple[Window, Node]
Place = tuple[Child, int]  # node or leaf of a path and the path's length, which may end inside a leaf
NOWHERE: Place = (Window(Document(0), 0), 0)  # nothing is behind it


def _ahead(one: Child, other: Child) -> bool:
    """Whether a child is preferred: more occurrences, or as many and a later one."""
    return one.times > other.times or (one.times == other.times and one.last.age > other.last.age)


def _front(children: dict[int, Child]) -> int:
    """The token of the preferred child."""
    return max(children, key=lambda token: (children[token].times, children[token].last.age))


class Before:
    """What a node and its child for a token were before the token was tried out."""

    def __init__(self, node: Node, token: int) -> None:
        self.node, self.best, self.child = node, node.best, node.child(token)
        self.times, self.last = (self.child.times, self.child.last) if self.child else (0, node.last)

    def restore(self, token: int) -> None:
        self.node.followed -= 1
        if self.child is None:
            self.node.drop(token)
        else:
            self.node.put(token, self.child)
        if isinstance(self.child, Node):
            self.child.times, self.child.last = self.times, self.last
        self.node.best = self.best


Trial = tuple[list[End], list[Before]]  # where the text stood, and the nodes that counted the token


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
        behind = leaf.front(depth)
        if depth < self.max_depth and behind != UNKNOWN:
            node.followed = 1
            node.put(behind, leaf)
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

    def try_out(self, document: Document, token: int) -> Trial:
        """Append a token for a while; `take_back` leaves everything as it was."""
        nodes = [self.root, *(node for _, node in document.ends)]
        trial = (document.ends, [Before(node, token) for node in nodes])
        self.append(document, token)
        return trial

    def take_back(self, document: Document, trial: Trial) -> None:
        """Undo the latest `try_out`, O(max_depth)."""
        token = document.tokens.pop()
        document.ends, nodes = trial
        for before in nodes:
            before.restore(token)

    def places(self, text: Tokens[int]) -> list[Place]:
        """Where the suffixes of 0, 1, 2, ... tokens of a text lie, as far as they occurred with a token behind them.

        O(L^2) for the longest of L tokens: if one occurred, so did all shorter ones.
        """
        found: list[Place] = [(self.root, 0)]
        for length in range(1, min(len(text), self.max_depth - 1) + 1):
            place = self.find(text[len(text) - length :])
            if place is None:
                break
            found.append(place)
        return found

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
        return None if child is None or child.front(len(path)) == UNKNOWN else (child, len(path))
