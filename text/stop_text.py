"""Streaming text of an answer, truncated before the first stop string.

The text that is emitted after a token depends on the tokens only, not on how they were grouped into
steps. A resumed stream therefore continues exactly where the broken one ended.
"""

from functools import lru_cache

from tandem.text.tokenizer import TextStream


class _Node:
    """A prefix of one or more stop strings, ``depth`` characters long; the root is empty."""

    __slots__ = ("depth", "fallback", "longest_match", "next")

    def __init__(self, depth: int) -> None:
        self.next: dict[str, _Node] = {}
        self.depth = depth
        self.fallback: _Node | None = None
        """Node of the longest proper suffix that is a prefix of a stop string; None at the root."""
        self.longest_match = 0
        """Length of the longest stop string that is a suffix of this prefix, 0 if none is."""

    def step(self, char: str) -> "_Node":
        """Return the node that is reached from this one by ``char``.

        It is the longest stop-string prefix at the end of the text.
        """
        node = self
        while char not in node.next:
            if node.fallback is None:
                return node
            node = node.fallback
        return node.next[char]

    def longest_open_suffix(self) -> "_Node":
        """Return the node of the longest suffix of this prefix that more text can complete.

        Such a suffix is a proper prefix of a stop string, possibly empty.
        """
        node = self
        while not node.next and node.fallback is not None:
            node = node.fallback
        return node


@lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _Node:
    """Return the root of the Aho-Corasick automaton of all stop strings.

    The automaton does not change once it is built, so the n answers to a request share it.
    """
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
    """Finds the first stop string in a text and holds back text that may belong to one.

    The text ends where the first stop string is completed. If several stop strings end there, the
    longest one counts. Neither the stop string nor later text is emitted. The cost per character
    does not depend on the number and lengths of the stop strings.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._root = self._node = _automaton(stops)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Append text.

        Args:
            text: The text to append.
            may_stop: If False, a stop string completed by ``text`` is ordinary text.

        Returns:
            The text that became final, and whether a stop string was completed.
        """
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._node = self._node.step(char)
            if may_stop and self._node.longest_match:
                start = end - self._node.longest_match
                self._held = ""
                self._node = self._root
                return whole[:start], True
        self._node = self._node.longest_open_suffix()
        num_certain = len(whole) - self._node.depth
        self._held = whole[num_certain:]
        return whole[:num_certain], False

    def finish(self) -> str:
        """End the text and return the part that was held back."""
        withheld = self._held
        self._held = ""
        self._node = self._root
        return withheld


class AnswerText:
    """Text of one answer: whole characters (TextStream), truncated at a stop string (StopText).

    Attributes:
        is_stopped: Whether a stop string has ended the text.
    """

    def __init__(self, stream: TextStream, stops: tuple[str, ...], min_tokens: int) -> None:
        self._stream = stream
        self._stop_text = StopText(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.is_stopped = False

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """Append tokens.

        Sets ``is_stopped`` if a token completes a stop string and the answer then has at least
        ``min_tokens`` tokens. Later tokens are dropped.

        Returns:
            The text that became final, and the number of ``token_ids`` that the answer keeps.
        """
        assert not self.is_stopped, "no tokens may follow a stop string"
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
        """Return the text that was held back, "" if a stop string has ended the answer."""
        if self.is_stopped:
            return ""
        text, _ = self._stop_text.push(self._stream.finish(), may_stop=False)
        return text + self._stop_text.finish()
