"""The text of an answer, cut where a stop string begins. Pure Python, a token at a time.

What has been told after a token depends on the tokens alone, not on how they arrived, so a
resumed stream goes on exactly where the broken one ended.
"""

from model.tokenizer import TextStream


class StopText:
    """Holds back what may be the start of a stop string.

    The answer stops where the first stop string is complete (the longest of those that end
    there); it and all that follows are never told.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """What is certain of the text now, and whether a stop string was completed. Those
        completed while ``may_stop`` is False are ordinary text."""
        num_old, whole = len(self._held), self._held + text
        found = self._first_stop(whole, num_old) if may_stop else None
        if found is not None:
            self._held = ""
            return whole[: found[0]], True
        num_held = self._num_to_hold(whole)
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held], False

    def finish(self) -> str:
        """What was held back; the text ends here."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, whole: str, num_old: int) -> tuple[int, int] | None:
        """(start, end) of the stop string that the characters after ``num_old`` complete first."""
        spans = []
        for stop in self._stops:
            start = whole.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                spans.append((start, start + len(stop)))
        return min(spans, key=lambda span: (span[1], span[0]), default=None)

    def _num_to_hold(self, whole: str) -> int:
        """Length of the longest end of ``whole`` that a stop string goes on from."""
        longest = min(len(whole), max(map(len, self._stops), default=1) - 1)
        for num in range(longest, 0, -1):
            end = whole[-num:]
            if any(len(stop) > num and stop.startswith(end) for stop in self._stops):
                return num
        return 0


class AnswerText:
    """Tokens to told text: whole characters first (TextStream), then no stop string."""

    def __init__(self, stream: TextStream, stops: tuple[str, ...], min_tokens: int) -> None:
        self._stream = stream
        self._stop_text = StopText(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.stopped = False

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """The text that became certain, and how many of the tokens are kept; sets ``stopped`` if
        the last of these completed a stop string and is at least the answer's ``min_tokens``-th."""
        assert not self.stopped, "the text has ended"
        told = ""
        for num_kept, token in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text, self.stopped = self._stop_text.push(
                self._stream.push((token,)), may_stop=self._num_tokens >= self._min_tokens
            )
            told += text
            if self.stopped:
                return told, num_kept
        return told, len(token_ids)

    def finish(self) -> str:
        """The rest of an answer that ended otherwise."""
        if self.stopped:
            return ""
        text, _ = self._stop_text.push(self._stream.finish(), may_stop=False)
        return text + self._stop_text.finish()
