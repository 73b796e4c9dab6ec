"""How many drafts a step carries: as many as pay, by what steps cost and drafts bring here.

A step of n drafts emits 1 + a_1 + a_1 a_2 + ... tokens a row, where a_k is the measured share of
k-th drafts accepted once those before were. It is worth that over its measured time. As the
batch grows, verifying n + 1 tokens a row costs more, until no draft pays (seeds 003).
"""

from collections.abc import Callable, Sequence
from typing import Protocol


class DraftLength(Protocol):
    def choose(self, limits: Sequence[int]) -> int:
        """Drafts of the next step, given the most that each of its rows may use."""
        ...

    def record(self, num_drafts: int, step_s: float, accepted: Sequence[tuple[int, int]]) -> None:
        """A step took ``step_s``; ``accepted`` are each row's (limit, accepted drafts)."""
        ...


class FixedLength:
    """The most that any row may use."""

    def choose(self, limits: Sequence[int]) -> int:
        return max(limits)

    def record(self, num_drafts: int, step_s: float, accepted: Sequence[tuple[int, int]]) -> None:
        return


class Shares:
    """a_k as running means over rows, with the newest weighing most."""

    MEMORY = 400
    """Rows after which a mean has forgotten."""

    def __init__(self, max_drafts: int) -> None:
        self._tried = [1.0] * max_drafts
        self._accepted = [1.0] * max_drafts

    def record(self, num_drafts: int, accepted: Sequence[tuple[int, int]]) -> None:
        for k in range(num_drafts):
            tried = sum(1 for limit, num in accepted if num >= k and limit > k)
            kept = (1 - 1 / self.MEMORY) ** tried
            self._tried[k] = self._tried[k] * kept + tried
            self._accepted[k] = self._accepted[k] * kept + sum(1 for _, num in accepted if num > k)

    def expected_tokens(self, num_drafts: int) -> float:
        """Tokens that a row with so many drafts emits."""
        total, reached = 1.0, 1.0
        for k in range(num_drafts):
            reached *= self._accepted[k] / self._tried[k]
            total += reached
        return total


class LengthByLoad:
    """Chooses by tokens per second among 0 .. n_max drafts, for each size of batch apart.

    Everything is measured while serving, the longest first; now and then another length is
    tried, so that times and acceptance stay fresh. Strict answers do not depend on any of it;
    relaxed and rejected ones do, as on every draft.
    """

    EXPLORE_EVERY = 32
    """Steps between tries of a length that was not tried NUM_TRIES times yet."""
    PROBE_EVERY = 64
    """Steps between tries of a neighbour of the length in use; of the longest if that is 0."""
    NUM_TRIES = 2
    """A first time is slow for other reasons."""
    GAIN = 1.03
    """Another length must promise so much more."""
    WEIGHT = 0.15
    """Of a new time in the running mean."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._shares = Shares(max_drafts)
        self._sizes: dict[int, _Times] = {}

    def choose(self, limits: Sequence[int]) -> int:
        most = min(max(limits), self._max_drafts)
        times = self._times(len(limits))
        times.num_chosen += 1
        untried = [n for n in range(most + 1) if times.num_tries[n] < self.NUM_TRIES]
        if most in untried:
            return most
        if untried and times.num_chosen % self.EXPLORE_EVERY == 0:
            return untried[0]
        current = min(times.current, most)
        if times.num_chosen % self.PROBE_EVERY == 0:
            return _probe(current, most, times.num_chosen // self.PROBE_EVERY)
        worth = {
            n: self._tokens(n, limits) / times.step_s[n]
            for n in range(most + 1)
            if n not in untried
        }
        best = max(worth, key=worth.__getitem__)
        if current in untried or worth[best] > worth[current] * self.GAIN:
            times.current = current = best
        return current

    def record(self, num_drafts: int, step_s: float, accepted: Sequence[tuple[int, int]]) -> None:
        self._shares.record(num_drafts, accepted)
        times = self._times(len(accepted))
        times.add(num_drafts, step_s, self.WEIGHT)

    def _tokens(self, num_drafts: int, limits: Sequence[int]) -> float:
        return sum(self._shares.expected_tokens(min(num_drafts, limit)) for limit in limits)

    def _times(self, num_rows: int) -> "_Times":
        size = num_rows.bit_length()
        if size not in self._sizes:
            self._sizes[size] = _Times(self._max_drafts)
        return self._sizes[size]


class _Times:
    """Of one size of batch: the mean step time of each length, and the length in use."""

    def __init__(self, max_drafts: int) -> None:
        self.step_s = [0.0] * (max_drafts + 1)
        self.num_tries = [0] * (max_drafts + 1)
        self.num_chosen = 0
        self.current = max_drafts

    def add(self, num_drafts: int, step_s: float, weight: float) -> None:
        self.num_tries[num_drafts] += 1
        if self.num_tries[num_drafts] <= LengthByLoad.NUM_TRIES:
            self.step_s[num_drafts] = step_s
        else:
            self.step_s[num_drafts] += weight * (step_s - self.step_s[num_drafts])


def _probe(current: int, most: int, number: int) -> int:
    if current == 0:
        return most
    return max(current - 1, 0) if number % 2 or current == most else current + 1


LENGTHS: dict[str, Callable[[int], DraftLength]] = {
    "by_load": LengthByLoad,
    "fixed": lambda max_drafts: FixedLength(),
}
