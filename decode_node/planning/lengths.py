"""How much a step drafts: the level that pays, by what steps cost and drafts bring here.

A step emits 1 + a_1 + a_1 a_2 + ... tokens a row, where a_k is the measured share of rows whose
path went on at depth k once it had come so far. It is worth that over its measured time. As the
batch grows, verifying all nodes of a row costs more, until no draft pays (seeds 003).

Costs are measured while idle after the start (``untried``), or in the first steps of a size. While
serving, every step tells of its own level, and now and then another is looked at. Strict answers
do not depend on any of it; relaxed and rejected ones do, as on every draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import mul

from core.levels import Levels, usable
from decode_node.planning.rungs import Rungs
from decode_node.planning.step_plan import Report, StepKey

NUM_TRIES = 5
"""The least time of as many is a level's at first: a machine's other work only adds to it."""
LOOK_EVERY, LOOK_STEPS, LOOK_SHARE = 64, 4, 0.009
"""Steps between looks at other levels, at least; the first ones of one catch up and are cold. Looks
at all of them lose at most this share of the time: one that seems as good is looked at often, one
of three that takes four times as long for no more every 4,000 steps. The first one is free: what
was measured while idle was of other texts."""
LOOK_ANYWAY = 16_384
"""Steps after which one is looked at whatever it seems to take: that may have been a moment's."""
BLIND_EVERY, BLIND_STEPS, BLIND_SHARE = 4, 2, 0.007
"""Instead, of the best level that drafts while none is in use: nothing else tells of acceptance,
which rises within some steps where a text begins to repeat itself. All looks are so short then."""
HOLD = 8
"""Steps for which a choice holds after the first NUM_NEW: to think costs 1 % of a small step."""
NUM_NEW = 256
GAIN = 1.02
"""Another level must promise so much more."""
WEIGHT = 0.25
"""Of a new time in the running mean after the first."""
OUTLIER = 1.5
"""A time counts as no more than so many times the mean, nor the mean as more than so many times a
time: other work only adds to it. So many accepted drafts are a surprise."""
MEMORY, PRIOR = 100.0, 8.0
"""Rows of which a share tells, and that are made up, all accepted, at first."""


@dataclass(slots=True)
class SizeCosts:
    """Of one size of batch: the mean step time of each level, 0 if unknown, how many of its steps
    were planned, how many of all while serving, and the level in use. What was ``chosen``, it or
    one to look at, holds for ``num_left`` steps. ``looked[level]`` is the step of the last look at
    it, 0 if there was none, ``surprise`` one that brought so much more than expected that it is
    looked at again, if there is such a one."""

    step_s: list[float]
    num_tries: list[int]
    looked: list[int]
    current: int
    chosen: int = 0
    num_left: int = 0
    num_planned: int = 0
    surprise: int | None = None

    def time(self, level: int, step_s: float) -> None:
        """Rows, contexts and the machine change all levels alike, but only the one in use is timed
        at every step: how its mean moves, the others' do."""
        mean = self.step_s[level]
        if mean and self.num_tries[level] < NUM_TRIES:
            step_s = min(step_s, mean)
        elif mean:
            known = min(mean, OUTLIER * step_s)
            step_s = known + WEIGHT * (min(step_s, OUTLIER * mean) - known)
            if level == self.current:
                self.step_s = [one * step_s / mean for one in self.step_s]
        self.step_s[level] = step_s


@dataclass(slots=True)
class Costs:
    """What steps cost, by size of batch, and what drafts bring: ``shares[r]`` of the rows that came
    to where rung r begins went on, as ``tried[r]`` of them told."""

    levels: Levels
    rungs: Rungs
    tried: list[float]
    shares: list[float]
    sizes: dict[int, SizeCosts] = field(default_factory=dict)

    @classmethod
    def unknown(cls, levels: Levels) -> "Costs":
        rungs = Rungs.of(levels)
        num = len(rungs.bounds)
        return cls(levels, rungs, [PRIOR] * num, [1.0] * num)

    def of_size(self, num_rows: int) -> SizeCosts:
        """Row buckets that differ by less than a factor of two share what is known."""
        if (bits := num_rows.bit_length()) not in self.sizes:
            num = len(self.levels)
            self.sizes[bits] = SizeCosts([0.0] * num, [0] * num, [0] * num, num - 1)
        return self.sizes[bits]

    def expected_tokens(self) -> list[list[float]]:
        """Tokens that a row emits, by level and most depth of its path."""
        shares = ([self.shares[rung] for rung in rungs] for rungs in self.rungs.of_level)
        return [[*accumulate(accumulate(one, mul, initial=1.0))] for one in shares]

    def untried(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """A row bucket and a level to be measured next, the smallest first, but for levels that
        lose anyway; sizes that share what is known count once, as the middle one."""
        for _, shared in groupby(sizes, int.bit_length):
            alike = list(shared)
            num_rows = alike[len(alike) // 2]
            size = self.of_size(num_rows)
            for level, num_tries in enumerate(size.num_tries):
                if num_tries < NUM_TRIES and not self.loses(size, level):
                    size.num_tries[level] += 1
                    return num_rows, level
        return None

    def loses(self, size: SizeCosts, level: int) -> bool:
        """Whether steps without drafts would give more, even if all that it drafts were accepted:
        it takes no less time than any level below that has been measured."""
        tried = zip(size.step_s[: level + 1], size.num_tries, strict=False)
        known = [step_s for step_s, num_tries in tried if num_tries >= NUM_TRIES]
        most = (1 + self.levels[level].depth) * size.step_s[0]
        return 0 < most < max(known, default=0.0)


def record(costs: Costs, reports: Sequence[Report]) -> None:
    """Steps that ranks report, which may have read different ones last."""
    left = list(reports)
    while left:
        key = left[0].key
        alike = [report for report in left if report.key == key]
        left = [report for report in left if report.key != key] if len(alike) < len(left) else []
        _record_step(costs, key, alike)


def _record_step(costs: Costs, key: StepKey, reports: Sequence[Report]) -> None:
    """It took as long as on the slowest of these ranks."""
    size, num_expected, num_accepted = costs.of_size(key.num_rows), 0.0, 0
    for r in range(costs.rungs.num_told[key.level]):
        num = sum(report.tried[r] for report in reports)
        accepted = sum(report.accepted[r] for report in reports)
        expected = num * costs.shares[r]
        if r >= costs.rungs.num_told[size.current]:
            num_expected, num_accepted = num_expected + expected, num_accepted + accepted
        costs.tried[r] = min(MEMORY, costs.tried[r] + num)
        costs.shares[r] += (accepted - expected) / max(costs.tried[r], num)
    if num_accepted > OUTLIER * num_expected:
        size.surprise = key.level
        costs.tried = [min(PRIOR, num) for num in costs.tried]  # what was told before is old
    if all(report.is_usual for report in reports):
        size.time(key.level, max(report.program_s for report in reports))


DraftLength = Callable[[Costs, int, Sequence[int]], int]
"""``(costs, row bucket, number of rows by most depth)`` to the level of the next step."""


def most_wanted(costs: Costs, num_rows: int, wanted: Sequence[int]) -> int:
    """The highest that any row may use."""
    return usable(costs.levels, max(limit for limit, num in enumerate(wanted) if num))


def by_load(costs: Costs, num_rows: int, wanted: Sequence[int]) -> int:
    """The level of most tokens per second for this size of batch, as far as is known."""
    size, most = costs.of_size(num_rows), most_wanted(costs, num_rows, wanted)
    if not size.num_left:
        worth = _worth(size, costs.expected_tokens(), wanted)[: most + 1]
        _choose(size, worth, [costs.loses(size, n) for n in range(most + 1)])
    level = min(size.chosen, most)
    size.num_left, size.num_planned = size.num_left - 1, size.num_planned + 1
    size.num_tries[level] += 1
    return level


def _choose(size: SizeCosts, worth: Sequence[float], loses: Sequence[bool]) -> None:
    """What the next steps have: a level to look at, or the one that promises most."""
    levels, surprise = range(len(worth)), size.surprise
    few = [n for n in levels if size.num_tries[n] < NUM_TRIES and not loses[n]]
    if surprise is not None and surprise in levels:
        size.chosen, size.num_left = surprise, 1
    elif few:
        size.chosen, size.num_left = max(few), 1
    elif (other := _looked_at(size, worth, loses)) is not None:
        size.chosen, size.num_left = other, LOOK_STEPS if size.current else BLIND_STEPS
        size.looked[other] = size.num_planned
    else:
        used, best = min(size.current, levels[-1]), worth.index(max(worth))
        if worth[best] > worth[used] * GAIN:
            size.looked[used], size.current = size.num_planned, best
        is_new = size.num_planned < NUM_NEW
        size.chosen, size.num_left = size.current, 1 if is_new else HOLD - size.num_planned % HOLD
    size.surprise = None


def _worth(
    size: SizeCosts, expected: Sequence[Sequence[float]], wanted: Sequence[int]
) -> list[float]:
    """Tokens of all rows a second with each level, 0 while its time is unknown."""
    limits = [(limit, num) for limit, num in enumerate(wanted) if num]
    tokens = (sum(num * one[min(len(one) - 1, limit)] for limit, num in limits) for one in expected)
    pairs = zip(tokens, size.step_s, strict=True)
    return [num / step_s if step_s else 0.0 for num, step_s in pairs]


def _looked_at(size: SizeCosts, worth: Sequence[float], loses: Sequence[bool]) -> int | None:
    """A level to look at now, for which enough steps were planned since it was last. One that loses
    by its own time, too: that may have been a moment's, and nothing else would tell."""
    current, best, due = min(size.current, len(worth) - 1), max(worth) or 1.0, []
    drafting = [] if current else [n for n in range(1, len(worth)) if not loses[n]]
    blind = max(drafting, key=worth.__getitem__, default=None)
    num_since, usual = size.num_planned - max(size.looked), LOOK_SHARE / max(1, len(worth) - 1)
    for level in range(len(worth)):
        every, share = (BLIND_EVERY, BLIND_SHARE) if level == blind else (LOOK_EVERY, usual)
        num_unseen = size.num_planned - size.looked[level]
        lost_s = size.step_s[level] * (1 - worth[level] / best)
        num_steps = LOOK_STEPS if current else BLIND_STEPS
        is_little = num_steps * lost_s <= share * size.step_s[current] * num_unseen
        is_paid = size.step_s[level] and (is_little or num_unseen > LOOK_ANYWAY)
        is_free = not (size.looked[level] or loses[level])
        if level != current and num_since >= every and (is_paid or is_free):
            due.append(level)
    return min(due, key=size.looked.__getitem__, default=None)


FIXED = "fixed"
LENGTHS: dict[str, DraftLength] = {"by_load": by_load, FIXED: most_wanted}
