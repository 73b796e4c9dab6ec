"""How many drafts a step carries: as many as pay, by what steps cost and drafts bring here.

A step of n drafts emits 1 + a_1 + a_1 a_2 + ... tokens a row, where a_k is the measured share of
k-th drafts accepted once those before were. It is worth that over its measured time. As the
batch grows, verifying n + 1 tokens a row costs more, until no draft pays (seeds 003).

Costs are measured while idle after the start (``untried``) and while serving, the longest first;
now and then another length is tried, so that times and acceptance stay fresh. Strict answers do
not depend on any of it; relaxed and rejected ones do, as on every draft. All here are pure
functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from decode_node.plan import Report

EXPLORE_EVERY = 32
"""Steps between tries of a length that was not tried NUM_TRIES times yet."""
PROBE_EVERY = 128
"""Steps between timings of another length that seems as good as the one in use."""
PROBE_LOSS = 0.05
"""One that seems to be worth so much less is timed half as often: probes shall cost little."""
EAGER_PROBES = 4
"""So many times as often at first: what was measured while idle was of made-up rows."""
MOST_PROBES = 3
"""At once, until one is timed: the first may have to catch up, another be still on its way."""
NUM_TRIES = 5
"""The least time of as many is a length's at first: a machine's other work only adds to it."""
GAIN = 1.02
"""Another length must promise so much more."""
WEIGHT, PROBE_WEIGHT = 0.15, 0.4
"""Of a new time in the running mean after these: of the length in use, and of others, which are
timed seldom."""
OUTLIER = 1.5
"""A time counts as no more than so many times the mean."""
MEMORY = 2000
"""Rows after which a share has forgotten, whether they had drafts or not."""
FEWEST = 1e-3
"""A share forgets no further."""
PRIOR = 16.0
"""Accepted drafts that are made up at the start, or the first few would decide."""


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """Of one size of batch: the mean step time of each length, how often it was measured and after
    how many planned steps last, how many were planned, and the length in use."""

    step_s: tuple[float, ...]
    num_tries: tuple[int, ...]
    timed_at: tuple[int, ...]
    num_planned: int
    current: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps cost, by size of batch, and what drafts bring: rows that lately tried draft
    k + 1, and how many accepted it."""

    tried: tuple[float, ...]
    accepted: tuple[float, ...]
    sizes: Mapping[int, SizeCosts] = field(default_factory=dict)

    def of_size(self, num_rows: int) -> SizeCosts:
        """Row buckets that differ by less than a factor of two share what is known."""
        num = len(self.tried) + 1
        unknown = SizeCosts((0.0,) * num, (0,) * num, (0,) * num, 0, num - 1)
        return self.sizes.get(num_rows.bit_length(), unknown)

    def with_size(self, num_rows: int, size: SizeCosts) -> "Costs":
        return Costs(self.tried, self.accepted, {**self.sizes, num_rows.bit_length(): size})

    def expected_tokens(self) -> list[float]:
        """Tokens that a row emits with 0, 1 .. drafts."""
        expected, reached = [1.0], 1.0
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            reached *= accepted / tried
            expected.append(expected[-1] + reached)
        return expected


DraftLength = Callable[[Costs, Sequence[Report], int, Sequence[int]], tuple[int, Costs]]
"""``(costs, what the ranks report, row bucket, number of rows by limit)`` to the drafts of the next
step and the costs after it. Ranks may have read different steps last."""


def no_costs(max_drafts: int) -> Costs:
    return Costs((PRIOR,) * max_drafts, (PRIOR,) * max_drafts)


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
    size = costs.of_size(num_rows)
    size = replace(size, num_planned=size.num_planned + 1)
    tokens = _tokens(costs.expected_tokens(), most, wanted)
    num_drafts = _trial(size, tokens)
    if num_drafts is None:
        num_drafts = _best(size, tokens)
        if num_drafts != min(size.current, most):
            size = replace(size, current=num_drafts)
    return num_drafts, costs.with_size(num_rows, size)


def all_recorded(costs: Costs, reports: Sequence[Report]) -> Costs:
    """Ranks may have read different steps last."""
    for key in {report.key: None for report in reports}:
        costs = recorded(costs, [report for report in reports if report.key == key])
    return costs


def recorded(costs: Costs, reports: Sequence[Report]) -> Costs:
    """With a step added that these ranks report; it took as long as on the slowest. One that had to
    catch up tells nothing of the next of its length."""
    key = reports[0].key
    tried, accepted = list(costs.tried), list(costs.accepted)
    share_kept = (1 - 1 / MEMORY) ** key.num_rows
    for k in range(len(tried)):
        kept = share_kept if tried[k] > FEWEST else 1
        tried[k], accepted[k] = tried[k] * kept, accepted[k] * kept
    for k in range(key.num_drafts):
        tried[k] += sum(report.tried[k] for report in reports)
        accepted[k] += sum(report.accepted[k] for report in reports)
    costs = Costs(tuple(tried), tuple(accepted), costs.sizes)
    if key.width > key.num_drafts + 1 or not all(report.is_usual for report in reports):
        return costs
    step_s = max(report.program_s for report in reports)
    size = _timed(costs.of_size(key.num_rows), key.num_drafts, step_s)
    return costs.with_size(key.num_rows, size)


def _timed(size: SizeCosts, num_drafts: int, step_s: float) -> SizeCosts:
    """Rows, contexts and the machine change all lengths alike, but only the one in use is timed
    at every step: how its mean moves, the others' do."""
    mean, num_known = size.step_s[num_drafts], size.num_tries[num_drafts]
    means, num_tries, timed_at = list(size.step_s), list(size.num_tries), list(size.timed_at)
    if 0 < num_known < NUM_TRIES:
        step_s = min(step_s, mean)
    elif num_known:
        is_current = num_drafts == size.current
        weight = WEIGHT if is_current else PROBE_WEIGHT
        step_s = mean + weight * (min(step_s, OUTLIER * mean) - mean)
        if is_current:
            means = [one * step_s / mean for one in means]
    means[num_drafts] = step_s
    num_tries[num_drafts] += 1
    timed_at[num_drafts] = size.num_planned
    known = tuple(means), tuple(num_tries), tuple(timed_at)
    return SizeCosts(*known, size.num_planned, size.current)


def untried(costs: Costs, sizes: Sequence[int]) -> tuple[int, int] | None:
    """A row bucket and a number of drafts that were not measured yet, of the smallest such size
    first and its lengths in turns; sizes that share what is known count once, as the middle one."""
    for _, shared in groupby(sizes, int.bit_length):
        alike = list(shared)
        num_rows = alike[len(alike) // 2]
        size = costs.of_size(num_rows)
        if left := _untried(size, len(costs.tried)):
            return num_rows, min(left, key=size.num_tries.__getitem__)
    return None


def _trial(size: SizeCosts, tokens: Sequence[float]) -> int | None:
    """A length of 0 .. most to try now, whatever it promises."""
    most = len(tokens) - 1
    left = _untried(size, most)
    if most in left:
        return most
    if left and size.num_planned % EXPLORE_EVERY == 0:
        return left[0]
    if left:
        return None
    current = min(size.current, most)
    every = PROBE_EVERY / (EAGER_PROBES if size.num_planned < EAGER_PROBES * PROBE_EVERY else 1)
    best = tokens[current] / size.step_s[current]
    for n in range(most + 1):
        loss = max(0.0, 1 - tokens[n] / size.step_s[n] / best)
        due = int(every * (1 + loss / PROBE_LOSS))
        since = size.num_planned - size.timed_at[n]
        if n != current and since >= due and since % due < MOST_PROBES:
            return n
    return None


def _best(size: SizeCosts, tokens: Sequence[float]) -> int:
    """The length in use, unless another of 0 .. most promises clearly more."""
    most = len(tokens) - 1
    current = min(size.current, most)
    known = [n for n in range(most + 1) if size.num_tries[n] > 1]
    worth = {n: tokens[n] / size.step_s[n] for n in known}
    best = max(known, key=worth.__getitem__)
    return best if current not in known or worth[best] > worth[current] * GAIN else current


def _untried(size: SizeCosts, most: int) -> list[int]:
    return [n for n in range(most + 1) if size.num_tries[n] < NUM_TRIES]


def _tokens(expected: Sequence[float], most: int, wanted: Sequence[int]) -> list[float]:
    """Of all rows with 0 .. most drafts."""
    limits = [(limit, num) for limit, num in enumerate(wanted) if num]
    return [sum(num * expected[min(n, limit)] for limit, num in limits) for n in range(most + 1)]


FIXED = "fixed"
LENGTHS: dict[str, DraftLength] = {"by_load": by_load, FIXED: most_wanted}
