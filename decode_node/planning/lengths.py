"""How many drafts a step carries: as many as pay, by what steps cost and drafts bring here.

A step of n drafts emits 1 + a_1 + a_1 a_2 + ... tokens a row, where a_k is the measured share of
k-th drafts accepted once those before were. It is worth that over its measured time. As the
batch grows, verifying n + 1 tokens a row costs more, until no draft pays (seeds 003).

Costs are measured while idle after the start (``untried``), or in the first steps of a size. While
serving, every step tells of its own length, and now and then another is looked at. Strict answers
do not depend on any of it; relaxed and rejected ones do, as on every draft. All here are pure
functions.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from decode_node.planning.step_plan import Report

NUM_TRIES = 5
"""The least time of as many is a length's at first: a machine's other work only adds to it."""
LOOK_EVERY, LOOK_STEPS, EAGER_LOOKS = 128, 2, 16
"""Steps between looks at the other lengths in turns, a quarter of that for the first looks: what
was measured while idle was of made-up rows. The first step of one may have to catch up."""
LOSSES = 5
"""Who loses a fifth of the tokens is looked at every second time, who loses two every third."""
GAIN = 1.02
"""Another length must promise so much more."""
WEIGHT, LOOK_WEIGHT = 0.25, 0.8
"""Of a new time in the running mean after the first: of the length in use, and of others, which are
timed seldom."""
OUTLIER = 1.5
"""A time counts as no more than so many times the mean; so many accepted drafts are a surprise."""
MEMORY, PRIOR = 100.0, 8.0
"""Rows that tried a draft of which a share tells, and that are made up, all accepted, at first."""


class SizeCosts(NamedTuple):
    """Of one size of batch: the mean step time of each length, 0 if unknown, how many of its steps
    were planned up to NUM_TRIES, how many of all, and the length in use. ``surprise`` is one that
    brought so much more than expected that it is looked at again, if there is such a one."""

    step_s: tuple[float, ...]
    num_tries: tuple[int, ...]
    num_planned: int
    current: int
    surprise: int | None = None


class Costs(NamedTuple):
    """What steps cost, by size of batch, and what drafts bring: ``shares[k]`` of the rows that
    tried draft k + 1 accepted it, as ``tried[k]`` of them told."""

    tried: tuple[float, ...]
    shares: tuple[float, ...]
    sizes: Mapping[int, SizeCosts] = MappingProxyType({})

    def of_size(self, num_rows: int) -> SizeCosts:
        """Row buckets that differ by less than a factor of two share what is known."""
        num = len(self.tried) + 1
        return self.sizes.get(
            num_rows.bit_length(), SizeCosts((0.0,) * num, (0,) * num, 0, num - 1)
        )

    def with_size(self, num_rows: int, size: SizeCosts) -> "Costs":
        return self._replace(sizes={**self.sizes, num_rows.bit_length(): size})

    def expected_tokens(self) -> list[float]:
        """Tokens that a row emits with 0, 1 .. drafts."""
        expected, reached = [1.0], 1.0
        for share in self.shares:
            reached *= share
            expected.append(expected[-1] + reached)
        return expected


DraftLength = Callable[[Costs, Sequence[Report], int, Sequence[int]], tuple[int, Costs]]
"""``(costs, what the ranks report, row bucket, number of rows by limit)`` to the drafts of the next
step and the costs after it. Ranks may have read different steps last."""


def no_costs(max_drafts: int) -> Costs:
    return Costs((PRIOR,) * max_drafts, (1.0,) * max_drafts)


def most_wanted(
    costs: Costs, reports: Sequence[Report], num_rows: int, wanted: Sequence[int]
) -> tuple[int, Costs]:
    """The most that any row may use."""
    return max(limit for limit, num in enumerate(wanted) if num), costs


def by_load(
    costs: Costs, reports: Sequence[Report], num_rows: int, wanted: Sequence[int]
) -> tuple[int, Costs]:
    """The length of most tokens per second for this size of batch, as far as is known."""
    costs = all_recorded(costs, reports)
    most, _ = most_wanted(costs, reports, num_rows, wanted)
    size, tokens = costs.of_size(num_rows), _tokens(costs.expected_tokens(), most, wanted)
    num_drafts = _looked_at(size, tokens)
    if num_drafts is None:
        num_drafts = _best(size, tokens)
        if num_drafts != min(size.current, most):
            size = size._replace(current=num_drafts)
    size = size._replace(num_planned=size.num_planned + 1, surprise=None)
    return num_drafts, costs.with_size(num_rows, _tried(size, num_drafts))


def all_recorded(costs: Costs, reports: Sequence[Report]) -> Costs:
    """Ranks may have read different steps last."""
    for key in {report.key: None for report in reports}:
        costs = recorded(costs, [report for report in reports if report.key == key])
    return costs


def recorded(costs: Costs, reports: Sequence[Report]) -> Costs:
    """With a step added that these ranks report; it took as long as on the slowest."""
    key, size = reports[0].key, costs.of_size(reports[0].key.num_rows)
    tried, shares = list(costs.tried), list(costs.shares)
    num_expected, num_accepted = 0.0, 0
    for k in range(key.num_drafts):
        num = sum(report.tried[k] for report in reports)
        accepted = sum(report.accepted[k] for report in reports)
        if k >= size.current:
            num_expected, num_accepted = num_expected + num * shares[k], num_accepted + accepted
        tried[k] = min(MEMORY, tried[k] + num)
        shares[k] += (accepted - num * shares[k]) / max(tried[k], num)
    if num_accepted > OUTLIER * num_expected:
        size = size._replace(surprise=key.num_drafts)
    if all(report.is_usual for report in reports):
        size = _timed(size, key.num_drafts, max(report.program_s for report in reports))
    return Costs(tuple(tried), tuple(shares), costs.sizes).with_size(key.num_rows, size)


def _timed(size: SizeCosts, num_drafts: int, step_s: float) -> SizeCosts:
    """Rows, contexts and the machine change all lengths alike, but only the one in use is timed
    at every step: how its mean moves, the others' do."""
    means, mean = list(size.step_s), size.step_s[num_drafts]
    if mean and size.num_tries[num_drafts] < NUM_TRIES:
        step_s = min(step_s, mean)
    elif mean:
        is_current = num_drafts == size.current
        weight = WEIGHT if is_current else LOOK_WEIGHT
        step_s = mean + weight * (min(step_s, OUTLIER * mean) - mean)
        if is_current:
            means = [one * step_s / mean for one in means]
    means[num_drafts] = step_s
    return size._replace(step_s=tuple(means))


def untried(costs: Costs, sizes: Sequence[int]) -> tuple[int, int, Costs] | None:
    """A row bucket and a number of drafts to be measured next, of the smallest such size first and
    its lengths in turns; sizes that share what is known count once, as the middle one."""
    for _, shared in groupby(sizes, int.bit_length):
        alike = list(shared)
        num_rows = alike[len(alike) // 2]
        size = costs.of_size(num_rows)
        if (fewest := min(size.num_tries)) < NUM_TRIES:
            num_drafts = size.num_tries.index(fewest)
            return num_rows, num_drafts, costs.with_size(num_rows, _tried(size, num_drafts))
    return None


def _tried(size: SizeCosts, num_drafts: int) -> SizeCosts:
    num_tries = list(size.num_tries)
    num_tries[num_drafts] = min(NUM_TRIES, num_tries[num_drafts] + 1)
    return size._replace(num_tries=tuple(num_tries))


def _looked_at(size: SizeCosts, tokens: Sequence[float]) -> int | None:
    """A length of 0 .. most to look at now; those that promise least are looked at seldom."""
    most = len(tokens) - 1
    if size.surprise is not None and size.surprise <= most:
        return size.surprise
    if min(size.num_tries[: most + 1]) < NUM_TRIES:
        return max(n for n in range(most + 1) if size.num_tries[n] < NUM_TRIES)
    every = LOOK_EVERY // (4 if size.num_planned < EAGER_LOOKS * LOOK_EVERY // 4 else 1)
    num_looks, step = divmod(size.num_planned, every)
    if num_looks == 0 or step >= LOOK_STEPS:
        return None
    worth, current = _worth(size, tokens), min(size.current, most)
    best = max(worth) or 1.0
    periods = [1 + int(LOSSES * (1 - one / best)) for one in worth]
    due = [n for n in range(most + 1) if n != current and num_looks % periods[n] == 0]
    return due[num_looks // max(periods) % len(due)] if due else None


def _best(size: SizeCosts, tokens: Sequence[float]) -> int:
    """The length in use, unless another of 0 .. most promises clearly more."""
    worth, current = _worth(size, tokens), min(size.current, len(tokens) - 1)
    best = worth.index(max(worth))
    return best if worth[best] > worth[current] * GAIN else current


def _worth(size: SizeCosts, tokens: Sequence[float]) -> list[float]:
    """Tokens a second with each length, 0 while its time is unknown."""
    times = size.step_s[: len(tokens)]
    return [num / step_s if step_s else 0.0 for num, step_s in zip(tokens, times, strict=True)]


def _tokens(expected: Sequence[float], most: int, wanted: Sequence[int]) -> list[float]:
    """Of all rows with 0 .. most drafts."""
    limits = [(limit, num) for limit, num in enumerate(wanted) if num]
    return [sum(num * expected[min(n, limit)] for limit, num in limits) for n in range(most + 1)]


FIXED = "fixed"
LENGTHS: dict[str, DraftLength] = {"by_load": by_load, FIXED: most_wanted}
