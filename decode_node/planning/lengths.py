"""How much a step drafts: the level that pays, by what steps cost and drafts bring here.

A step emits 1 + a_1 + a_1 a_2 + ... tokens a row, where a_k is the measured share of rows whose
path went on at depth k once it had come so far. It is worth that over its measured time. As the
batch grows, verifying all nodes of a row costs more, until no draft pays (seeds 003).

Costs are measured while idle after the start (``untried``), or in the first steps of a size. While
serving, every step tells what was accepted, and a look at another level, now and then, what it
costs beside the one in use. Strict answers do not depend on any of it; relaxed and rejected ones
do, as on every draft.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import mul
from statistics import median_low

from tandem.core.levels import Levels, usable
from tandem.decode_node.planning.rungs import Rungs
from tandem.decode_node.planning.step_plan import Report, StepKey

NUM_TRIES = 5
"""The least time of as many is a level's at first: a machine's other work only adds to it."""
LOOK_EVERY, LOOK_STEPS, LOOK_SHARE = 64, 4, 0.006
"""Steps between looks at other levels, at least; the first ones of one catch up and are cold. Looks
at all of them lose at most this share of the time: one that seems as good is looked at often, one
of three that takes four times as long for no more every 6,000 steps."""
NUM_NEW, FREE_EVERY, NUM_SEEN = 256, 16, 5
"""In so many steps of a size the first NUM_SEEN looks at each level are free, for what was measured
while idle was of other texts; one only if it loses anyway, or while none is in use. The lower
median of the last NUM_SEEN times is believed, that from before the first look among them: one that
other work hit, of two steps while none is in use, would else be the last for a long time."""
BLIND_EVERY, BLIND_STEPS, BLIND_SHARE = 6, 2, 0.007
"""Instead, of the best level that drafts while none is in use: nothing else tells of acceptance,
which rises within some steps where a text begins to repeat itself. All looks are so short then."""
NEAR = 512
"""Tokens of context up to which attention is little beside the rest of a step."""
HOLD = 8
"""Steps for which a choice holds after the first NUM_NEW: to think costs 1 % of a small step."""
GAIN = 1.02
"""Another level must promise so much more."""
OUTLIER = 1.5
"""So many times the accepted drafts that were expected are a surprise."""
MEMORY, PRIOR = 400.0, 8.0
"""Rows of which a share tells, and that are made up, all accepted, at first."""


@dataclass(slots=True)
class SizeCosts:
    """Of one size of batch and context: the step time of each level, 0 if unknown, how many of its
    steps were planned, how many of all while serving, and the level in use. What was ``chosen``, it
    or one to look at, holds for ``num_left`` steps. ``looked[level]`` is the step of the last look
    at it, 0 if there was none, ``surprise`` a level that brought so much more than expected that it
    is looked at again, if there is one. ``seen[level]`` are the times that the last looks told,
    behind what was known before, ``runs`` those of the last steps."""

    step_s: list[float]
    num_tries: list[int]
    looked: list[int]
    seen: list[deque[float]]
    current: int
    chosen: int = 0
    num_left: int = 0
    num_planned: int = 0
    surprise: int | None = None
    runs: deque[tuple[int, list[float]]] = field(default_factory=lambda: deque([(-1, [])] * 3, 3))

    def time(self, level: int, step_s: float) -> None:
        """Rows, contexts and the machine change all levels alike, so steps at the one in use tell
        nothing new: only a look does, beside the steps right before and behind it."""
        if not (known := self.step_s[level]) or self.num_tries[level] <= NUM_TRIES:
            self.step_s[level] = min(step_s, known or step_s)
            return
        if self.runs[-1][0] != level or len(self.runs[-1][1]) == LOOK_STEPS:
            self.runs.append((level, []))
        self.runs[-1][1].append(step_s)
        (used, before), (other, times), (then, behind) = self.runs
        if used == then != other and len(behind) == LOOK_STEPS:
            told = [self.step_s[used] * _undisturbed(times) / _undisturbed(before + behind)]
            self.seen[other].extend(told if self.seen[other] else [self.step_s[other], *told])
            self.step_s[other] = median_low(self.seen[other])


def _undisturbed(times: Sequence[float]) -> float:
    """Their lower quartile: other work only adds to them, and may do so for a while."""
    return sorted(times)[(len(times) - 1) // 4]


@dataclass(slots=True)
class Costs:
    """What steps cost, by size, and what drafts bring: ``shares[r]`` of the rows that came
    to where rung r begins went on, as ``tried[r]`` of them told."""

    levels: Levels
    rungs: Rungs
    tried: list[float]
    shares: list[float]
    sizes: dict[tuple[int, int], SizeCosts] = field(default_factory=dict)

    @classmethod
    def unknown(cls, levels: Levels) -> "Costs":
        rungs = Rungs.of(levels)
        num = len(rungs.bounds)
        return cls(levels, rungs, [PRIOR] * num, [1.0] * num)

    def of_size(self, num_rows: int, num_context: int = 0) -> SizeCosts:
        """Row buckets that differ by less than a factor of two share what is known, and so do
        contexts, all up to NEAR. A new one begins with what is known of the nearest."""
        size = num_rows.bit_length(), (num_context // NEAR).bit_length()
        if size not in self.sizes:
            num, seen = len(self.levels), [deque[float](maxlen=NUM_SEEN) for _ in self.levels]
            alike = [other for other in self.sizes if other[0] == size[0]]
            costs = SizeCosts([0.0] * num, [0] * num, [0] * num, seen, num - 1)
            if alike:
                near = self.sizes[min(alike, key=lambda other: abs(other[1] - size[1]))]
                costs.step_s, costs.num_tries = [*near.step_s], [*near.num_tries]
                costs.current = near.current
            self.sizes[size] = costs
        return self.sizes[size]

    def expected_tokens(self) -> list[list[float]]:
        """Tokens that a row emits, by level and most depth of its path."""
        shares = ([self.shares[rung] for rung in rungs] for rungs in self.rungs.of_level)
        return [[*accumulate(accumulate(one, mul, initial=1.0))] for one in shares]

    def untried(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """A row bucket and a level to be measured next, the smallest first, but for levels that
        lose anyway; sizes that share what is known count once, as the middle one."""
        for _, shared in groupby(sizes, int.bit_length):
            num_rows = (alike := list(shared))[len(alike) // 2]
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
    for key in dict.fromkeys(report.key for report in reports):
        _record_step(costs, key, [report for report in reports if report.key == key])


def _record_step(costs: Costs, key: StepKey, reports: Sequence[Report]) -> None:
    """It took as long as on the slowest of these ranks."""
    num_context = max(report.num_context for report in reports)
    size, num_expected, num_accepted = costs.of_size(key.num_rows, num_context), 0.0, 0
    tried, shares, num_known = costs.tried, costs.shares, costs.rungs.num_told[size.current]
    num_tried = map(sum, zip(*(report.tried for report in reports), strict=True))
    went_on = map(sum, zip(*(report.accepted for report in reports), strict=True))
    for r, (num, accepted) in enumerate(zip(num_tried, went_on, strict=True)):
        expected = num * shares[r]
        if r >= num_known:
            num_expected, num_accepted = num_expected + expected, num_accepted + accepted
        tried[r] = min(MEMORY, tried[r] + num)
        shares[r] += (accepted - expected) / max(tried[r], num)
    if num_accepted > OUTLIER * num_expected:
        size.surprise = key.level
        costs.tried = [min(PRIOR, num) for num in costs.tried]  # what was told before is old
    if all(report.is_usual for report in reports):
        size.time(key.level, max(report.program_s for report in reports))


BatchSize = tuple[int, int]
"""The row bucket, and tokens of context a row."""
DraftLength = Callable[[Costs, BatchSize, Sequence[int]], int]
"""``(costs, batch, number of rows by most depth)`` to the level of the next step."""


def most_wanted(costs: Costs, batch: BatchSize, wanted: Sequence[int]) -> int:
    """The highest that any row may use."""
    return usable(costs.levels, max(limit for limit, num in enumerate(wanted) if num))


def adaptive(costs: Costs, batch: BatchSize, wanted: Sequence[int]) -> int:
    """The level of most tokens per second for this size of batch, as far as is known."""
    size, most = costs.of_size(*batch), most_wanted(costs, batch, wanted)
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


def _worth(size: SizeCosts, expected: list[list[float]], wanted: Sequence[int]) -> list[float]:
    """Tokens of all rows a second with each level, 0 while its time is unknown."""
    limits = [(limit, num) for limit, num in enumerate(wanted) if num]
    tokens = (sum(num * one[min(len(one) - 1, limit)] for limit, num in limits) for one in expected)
    return [num / s if s else 0.0 for num, s in zip(tokens, size.step_s, strict=True)]


def _looked_at(size: SizeCosts, worth: Sequence[float], loses: Sequence[bool]) -> int | None:
    """A level to look at now, for which enough steps were planned since it was last. One that loses
    by its own time, too: that may have been a moment's, and nothing else would tell."""
    current, best, due = min(size.current, len(worth) - 1), max(worth) or 1.0, []
    drafting = [] if current else [n for n in range(1, len(worth)) if not loses[n]]
    blind = max(drafting, key=worth.__getitem__, default=None)
    num_since, usual = size.num_planned - max(size.looked), LOOK_SHARE / max(1, len(worth) - 1)
    num_steps = LOOK_STEPS if current else BLIND_STEPS
    for level in range(len(worth)):
        if level == current or (loses[level] and not size.step_s[level]):
            continue
        every, share = (BLIND_EVERY, BLIND_SHARE) if level == blind else (LOOK_EVERY, usual)
        num_free = NUM_SEEN if current and not loses[level] else 1
        if size.num_planned < NUM_NEW and len(size.seen[level]) < num_free:
            every, share = FREE_EVERY, 1e9
        lost_s = num_steps * size.step_s[level] * (1 - worth[level] / best)
        unseen_s = size.step_s[current] * (size.num_planned - size.looked[level])
        if num_since >= every and lost_s <= share * unseen_s:
            due.append(level)
    return min(due, key=size.looked.__getitem__, default=None)


FIXED = "fixed"
LENGTHS: dict[str, DraftLength] = {"adaptive": adaptive, FIXED: most_wanted}
