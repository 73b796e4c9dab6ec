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

from tandem.core.draft_shapes import DraftShapes, max_usable_shape
from tandem.decode_node.planning.acceptance_stats import DepthTransitions
from tandem.decode_node.planning.step_plan import StepKey, StepReport

NUM_PROFILE_STEPS = 5
"""The least time of as many is a level's at first: a machine's other work only adds to it."""
PROBE_EVERY, PROBE_STEPS, PROBE_SHARE = 64, 4, 0.006
"""Steps between looks at other levels, at least; the first ones of one catch up and are cold. Looks
at all of them lose at most this share of the time: one that seems as good is probed_at at often,
one of three that takes four times as long for no more every 6,000 steps."""
NUM_WARMUP_STEPS, WARMUP_PROBE_EVERY, NUM_PROBE_TIMES = 256, 16, 5
"""In so many steps of a size the first NUM_PROBE_TIMES looks at each level are free, for what was
measured while idle was of other texts; one only if it loses anyway, or while none is in use. The
lower median of the last NUM_PROBE_TIMES times is believed, that from before the first look among
them: one that other work hit, of two steps while none is in use, would else be the last for a long
time."""
NO_DRAFT_PROBE_EVERY, NO_DRAFT_PROBE_STEPS, NO_DRAFT_PROBE_SHARE = 6, 2, 0.007
"""Instead, of the best level that drafts while none is in use: nothing else tells of acceptance,
which rises within some steps where a text begins to repeat itself. All looks are so short then."""
SHORT_CONTEXT_TOKENS = 512
"""Tokens of context up to which attention is little beside the rest of a step."""
REPLAN_EVERY_STEPS = 8
"""Steps for which a choice holds after the first NUM_WARMUP_STEPS: to think costs 1 % of a small
step."""
MIN_GAIN_TO_SWITCH = 1.02
"""Another level must promise so much more."""
OUTLIER_RATIO = 1.5
"""So many times the accepted drafts that were expected are a surprise."""
ACCEPTANCE_WINDOW, PRIOR_ROWS = 400.0, 8.0
"""Rows of which a share tells, and that are made up, all accepted, at first."""


@dataclass(slots=True)
class BucketCosts:
    """Of one size of batch and context: the step time of each level, 0 if unknown, how many of its
    steps were planned, how many of all while serving, and the level in use. What was ``chosen``, it
    or one to look at, holds for ``num_steps_left`` steps. ``probed_at[level]`` is the step of the
    last look at it, 0 if there was none, ``surprise`` a level that brought so much more than
    expected that it is probed_at at again, if there is one. ``seen[level]`` are the times that the
    last looks told, behind what was known before, ``runs`` those of the last steps."""

    step_s: list[float]
    num_samples: list[int]
    probed_at: list[int]
    probe_times_s: list[deque[float]]
    current_shape: int
    planned_shape: int = 0
    num_steps_left: int = 0
    num_planned_steps: int = 0
    outlier_shape: int | None = None
    recent_runs: deque[tuple[int, list[float]]] = field(
        default_factory=lambda: deque([(-1, [])] * 3, 3)
    )

    def record_time(self, level: int, step_s: float) -> None:
        """Rows, contexts and the machine change all levels alike, so steps at the one in use tell
        nothing new: only a look does, beside the steps right before and behind it."""
        if not (known := self.step_s[level]) or self.num_samples[level] <= NUM_PROFILE_STEPS:
            self.step_s[level] = min(step_s, known or step_s)
            return
        if self.recent_runs[-1][0] != level or len(self.recent_runs[-1][1]) == PROBE_STEPS:
            self.recent_runs.append((level, []))
        self.recent_runs[-1][1].append(step_s)
        (used, before), (other, times), (then, behind) = self.recent_runs
        if used == then != other and len(behind) == PROBE_STEPS:
            measured = [
                self.step_s[used] * _lower_quartile(times) / _lower_quartile(before + behind)
            ]
            self.probe_times_s[other].extend(
                measured if self.probe_times_s[other] else [self.step_s[other], *measured]
            )
            self.step_s[other] = median_low(self.probe_times_s[other])


def _lower_quartile(times: Sequence[float]) -> float:
    """Their lower quartile: other work only adds to them, and may do so for a while."""
    return sorted(times)[(len(times) - 1) // 4]


@dataclass(slots=True)
class StepCostModel:
    """What steps cost, by size, and what drafts bring: ``shares[r]`` of the rows that came
    to where rung r begins went on, as ``tried[r]`` of them told."""

    levels: DraftShapes
    transitions: DepthTransitions
    num_attempts: list[float]
    acceptance_rates: list[float]
    buckets: dict[tuple[int, int], BucketCosts] = field(default_factory=dict)

    @classmethod
    def unprofiled(cls, levels: DraftShapes) -> "StepCostModel":
        transitions = DepthTransitions.from_shapes(levels)
        num = len(transitions.bounds)
        return cls(levels, transitions, [PRIOR_ROWS] * num, [1.0] * num)

    def bucket_costs(self, num_rows: int, num_context: int = 0) -> BucketCosts:
        """Row buckets that differ by less than a factor of two share what is known, and so do
        contexts, all up to SHORT_CONTEXT_TOKENS. A new one begins with what is known of the
        nearest."""
        size = num_rows.bit_length(), (num_context // SHORT_CONTEXT_TOKENS).bit_length()
        if size not in self.buckets:
            num, probe_times_s = (
                len(self.levels),
                [deque[float](maxlen=NUM_PROBE_TIMES) for _ in self.levels],
            )
            same_rows = [other for other in self.buckets if other[0] == size[0]]
            costs = BucketCosts([0.0] * num, [0] * num, [0] * num, probe_times_s, num - 1)
            if same_rows:
                near = self.buckets[min(same_rows, key=lambda other: abs(other[1] - size[1]))]
                costs.step_s, costs.num_samples = [*near.step_s], [*near.num_samples]
                costs.current_shape = near.current_shape
            self.buckets[size] = costs
        return self.buckets[size]

    def expected_tokens(self) -> list[list[float]]:
        """Tokens that a row emits, by level and most depth of its path."""
        acceptance_rates = (
            [self.acceptance_rates[transition] for transition in transitions]
            for transitions in self.transitions.by_shape
        )
        return [[*accumulate(accumulate(one, mul, initial=1.0))] for one in acceptance_rates]

    def next_unprofiled(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """A row bucket and a level to be measured next, the smallest first, but for levels that
        lose anyway; sizes that share what is known count once, as the middle one."""
        for _, shared in groupby(sizes, int.bit_length):
            num_rows = (shared_sizes := list(shared))[len(shared_sizes) // 2]
            size = self.bucket_costs(num_rows)
            for level, num_samples in enumerate(size.num_samples):
                if num_samples < NUM_PROFILE_STEPS and not self.is_dominated(size, level):
                    size.num_samples[level] += 1
                    return num_rows, level
        return None

    def is_dominated(self, size: BucketCosts, level: int) -> bool:
        """Whether steps without drafts would give more, even if all that it drafts were accepted:
        it takes no less time than any level below that has been measured."""
        measured = zip(size.step_s[: level + 1], size.num_samples, strict=False)
        known = [step_s for step_s, num_samples in measured if num_samples >= NUM_PROFILE_STEPS]
        max_step_s = (1 + self.levels[level].depth) * size.step_s[0]
        return 0 < max_step_s < max(known, default=0.0)


def record_reports(costs: StepCostModel, reports: Sequence[StepReport]) -> None:
    """Steps that ranks report, which may have read different ones last."""
    for key in dict.fromkeys(report.key for report in reports):
        _record_key(costs, key, [report for report in reports if report.key == key])


def _record_key(costs: StepCostModel, key: StepKey, reports: Sequence[StepReport]) -> None:
    """It took as long as on the slowest of these ranks."""
    num_context = max(report.num_context for report in reports)
    size, num_expected, num_accepted = costs.bucket_costs(key.num_rows, num_context), 0.0, 0
    num_attempts, acceptance_rates, num_known = (
        costs.num_attempts,
        costs.acceptance_rates,
        costs.transitions.num_visible[size.current_shape],
    )
    attempts = map(sum, zip(*(report.num_attempts for report in reports), strict=True))
    successes = map(sum, zip(*(report.num_successes for report in reports), strict=True))
    for r, (num, accepted) in enumerate(zip(attempts, successes, strict=True)):
        expected = num * acceptance_rates[r]
        if r >= num_known:
            num_expected, num_accepted = num_expected + expected, num_accepted + accepted
        num_attempts[r] = min(ACCEPTANCE_WINDOW, num_attempts[r] + num)
        acceptance_rates[r] += (accepted - expected) / max(num_attempts[r], num)
    if num_accepted > OUTLIER_RATIO * num_expected:
        size.outlier_shape = key.shape_index
        costs.num_attempts = [
            min(PRIOR_ROWS, num) for num in costs.num_attempts
        ]  # what was told before is old
    if all(report.is_steady_state for report in reports):
        size.record_time(key.shape_index, max(report.program_s for report in reports))


BatchSize = tuple[int, int]
"""The row bucket, and tokens of context a row."""
DraftLengthPolicy = Callable[[StepCostModel, BatchSize, Sequence[int]], int]
"""``(costs, batch, number of rows by most depth)`` to the level of the next step."""


def choose_largest(costs: StepCostModel, batch: BatchSize, wanted: Sequence[int]) -> int:
    """The highest that any row may use."""
    return max_usable_shape(costs.levels, max(limit for limit, num in enumerate(wanted) if num))


def adaptive(costs: StepCostModel, batch: BatchSize, wanted: Sequence[int]) -> int:
    """The level of most tokens per second for this size of batch, as far as is known."""
    size, most = costs.bucket_costs(*batch), choose_largest(costs, batch, wanted)
    if not size.num_steps_left:
        tokens_per_s = _tokens_per_s(size, costs.expected_tokens(), wanted)[: most + 1]
        _choose_next(size, tokens_per_s, [costs.is_dominated(size, n) for n in range(most + 1)])
    level = min(size.planned_shape, most)
    size.num_steps_left, size.num_planned_steps = (
        size.num_steps_left - 1,
        size.num_planned_steps + 1,
    )
    size.num_samples[level] += 1
    return level


def _choose_next(
    size: BucketCosts, tokens_per_s: Sequence[float], is_dominated: Sequence[bool]
) -> None:
    """What the next steps have: a level to look at, or the one that promises most."""
    levels, outlier_shape = range(len(tokens_per_s)), size.outlier_shape
    few = [n for n in levels if size.num_samples[n] < NUM_PROFILE_STEPS and not is_dominated[n]]
    if outlier_shape is not None and outlier_shape in levels:
        size.planned_shape, size.num_steps_left = outlier_shape, 1
    elif few:
        size.planned_shape, size.num_steps_left = max(few), 1
    elif (other := _shape_to_probe(size, tokens_per_s, is_dominated)) is not None:
        size.planned_shape, size.num_steps_left = (
            other,
            PROBE_STEPS if size.current_shape else NO_DRAFT_PROBE_STEPS,
        )
        size.probed_at[other] = size.num_planned_steps
    else:
        used, best = min(size.current_shape, levels[-1]), tokens_per_s.index(max(tokens_per_s))
        if tokens_per_s[best] > tokens_per_s[used] * MIN_GAIN_TO_SWITCH:
            size.probed_at[used], size.current_shape = size.num_planned_steps, best
        is_warmup = size.num_planned_steps < NUM_WARMUP_STEPS
        size.planned_shape, size.num_steps_left = (
            size.current_shape,
            1 if is_warmup else REPLAN_EVERY_STEPS - size.num_planned_steps % REPLAN_EVERY_STEPS,
        )
    size.outlier_shape = None


def _tokens_per_s(
    size: BucketCosts, expected: list[list[float]], wanted: Sequence[int]
) -> list[float]:
    """Tokens of all rows a second with each level, 0 while its time is unknown."""
    limits = [(limit, num) for limit, num in enumerate(wanted) if num]
    tokens = (sum(num * one[min(len(one) - 1, limit)] for limit, num in limits) for one in expected)
    return [num / s if s else 0.0 for num, s in zip(tokens, size.step_s, strict=True)]


def _shape_to_probe(
    size: BucketCosts, tokens_per_s: Sequence[float], is_dominated: Sequence[bool]
) -> int | None:
    """A level to look at now, for which enough steps were planned since it was last. One that loses
    by its own time, too: that may have been a moment's, and nothing else would tell."""
    current, best, due = (
        min(size.current_shape, len(tokens_per_s) - 1),
        max(tokens_per_s) or 1.0,
        [],
    )
    drafting = [] if current else [n for n in range(1, len(tokens_per_s)) if not is_dominated[n]]
    blind = max(drafting, key=tokens_per_s.__getitem__, default=None)
    num_since, usual = (
        size.num_planned_steps - max(size.probed_at),
        PROBE_SHARE / max(1, len(tokens_per_s) - 1),
    )
    num_steps = PROBE_STEPS if current else NO_DRAFT_PROBE_STEPS
    for level in range(len(tokens_per_s)):
        if level == current or (is_dominated[level] and not size.step_s[level]):
            continue
        every, share = (
            (NO_DRAFT_PROBE_EVERY, NO_DRAFT_PROBE_SHARE) if level == blind else (PROBE_EVERY, usual)
        )
        num_free = NUM_PROBE_TIMES if current and not is_dominated[level] else 1
        if size.num_planned_steps < NUM_WARMUP_STEPS and len(size.probe_times_s[level]) < num_free:
            every, share = WARMUP_PROBE_EVERY, 1e9
        lost_s = num_steps * size.step_s[level] * (1 - tokens_per_s[level] / best)
        unseen_s = size.step_s[current] * (size.num_planned_steps - size.probed_at[level])
        if num_since >= every and lost_s <= share * unseen_s:
            due.append(level)
    return min(due, key=size.probed_at.__getitem__, default=None)


FIXED = "fixed"
DRAFT_LENGTH_POLICIES: dict[str, DraftLengthPolicy] = {"adaptive": adaptive, FIXED: choose_largest}
