"""Choice of the draft shape of each step, from measured step times and acceptance rates.

On average, a step emits 1 + a_1 + a_1 a_2 + ... tokens per row. Here a_k is the acceptance rate at
depth k: the share of accepted paths of length k - 1 that continue to depth k. The shape with the
most expected tokens per second is used. The larger the batch, the more it costs to verify all
drafts, until drafting no longer pays.

Step times are first measured while the ranks are idle after startup (``next_unprofiled``). Without
such measurements, the first steps of a batch size are measured. While serving, every step reports
its accepted drafts. From time to time there is a probe: a short run of another shape, which
measures its time relative to the shape in use.

Outputs under strict acceptance do not depend on the chosen shapes. Outputs under other acceptance
rules do, because they depend on every draft.
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
"""Number of first steps of a shape whose minimum time is its initial estimate. The minimum is
robust, because other work on the machine only adds time."""
PROBE_EVERY = 64
"""Minimum number of steps between two probes."""
PROBE_STEPS = 4
"""Number of steps of a probe. The first ones are slower: they run cold, and the drafter catches up.
"""
PROBE_SHARE = 0.006
"""Maximum share of the time that the probes of all shapes together may lose. A shape that seems as
good as the one in use is probed often. One of three shapes that takes four times the time for no
gain is probed every 6,000 steps."""
NUM_WARMUP_STEPS = 256
"""Length of a batch size's warm-up in steps. Shapes are probed more often during warm-up, because
measurements on idle ranks used other texts."""
WARMUP_PROBE_EVERY = 16
"""Minimum number of steps between two probes during warm-up."""
NUM_PROBE_TIMES = 5
"""Number of a shape's latest times whose lower median is the estimate. The time known before the
first probe counts as one of them. Without the median, one disturbed probe could decide for a long
time, above all a short probe while no drafts are in use.

During warm-up, this is also the number of probes per shape that may lose any amount of time. For a
dominated shape it is one, and for every shape while no drafts are in use."""
NO_DRAFT_PROBE_EVERY = 6
"""PROBE_EVERY for the best drafting shape while no drafts are in use. Its probes are frequent,
because acceptance is then measured by probes only. Acceptance rises within a few steps when a text
starts to repeat itself."""
NO_DRAFT_PROBE_STEPS = 2
"""PROBE_STEPS for all shapes while no drafts are in use."""
NO_DRAFT_PROBE_SHARE = 0.007
"""PROBE_SHARE for the best drafting shape while no drafts are in use."""
SHORT_CONTEXT_TOKENS = 512
"""Context length in tokens up to which attention takes a small part of a step's time."""
REPLAN_EVERY_STEPS = 8
"""Number of steps for which a chosen shape is kept, after the warm-up. Each choice costs about 1 %
of a small step."""
MIN_GAIN_TO_SWITCH = 1.02
"""Minimum ratio of another shape's expected tokens per second to those of the shape in use, for a
switch to the other shape."""
OUTLIER_RATIO = 1.5
"""Ratio of accepted to expected drafts above which a probed shape runs again in the next step. Only
those drafts count whose transitions are not measured by the shape in use."""
ACCEPTANCE_WINDOW = 400.0
"""Number of latest rows over which an acceptance rate is averaged; older rows lose weight."""
PRIOR_ROWS = 8.0
"""Number of fictitious rows, all accepted, with which each acceptance rate starts."""


@dataclass(slots=True)
class BucketCosts:
    """Step times and planning state for one batch size and context length. Lists are by shape.

    Attributes:
        step_s: Estimated step time in seconds. 0 if unknown.
        num_samples: Number of steps planned with the shape, profiling included.
        probed_at: Value of ``num_planned_steps`` when the shape was last probed or ceased to be in
            use. 0 if that never happened.
        probe_times_s: Times in seconds from the latest probes. The first entry is the time known
            before the first probe, until newer times replace it.
        current_shape: Shape in use.
        planned_shape: Shape of the next steps: the shape in use, or one to probe.
        num_steps_left: Number of further steps for which ``planned_shape`` holds.
        num_planned_steps: Number of steps planned while serving, of all shapes.
        outlier_shape: Shape whose probe accepted many more drafts than expected, or None.
        recent_runs: Last three runs, each a pair (shape, times of consecutive steps of that shape).
    """

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

    def record_time(self, shape_index: int, step_s: float) -> None:
        """Update the time estimate of shape ``shape_index`` from one step.

        In the first steps of a shape, the minimum counts. After that, only a completed probe
        changes the estimate. The probe's time is compared with the runs right before and after it.
        Changes of rows, contexts and machine load then affect all compared times equally.
        """
        if (
            not (known := self.step_s[shape_index])
            or self.num_samples[shape_index] <= NUM_PROFILE_STEPS
        ):
            self.step_s[shape_index] = min(step_s, known or step_s)
            return
        if self.recent_runs[-1][0] != shape_index or len(self.recent_runs[-1][1]) == PROBE_STEPS:
            self.recent_runs.append((shape_index, []))
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
    """Return the lower quartile, which is robust: other work on the machine only adds time."""
    return sorted(times)[(len(times) - 1) // 4]


@dataclass(slots=True)
class StepCostModel:
    """Step times by batch size, and acceptance rates.

    ``acceptance_rates[t]`` is the share of rows at the start of transition t that passed it
    (acceptance_stats.py). ``num_attempts[t]`` is the number of rows that the share is based on.
    """

    draft_shapes: DraftShapes
    transitions: DepthTransitions
    num_attempts: list[float]
    acceptance_rates: list[float]
    buckets: dict[tuple[int, int], BucketCosts] = field(default_factory=dict)

    @classmethod
    def unprofiled(cls, draft_shapes: DraftShapes) -> "StepCostModel":
        transitions = DepthTransitions.from_shapes(draft_shapes)
        num = len(transitions.bounds)
        return cls(draft_shapes, transitions, [PRIOR_ROWS] * num, [1.0] * num)

    def bucket_costs(self, num_rows: int, num_context: int = 0) -> BucketCosts:
        """Return the costs for a row bucket and a context length, creating them if necessary.

        Row buckets with the same bit length, such as 4 to 7, share one entry. So do contexts with
        the same bit length in units of SHORT_CONTEXT_TOKENS. A new entry starts with the costs of
        the nearest context length for the same row buckets.
        """
        size = num_rows.bit_length(), (num_context // SHORT_CONTEXT_TOKENS).bit_length()
        if size not in self.buckets:
            num = len(self.draft_shapes)
            probe_times_s = [deque[float](maxlen=NUM_PROBE_TIMES) for _ in self.draft_shapes]
            same_rows = [other for other in self.buckets if other[0] == size[0]]
            costs = BucketCosts(
                step_s=[0.0] * num,
                num_samples=[0] * num,
                probed_at=[0] * num,
                probe_times_s=probe_times_s,
                current_shape=num - 1,
            )
            if same_rows:
                near = self.buckets[min(same_rows, key=lambda other: abs(other[1] - size[1]))]
                costs.step_s = [*near.step_s]
                costs.num_samples = [*near.num_samples]
                costs.current_shape = near.current_shape
            self.buckets[size] = costs
        return self.buckets[size]

    def expected_tokens(self) -> list[list[float]]:
        """Return the expected tokens per row and step, by shape and maximum accepted depth."""
        acceptance_rates = (
            [self.acceptance_rates[transition] for transition in transitions]
            for transitions in self.transitions.by_shape
        )
        return [[*accumulate(accumulate(rates, mul, initial=1.0))] for rates in acceptance_rates]

    def next_unprofiled(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """Return the row bucket and shape to profile next, smallest first, or None.

        Dominated shapes are skipped (``is_dominated``). If several row buckets share an entry, only
        the middle one is profiled. The call counts as a sample of the returned shape.
        """
        for _, shared in groupby(sizes, int.bit_length):
            num_rows = (shared_sizes := list(shared))[len(shared_sizes) // 2]
            size = self.bucket_costs(num_rows)
            for shape_index, num_samples in enumerate(size.num_samples):
                if num_samples < NUM_PROFILE_STEPS and not self.is_dominated(size, shape_index):
                    size.num_samples[shape_index] += 1
                    return num_rows, shape_index
        return None

    def is_dominated(self, size: BucketCosts, shape_index: int) -> bool:
        """Return whether a shape is slower per token than no drafts even if all are accepted.

        Assumes that a shape takes at least as long as every smaller shape that has been measured.
        """
        measured = zip(size.step_s[: shape_index + 1], size.num_samples, strict=False)
        known = [step_s for step_s, num_samples in measured if num_samples >= NUM_PROFILE_STEPS]
        max_step_s = (1 + self.draft_shapes[shape_index].depth) * size.step_s[0]
        return 0 < max_step_s < max(known, default=0.0)


def record_reports(costs: StepCostModel, reports: Sequence[StepReport]) -> None:
    """Update ``costs`` from the reports of all ranks, which may be of different steps."""
    for key in dict.fromkeys(report.key for report in reports):
        _record_key(costs, key, [report for report in reports if report.key == key])


def _record_key(costs: StepCostModel, key: StepKey, reports: Sequence[StepReport]) -> None:
    """Update ``costs`` from one step's reports. The slowest rank determines the step time."""
    num_context = max(report.num_context for report in reports)
    size = costs.bucket_costs(key.num_rows, num_context)
    num_expected = 0.0
    num_accepted = 0
    num_attempts = costs.num_attempts
    acceptance_rates = costs.acceptance_rates
    num_known = costs.transitions.num_visible[size.current_shape]
    attempts = map(sum, zip(*(report.num_attempts for report in reports), strict=True))
    successes = map(sum, zip(*(report.num_successes for report in reports), strict=True))
    for r, (num, accepted) in enumerate(zip(attempts, successes, strict=True)):
        expected = num * acceptance_rates[r]
        if r >= num_known:
            num_expected = num_expected + expected
            num_accepted = num_accepted + accepted
        num_attempts[r] = min(ACCEPTANCE_WINDOW, num_attempts[r] + num)
        acceptance_rates[r] += (accepted - expected) / max(num_attempts[r], num)
    if num_accepted > OUTLIER_RATIO * num_expected:
        size.outlier_shape = key.shape_index
        costs.num_attempts = [
            min(PRIOR_ROWS, num) for num in costs.num_attempts
        ]  # Give older samples little weight: acceptance has changed.
    if all(report.is_steady_state for report in reports):
        size.record_time(key.shape_index, max(report.program_s for report in reports))


BatchSize = tuple[int, int]
"""Row bucket, and context length in tokens per row."""
DraftLengthPolicy = Callable[[StepCostModel, BatchSize, Sequence[int]], int]
"""Function ``(costs, batch, number of rows by draft limit) -> index of the next step's draft
shape``."""


def choose_largest(costs: StepCostModel, batch: BatchSize, wanted: Sequence[int]) -> int:
    """Return the index of the largest draft shape that at least one row may use."""
    return max_usable_shape(
        costs.draft_shapes, max(limit for limit, num in enumerate(wanted) if num)
    )


def adaptive(costs: StepCostModel, batch: BatchSize, wanted: Sequence[int]) -> int:
    """Return the index of the draft shape with the most expected tokens per second.

    Sometimes the index of another shape is returned, to measure or probe that shape.
    """
    size = costs.bucket_costs(*batch)
    most = choose_largest(costs, batch, wanted)
    if not size.num_steps_left:
        tokens_per_s = _tokens_per_s(size, costs.expected_tokens(), wanted)[: most + 1]
        _choose_next(size, tokens_per_s, [costs.is_dominated(size, n) for n in range(most + 1)])
    shape_index = min(size.planned_shape, most)
    size.num_steps_left = size.num_steps_left - 1
    size.num_planned_steps = size.num_planned_steps + 1
    size.num_samples[shape_index] += 1
    return shape_index


def _choose_next(
    size: BucketCosts, tokens_per_s: Sequence[float], is_dominated: Sequence[bool]
) -> None:
    """Set the shape of the next steps: one to measure or probe, or the best one."""
    indices = range(len(tokens_per_s))
    outlier_shape = size.outlier_shape
    few = [n for n in indices if size.num_samples[n] < NUM_PROFILE_STEPS and not is_dominated[n]]
    if outlier_shape is not None and outlier_shape in indices:
        size.planned_shape = outlier_shape
        size.num_steps_left = 1
    elif few:
        size.planned_shape = max(few)
        size.num_steps_left = 1
    elif (other := _shape_to_probe(size, tokens_per_s, is_dominated)) is not None:
        size.planned_shape = other
        size.num_steps_left = PROBE_STEPS if size.current_shape else NO_DRAFT_PROBE_STEPS
        size.probed_at[other] = size.num_planned_steps
    else:
        used = min(size.current_shape, indices[-1])
        best = tokens_per_s.index(max(tokens_per_s))
        if tokens_per_s[best] > tokens_per_s[used] * MIN_GAIN_TO_SWITCH:
            size.probed_at[used], size.current_shape = size.num_planned_steps, best
        is_warmup = size.num_planned_steps < NUM_WARMUP_STEPS
        size.planned_shape = size.current_shape
        size.num_steps_left = (
            1 if is_warmup else REPLAN_EVERY_STEPS - size.num_planned_steps % REPLAN_EVERY_STEPS
        )
    size.outlier_shape = None


def _tokens_per_s(
    size: BucketCosts, expected: list[list[float]], wanted: Sequence[int]
) -> list[float]:
    """Return the expected tokens per second of all rows, by shape. 0 if the time is unknown."""
    limits = [(limit, num) for limit, num in enumerate(wanted) if num]
    tokens = (
        sum(num * expected_tokens[min(len(expected_tokens) - 1, limit)] for limit, num in limits)
        for expected_tokens in expected
    )
    return [num / s if s else 0.0 for num, s in zip(tokens, size.step_s, strict=True)]


def _shape_to_probe(
    size: BucketCosts, tokens_per_s: Sequence[float], is_dominated: Sequence[bool]
) -> int | None:
    """Return the shape to probe now, or None.

    A shape is due after enough steps without any probe, if its probe would lose only a small share
    of the time since its last one. Among due shapes, the one probed longest ago is returned.

    A dominated shape is also probed if its time was measured. A temporary disturbance may have made
    that time too long, and only a probe can correct it.
    """
    current = min(size.current_shape, len(tokens_per_s) - 1)
    best = max(tokens_per_s) or 1.0
    due = []
    drafting = [] if current else [n for n in range(1, len(tokens_per_s)) if not is_dominated[n]]
    blind = max(drafting, key=tokens_per_s.__getitem__, default=None)
    num_since = size.num_planned_steps - max(size.probed_at)
    usual = PROBE_SHARE / max(1, len(tokens_per_s) - 1)
    num_steps = PROBE_STEPS if current else NO_DRAFT_PROBE_STEPS
    for shape_index in range(len(tokens_per_s)):
        if shape_index == current or (is_dominated[shape_index] and not size.step_s[shape_index]):
            continue
        every, share = (
            (NO_DRAFT_PROBE_EVERY, NO_DRAFT_PROBE_SHARE)
            if shape_index == blind
            else (PROBE_EVERY, usual)
        )
        num_free = NUM_PROBE_TIMES if current and not is_dominated[shape_index] else 1
        if (
            size.num_planned_steps < NUM_WARMUP_STEPS
            and len(size.probe_times_s[shape_index]) < num_free
        ):
            every = WARMUP_PROBE_EVERY
            share = 1e9
        lost_s = num_steps * size.step_s[shape_index] * (1 - tokens_per_s[shape_index] / best)
        unseen_s = size.step_s[current] * (size.num_planned_steps - size.probed_at[shape_index])
        if num_since >= every and lost_s <= share * unseen_s:
            due.append(shape_index)
    return min(due, key=size.probed_at.__getitem__, default=None)


FIXED = "fixed"
DRAFT_LENGTH_POLICIES: dict[str, DraftLengthPolicy] = {"adaptive": adaptive, FIXED: choose_largest}
