"""Adaptive choice of the number of drafts; the draft cache stays valid while nothing is drafted."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, IdleFirst, greedy, load
from tandem.core.draft_shapes import DraftShape, chain_shapes
from tandem.decode_node.planning.acceptance_stats import DepthTransitions
from tandem.decode_node.planning.draft_length import (
    NO_DRAFT_PROBE_SHARE,
    NO_DRAFT_PROBE_STEPS,
    NUM_PROFILE_STEPS,
    NUM_WARMUP_STEPS,
    PROBE_EVERY,
    PROBE_SHARE,
    PROBE_STEPS,
    WARMUP_PROBE_EVERY,
    StepCostModel,
    adaptive,
    choose_largest,
    record_reports,
)
from tandem.decode_node.planning.step_plan import (
    GREEDY_TRAITS,
    PROFILE,
    StepKey,
    StepPlan,
    StepProposal,
    StepReport,
    step_report,
)
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.model.drafters.base import DraftContext, DrafterState, Drafts
from tandem.model.drafters.mtp_rows import MtpCatchUp
from tandem.runtime.lockstep import LocalPlanner
from tests.unit.test_drafts import Spy, drafts_from_scratch, prompt

BUCKETS = tuple(range(1, 65))
RUNGS = DepthTransitions.from_shapes(chain_shapes(3))


IDLE = StepProposal((0, 0, 0, 0), 1)


def local_planner(*, may_profile: bool = False) -> LocalPlanner:
    return LocalPlanner(StepPlanner(BUCKETS, chain_shapes(3), adaptive, MtpCatchUp(3), may_profile))


class Server:
    """A simulated rank. Steps cost ``base + slope * rows * (drafts + 1)``, and each draft is
    accepted with probability ``a``."""

    def __init__(self, planner: LocalPlanner, a: float, base: float, slope: float) -> None:
        self.planner, self.a, self.base, self.slope = planner, a, base, slope
        self.random = random.Random(1)
        self.report: StepReport | None = None
        self.num_context = 0

    def cost(self, num_rows: int, num_drafts: int) -> float:
        return self.base + self.slope * num_rows * (num_drafts + 1)

    def step_s(self, num_rows: int, num_drafts: int, step: int) -> float:
        """Return the measured step time: the cost with 3 % of noise."""
        return self.cost(num_rows, num_drafts) * self.random.uniform(0.97, 1.03)

    def tokens(self, num_drafts: int) -> float:
        return sum(self.a**k for k in range(num_drafts + 1))

    def best(self, num_rows: int, most: int) -> int:
        worth = [self.tokens(n) / self.cost(num_rows, n) for n in range(most + 1)]
        return max(range(most + 1), key=worth.__getitem__)

    def idle(self) -> list[StepKey]:
        """Run profile steps until none is left and return their keys."""
        keys = []
        while (plan := self.planner.plan(replace(IDLE, report=self.report)).key) is not None:
            assert plan.purpose == PROFILE
            key = plan.key
            keys.append(key)
            self.report = step_report(RUNGS, plan, self.cost(key.num_rows, key.shape_index), [])
        return keys

    def run(self, limits: Sequence[int], num_steps: int) -> list[int]:
        lengths = []
        for step in range(num_steps):
            wanted = tuple(limits.count(k) for k in range(4))
            told = {"report": self.report, "num_context": self.num_context}
            plan = self.planner.plan(StepProposal(wanted, 1, **told)).key
            assert plan is not None
            n = plan.key.shape_index
            lengths.append(n)
            accepted = []
            for limit in limits:
                k = 0
                while k < min(n, limit) and self.random.random() < self.a:
                    k += 1
                accepted.append((limit, range(1, k + 1)))
            self.report = step_report(RUNGS, plan, self.step_s(len(limits), n, step), accepted)
        return lengths

    def reached(self, num_rows: int, num_steps: int) -> float:
        """Return the mean rate over ``num_steps`` steps, divided by the rate of the best length."""
        lengths = self.run([3] * num_rows, num_steps)
        rates = [self.tokens(n) / self.cost(num_rows, n) for n in lengths]
        best = self.best(num_rows, 3)
        worth = self.tokens(best) / self.cost(num_rows, best)
        return sum(rates) / len(rates) / worth


@pytest.mark.parametrize("a", [0.2, 0.55, 0.9])
@pytest.mark.parametrize(("base", "slope"), [(1.0, 0.001), (1.0, 0.05), (0.05, 1.0)])
def test_the_length_that_pays_is_found_for_each_batch_size(
    a: float, base: float, slope: float
) -> None:
    server = Server(local_planner(), a, base, slope)
    for num_rows in (1, 8, 32):
        server.run([3] * num_rows, 300)
        assert server.reached(num_rows, 300) > 0.92


class Long(Server):
    """Each row reads its context once, however many drafts it verifies."""

    def cost(self, num_rows: int, num_drafts: int) -> float:
        return super().cost(num_rows, num_drafts) + 0.01 * num_rows * self.num_context


def test_long_contexts_have_a_length_of_their_own() -> None:
    """Drafts pay if reading the context dominates. Once both context lengths were measured, the
    first step after a change uses the best number of drafts."""
    server, lengths = Long(local_planner(may_profile=True), 0.5, base=0.05, slope=1.0), {}
    server.idle()
    for num_context in (10, 2000, 10, 2000, 3000, 10):
        server.num_context = num_context
        lengths[num_context] = server.run([3] * 8, 500)
    assert server.best(8, 3) == 0
    assert lengths[10].count(0) > 450 and lengths[10][:50].count(0) > 45
    assert lengths[2000].count(3) > 450 and lengths[2000][:50].count(3) > 40
    assert lengths[3000][:50].count(3) > 35


def test_what_is_known_of_the_nearest_context_is_believed_at_first() -> None:
    server = Server(local_planner(may_profile=True), 0.9, base=1.0, slope=0.001)
    server.idle()
    first = server.run([3], 300)
    server.num_context = 5000
    other = server.run([3], 40)
    assert first.count(3) > 240 and other.count(3) >= 40 - 3 * PROBE_STEPS
    sizes = server.planner._decide._costs.buckets  # type: ignore[attr-defined]
    assert {context for rows, context in sizes if rows == 1} == {0, 4}


def test_a_plan_tells_the_longest_context_and_a_report_is_of_its_plan() -> None:
    planner = StepPlanner(BUCKETS, chain_shapes(3), adaptive, MtpCatchUp(3))
    asked = [StepProposal((0, 0, 0, 1), 1, num_context=context) for context in (700, 5000)]
    plan = planner([*asked, IDLE])
    assert plan is not None and plan.num_context == 5000
    report = step_report(RUNGS, plan, 0.5, [])
    assert planner([replace(IDLE, report=report)]) is None
    assert planner._costs.bucket_costs(1, 5000).step_s[plan.key.shape_index] == 0.5
    assert planner._costs.buckets.keys() == {(1, 4)}


class Shared(Server):
    """A machine whose speed varies by a factor of two and which stalls now and then."""

    def step_s(self, num_rows: int, num_drafts: int, step: int) -> float:
        drift = 1.4 ** math.sin(step / 50)
        stop = 4 if self.random.random() < 0.03 else 1
        return super().step_s(num_rows, num_drafts, step) * drift * stop


@pytest.mark.parametrize("a", [0.0, pytest.param(0.3, marks=pytest.mark.slow), 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.02, pytest.param(0.1, marks=pytest.mark.slow), 0.2])
def test_a_machine_whose_speed_varies_does_not_hide_the_length_that_pays(
    a: float, slope: float
) -> None:
    server = Shared(local_planner(may_profile=True), a, 1.0, slope)
    server.idle()
    reached = [server.reached(num_rows, 1500) for num_rows in (1, 8, 32)]
    assert min(reached) > 0.95 and sum(reached) / 3 > 0.97


class Disturbed(Server):
    """A machine that other work slows down, for eight steps at a time."""

    num_left = 0

    def step_s(self, num_rows: int, num_drafts: int, step: int) -> float:
        begins = 8 * (self.random.random() < 0.03)
        self.num_left = self.num_left - 1 if self.num_left else begins
        noise = self.random.lognormvariate(0, 0.1)
        return super().step_s(num_rows, num_drafts, step) * noise * (3 if self.num_left else 1)


@pytest.mark.parametrize("a", [0.3, 0.9])
@pytest.mark.parametrize("slope", [pytest.param(0.1, marks=pytest.mark.slow), 0.2])
def test_other_work_during_a_look_does_not_choose_the_length(a: float, slope: float) -> None:
    reached = list[float]()
    for seed in range(3):
        server = Disturbed(local_planner(may_profile=True), a, 1.0, slope)
        server.random = random.Random(seed)
        server.idle()
        reached += [server.reached(num_rows, 2000) for num_rows in (1, 8, 32)]
    assert sum(reached) / len(reached) > 0.97


def test_what_steps_cost_is_measured_while_nobody_has_work() -> None:
    """Step times are profiled while the rank is idle. The right number of drafts is then planned
    from the first step on."""
    server = Server(local_planner(may_profile=True), 0.0, 1.0, 0.2)
    keys = server.idle()
    assert {(key.num_rows, key.shape_index) for key in keys} == {
        (rows, n) for rows in (1, 3, 6, 12, 24, 48, 64) for n in range(4)
    }
    assert len(keys) == 7 * 4 * NUM_PROFILE_STEPS and {key.traits for key in keys} == {
        GREEDY_TRAITS
    }
    lengths = server.run([3] * 40, 3000)
    (first, most), *looks = [(i, n) for i, n in enumerate(lengths) if n]
    assert (first, most) == (0, 3), "all count as accepted until a step was read"
    looked = Counter(n for _, n in looks)
    assert looked[1] > looked[2] >= looked[3] > 0, "the worst most seldom"
    for n, share in ((1, NO_DRAFT_PROBE_SHARE), (2, PROBE_SHARE / 3), (3, PROBE_SHARE / 3)):
        lost = (looked[n] - NO_DRAFT_PROBE_STEPS) * (server.cost(40, n) - server.cost(40, 0))
        assert lost <= share * len(lengths) * server.cost(40, 0), "but for the first"
    assert server.idle() == []


@pytest.mark.parametrize(("cost", "timed"), [(2.9, {0, 1, 2}), (3.1, {0, 1})])
def test_levels_that_lose_whatever_is_accepted_are_not_timed(cost: float, timed: set[int]) -> None:
    """The second shape costs no less than the first and is no deeper. Shapes that were timed are
    probed now and then, whatever they measured."""
    levels = (*chain_shapes(0), DraftShape(4, 2, None), DraftShape(8, 2, None))
    costs, found, lengths = StepCostModel.unprofiled(levels), set(), []

    def run(draft_shape: int) -> None:
        tried = (0,) * costs.transitions.num_visible[draft_shape]
        step_s = cost if draft_shape else 1.0
        record_reports(costs, [StepReport(StepKey(1, draft_shape, 0), step_s, tried, tried)])

    while (untried := costs.next_unprofiled([1])) is not None:
        found.add(untried[1])
        run(untried[1])
    assert found == timed
    for _ in range(10 * PROBE_EVERY):
        lengths.append(adaptive(costs, (1, 0), (0, 0, 1)))
        run(lengths[-1])
    assert {*lengths} == timed
    if cost > 3:  # three tokens each, which take 3 without drafts
        assert lengths.count(1) * (cost - 3) <= PROBE_SHARE * len(lengths)


def test_times_that_were_a_moments_are_not_believed_for_ever() -> None:
    """Disturbed profile times are corrected later. They made drafts seem to lose even if all were
    accepted."""
    server = Server(local_planner(may_profile=True), 0.9, 1.0, 0.03)
    true_cost = server.cost
    server.cost = lambda rows, n: true_cost(rows, n) * (1 + n)  # type: ignore[method-assign]
    server.idle()
    server.cost = true_cost  # type: ignore[method-assign]
    lengths = server.run([3] * 8, 3000)
    assert lengths[:WARMUP_PROBE_EVERY].count(0) == WARMUP_PROBE_EVERY
    assert lengths[-100:].count(server.best(8, 3)) >= 95


def test_what_takes_long_beyond_measure_is_looked_at_again() -> None:
    """A shape that was measured a hundred times too slow, as on a shared core, is probed again."""
    server = Server(local_planner(may_profile=True), 0.9, 1.0, 0.001)
    server.idle()
    decide = server.planner._decide
    assert isinstance(decide, StepPlanner)
    size = decide._costs.bucket_costs(8)
    size.current_shape, size.step_s = 0, [n * 100 for n in size.step_s]
    size.step_s[0] /= 100
    assert server.run([3] * 8, 2000)[200:].count(3) >= 0.97 * 1800


def test_a_look_that_other_work_hit_is_not_believed_alone() -> None:
    """A single probe that other work disturbed is not trusted. Otherwise each shape would seem
    useless, and be probed only once in thousands of steps."""
    server = Server(local_planner(may_profile=True), 0.0, 1.0, 0.05)
    server.idle()
    quiet = server.step_s
    server.step_s = lambda rows, n, step: quiet(rows, n, step) * (10 if n else 1)  # type: ignore[method-assign]
    looked = server.run([3] * 8, 4 * WARMUP_PROBE_EVERY)
    assert {*looked[4:]} == {0, 1, 2, 3}
    server.step_s = quiet  # type: ignore[method-assign]
    assert max(server.run([3] * 8, 300)[-100:]) < 3
    server.a = 0.9
    assert server.run([3] * 8, 300)[-50:].count(server.best(8, 3)) >= 40


def test_what_was_measured_while_idle_is_no_look() -> None:
    """The last profile step does not count as a probe. It precedes cheaper steps, because contexts
    are short at first."""
    costs, cost_s = StepCostModel.unprofiled(chain_shapes(3)), (1.0, 1.2, 1.5, 2.4)

    def run(draft_shape: int, factor: float) -> None:
        tried = (0,) * costs.transitions.num_visible[draft_shape]
        record_reports(
            costs,
            [StepReport(StepKey(8, draft_shape, 0), cost_s[draft_shape] * factor, tried, tried)],
        )

    while (untried := costs.next_unprofiled([8])) is not None:
        run(untried[1], 2.0)
    for _ in range(WARMUP_PROBE_EVERY):
        draft_shape = adaptive(costs, (8, 0), (0, 0, 0, 8))
        assert draft_shape == 2, "the best of those tried"
        run(draft_shape, 1.0)
    size = costs.bucket_costs(8)
    assert size.step_s == [2 * one_s for one_s in cost_s] and not any(size.probe_times_s)


def test_work_comes_before_what_is_not_measured_yet() -> None:
    planner = local_planner(may_profile=True)
    assert planner.plan(IDLE).key == StepPlan(StepKey(1, 0, 0), PROFILE)
    assert planner.plan(replace(IDLE, num_rows_by_limit=(0, 0, 0, 2))).key == StepPlan(
        StepKey(2, 3, 4)
    )
    assert planner.plan(IDLE).key == StepPlan(StepKey(1, 0, 0), PROFILE)


@pytest.mark.parametrize("overlap", [False, True])
def test_trials_leave_no_trace(tmp_path: Path, overlap: bool) -> None:
    """Profile steps change no cache page except the dummy page, and no later output."""
    tiny.write_tiny(tmp_path, seed=11)
    loaded = load(tmp_path)
    measured = Bench(loaded, overlap=overlap, draft_length="adaptive", measures=True)
    before = [cache.clone() for cache in measured.all_caches()]
    while measured.decode.has_work():
        measured.decode.step()
    num_sizes, num_levels = 3, 2  # more expensive shapes are not timed
    assert measured.decode.num_steps >= num_sizes * num_levels * NUM_PROFILE_STEPS
    for cache, clean in zip(measured.all_caches(), before, strict=True):
        assert not torch.equal(cache[0], clean[0]) and torch.equal(cache[1:], clean[1:])
    asked = [greedy(f"r{i}", prompt(5 + i), 20, ignore_eos=True) for i in range(3)]
    assert measured.generate(*asked) == Bench(loaded).generate(*asked)
    measured.check_empty()


def test_a_trial_that_fails_ends_the_measuring_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile step that fails, for example for lack of memory, ends only the profiling."""
    tiny.write_tiny(tmp_path, seed=11)
    loaded = load(tmp_path)
    bench = Bench(loaded, draft_length="adaptive", measures=True)
    bench.decode.step()
    error = MemoryError("too large")
    with monkeypatch.context() as patch:
        patch.setattr(type(bench.decode._launcher.rows), "row_indices", Mock(side_effect=error))
        patch.setattr("tandem.decode_node.program.programs.decode_step", Mock(side_effect=error))
        with pytest.raises(MemoryError):
            bench.decode.step()
    bench.decode.fail(error)
    assert not bench.decode.has_work()
    asked = [greedy("r", prompt(5), 20, ignore_eos=True)]
    assert bench.generate(*asked) == Bench(loaded).generate(*asked)
    bench.check_empty()


def test_drafts_stop_where_they_do_not_pay_and_come_back_where_they_do() -> None:
    server = Server(local_planner(), 0.6, 1.0, 0.2)
    assert server.run([3] * 2, NUM_WARMUP_STEPS + 100)[-100:].count(0) <= PROBE_STEPS
    busy = server.run([3] * 64, 300)[-128:]
    assert busy.count(0) >= 120 and any(busy)
    assert server.run([3] * 2, 40).count(0) <= 4


def test_acceptance_that_rises_is_noticed_at_length_zero() -> None:
    server = Server(local_planner(), 0.05, 1.0, 0.1)
    assert server.run([3] * 4, 400)[-100:].count(0) >= 90
    server.a = 0.95
    assert server.run([3] * 4, 4000)[-100:].count(3) >= 90


def test_what_is_blind_looks_soon_again() -> None:
    """While nothing is drafted, only probes can detect that acceptance has changed in many rows.
    They come soon enough."""
    server = Server(local_planner(may_profile=True), 0.05, 1.0, 0.05)
    server.idle()
    assert server.run([3] * 32, 400)[-100:].count(0) >= 90
    server.a = 0.95
    assert server.run([3] * 32, 200)[-100:].count(0) <= PROBE_STEPS


def test_limits_of_requests_are_kept() -> None:
    server = Server(local_planner(), 0.9, 1.0, 0.0)
    assert set(server.run([0, 0], 100)) == {0}
    assert set(server.run([1, 0], 100)) <= {0, 1}
    assert choose_largest(StepCostModel.unprofiled(chain_shapes(3)), 3, (1, 1, 1, 0)) == 2


def test_shares_count_only_rows_that_came_so_far() -> None:
    costs = StepCostModel.unprofiled(chain_shapes(2))
    rows = [(2, [1, 2]), (2, []), (1, [1]), (0, [])]
    report = step_report(
        DepthTransitions.from_shapes(chain_shapes(2)), StepPlan(StepKey(4, 2, 3)), 1.0, rows
    )
    for _ in range(2000):
        record_reports(costs, [report])
    assert costs.expected_tokens()[1][1] == pytest.approx(1 + 2 / 3, abs=0.02)
    assert costs.expected_tokens()[2][2] == pytest.approx(1 + 2 / 3 + 2 / 3, abs=0.02)


@pytest.mark.parametrize("handover_hidden", [True, False])
@pytest.mark.parametrize("num_idle", [1, 3, 15, 16, 40])
def test_drafts_after_steps_without_are_those_of_a_warm_cache(
    tmp_path: Path, num_idle: int, handover_hidden: bool
) -> None:
    """Each draft equals that of a drafter without a cache, in the first step after ``num_idle``
    steps without drafts and in all later ones. Without drafts, the drafter catches up once in 16
    steps."""
    tiny.write_tiny(tmp_path, seed=11)
    loaded = load(tmp_path)
    spy = Spy(loaded.drafter)
    bench = Bench(
        replace(loaded, drafter=spy),
        num_drafts=3,
        handover_hidden=handover_hidden,
        length=IdleFirst(num_idle),
    )
    ids = prompt(13)
    first, _ = bench.start(greedy("r", ids, num_idle + 24, ignore_eos=True))
    known, num_checked = [*ids, first], 0
    while bench.decode.has_work():
        before = len(spy.drafts)
        bench.decode.step()
        if len(spy.drafts) > before and spy.drafts[-1][0]:
            with torch.inference_mode():
                expected = drafts_from_scratch(loaded, known, 3)
            assert spy.drafts[-1][0] == expected
            num_checked += 3
        known += bench.frames[-1].updates[0].token_ids
    assert num_checked >= 18 and spy.drafts.count([[]]) == num_idle // 16


def test_a_cold_cache_would_be_noticed(tmp_path: Path) -> None:
    tiny.write_tiny(tmp_path, seed=11)
    loaded = load(tmp_path)

    class Lazy(Spy):
        """Skips pass 1 when nothing is drafted."""

        def draft(
            self,
            state: DrafterState,
            context: DraftContext,
            draft_shape: DraftShape,
            catch_up_width: int,
            caches,
        ) -> Drafts:
            if draft_shape.depth == 0:
                return Drafts(context.last_B1[:, :0])
            return super().draft(state, context, draft_shape, catch_up_width, caches)

    spy = Lazy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=3, length=IdleFirst(20))
    ids = prompt(13)
    first, _ = bench.start(greedy("r", ids, 60, ignore_eos=True))
    known, num_wrong = [*ids, first], 0
    while bench.decode.has_work():
        bench.decode.step()
        if spy.drafts:
            with torch.inference_mode():
                num_wrong += spy.drafts[-1][0] != drafts_from_scratch(loaded, known, 3)
        known += bench.frames[-1].updates[0].token_ids
    assert num_wrong
