"""The text of an answer, cut where a stop string begins. Pure Python, a token at a time.

What has been told after a token depends on the tokens alone, not on how they arrived, so a
resumed stream goes on exactly where the broken one ended.
"""

from functools import lru_cache

from tandem.text.tokenizer import TextStream


class _Node:
    """A beginning of one or more stop strings, ``depth`` characters long; the root is empty."""

    __slots__ = ("depth", "fallback", "longest_match", "next")

    def __init__(self, depth: int) -> None:
        self.next: dict[str, _Node] = {}
        self.depth = depth
        self.fallback: _Node | None = None
        """The longest end of it that is a beginning too; of the root, None."""
        self.longest_match = 0
        """Length of the longest stop string that ends here."""

    def step(self, char: str) -> "_Node":
        """The longest beginning that the text ends with after ``char``."""
        node = self
        while char not in node.next:
            if node.fallback is None:
                return node
            node = node.fallback
        return node.next[char]

    def longest_open_suffix(self) -> "_Node":
        """The longest end that a stop string goes on from."""
        node = self
        while not node.next and node.fallback is not None:
            node = node.fallback
        return node


@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Node:
    """All stop strings in one trie, with fallbacks (Aho and Corasick). The n answers to a request
    share it: nothing changes it any more."""
    root = _Node(0)
    layer = {root}
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.longest_match = node.depth
    while layer:
        for node in layer:
            for char, child in node.next.items():
                child.fallback = root if node.fallback is None else node.fallback.step(char)
                child.longest_match = child.longest_match or child.fallback.longest_match
        layer = {child for node in layer for child in node.next.values()}
    return root


class StopText:
    """Holds back what may be the start of a stop string.

    The answer stops where the first stop string is complete (the longest of those that end
    there); it and all that follows are never told. A character costs the same however long and
    many the stop strings are.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._root = self._node = _automaton(stops)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """What is certain of the text now, and whether a stop string was completed. Those
        completed while ``may_stop`` is False are ordinary text."""
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._node = self._node.step(char)
            if may_stop and self._node.longest_match:
                start = end - self._node.longest_match
                self._held, self._node = "", self._root
                return whole[:start], True
        self._node = self._node.longest_open_suffix()
        num_certain = len(whole) - self._node.depth
        self._held = whole[num_certain:]
        return whole[:num_certain], False

    def finish(self) -> str:
        """What was held back; the text ends here."""
        held, self._held, self._node = self._held, "", self._root
        return held


class AnswerText:
    """Tokens to told text: whole characters first (TextStream), then no stop string."""

    def __init__(self, stream: TextStream, stops: tuple[str, ...], min_tokens: int) -> None:
        self._stream = stream
        self._stop_text = StopText(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.is_stopped = False

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """The text that became certain, and how many of the tokens are kept; sets ``stopped`` if
        the last of these completed a stop string and is at least the answer's ``min_tokens``-th."""
        assert not self.is_stopped, "the text has ended"
        certain = ""
        for num_kept, token in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text, self.is_stopped = self._stop_text.push(
                self._stream.push((token,)), may_stop=self._num_tokens >= self._min_tokens
            )
            certain += text
            if self.is_stopped:
                return certain, num_kept
        return certain, len(token_ids)

    def finish(self) -> str:
        """The rest of an answer that ended otherwise."""
        if self.is_stopped:
            return ""
        text, _ = self._stop_text.push(self._stream.finish(), may_stop=False)
        return text + self._stop_text.finish()
