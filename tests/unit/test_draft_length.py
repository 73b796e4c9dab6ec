"""As many drafts as pay; and the draft cache stays warm while there are none."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_node.buckets import Buckets
from decode_node.draft_length import most_wanted, no_costs, recorded
from decode_node.plan import Proposal, Report, StepKey, report_of
from decode_node.planner import StepPlanner
from model.drafters.base import Drafts, DraftState
from runtime.lockstep import LocalPlanner
from tests import tiny
from tests.engines import Bench, IdleFirst, greedy, load
from tests.unit.test_drafts import Spy, drafts_from_scratch, prompt

BUCKETS = Buckets(tuple(range(1, 65)))


def local_planner() -> LocalPlanner:
    return LocalPlanner(StepPlanner(BUCKETS, 3, "by_load"))


class Server:
    """Steps that cost ``base + slope * rows * (drafts + 1)`` and drafts of acceptance ``a``."""

    def __init__(self, planner: LocalPlanner, a: float, base: float, slope: float) -> None:
        self.planner, self.a, self.base, self.slope = planner, a, base, slope
        self.random = random.Random(1)
        self.report: Report | None = None

    def cost(self, num_rows: int, num_drafts: int) -> float:
        return self.base + self.slope * num_rows * (num_drafts + 1)

    def tokens(self, num_drafts: int) -> float:
        return sum(self.a**k for k in range(num_drafts + 1))

    def best(self, num_rows: int, most: int) -> int:
        worth = [self.tokens(n) / self.cost(num_rows, n) for n in range(most + 1)]
        return max(range(most + 1), key=worth.__getitem__)

    def run(self, limits: Sequence[int], num_steps: int) -> list[int]:
        lengths = []
        for _ in range(num_steps):
            wanted = tuple(limits.count(k) for k in range(4))
            key = self.planner.plan(Proposal(wanted, 1, True, self.report)).key
            assert key is not None
            n = key.num_drafts
            lengths.append(n)
            accepted = []
            for limit in limits:
                k = 0
                while k < min(n, limit) and self.random.random() < self.a:
                    k += 1
                accepted.append((limit, k))
            step_s = self.cost(len(limits), n) * self.random.uniform(0.97, 1.03)
            self.report = report_of(key, step_s, accepted)
        return lengths


@pytest.mark.parametrize("a", [0.2, 0.55, 0.9])
@pytest.mark.parametrize(("base", "slope"), [(1.0, 0.001), (1.0, 0.05), (0.05, 1.0)])
def test_the_length_that_pays_is_found_for_each_batch_size(
    a: float, base: float, slope: float
) -> None:
    server = Server(local_planner(), a, base, slope)
    for num_rows in (1, 8, 32):
        lengths = server.run([3] * num_rows, 600)[300:]
        rates = [server.tokens(n) / server.cost(num_rows, n) for n in lengths]
        best = server.best(num_rows, 3)
        reached = sum(rates) / len(rates)
        assert reached > 0.92 * server.tokens(best) / server.cost(num_rows, best)


def test_drafts_stop_where_they_do_not_pay_and_come_back_where_they_do() -> None:
    server = Server(local_planner(), 0.6, 1.0, 0.2)
    assert server.run([3] * 2, 300)[-20:].count(0) == 0
    busy = server.run([3] * 64, 300)[-128:]
    assert busy.count(0) >= 120 and any(busy)
    assert server.run([3] * 2, 40).count(0) <= 4


def test_acceptance_that_rises_is_noticed_at_length_zero() -> None:
    server = Server(local_planner(), 0.05, 1.0, 0.1)
    assert server.run([3] * 4, 400)[-100:].count(0) >= 90
    server.a = 0.95
    assert server.run([3] * 4, 4000)[-100:].count(3) >= 90


def test_limits_of_requests_are_kept() -> None:
    server = Server(local_planner(), 0.9, 1.0, 0.0)
    assert set(server.run([0, 0], 100)) == {0}
    assert set(server.run([1, 0], 100)) <= {0, 1}
    assert most_wanted(no_costs(3), [], 3, (1, 1, 1, 0))[0] == 2


def test_shares_count_only_rows_that_came_so_far() -> None:
    costs = no_costs(2)
    report = report_of(StepKey(4, 2, 3), 1.0, [(2, 2), (2, 0), (1, 1), (0, 0)])
    for _ in range(2000):
        costs = recorded(costs, [report])
    assert costs.expected_tokens(1) == pytest.approx(1 + 2 / 3, abs=0.02)
    assert costs.expected_tokens(2) == pytest.approx(1 + 2 / 3 + 2 / 3, abs=0.02)


@pytest.mark.parametrize("num_idle", [1, 2, 20])
def test_drafts_after_steps_without_are_those_of_a_warm_cache(
    tmp_path: Path, num_idle: int
) -> None:
    """Exactly: each equals the draft of a drafter without any cache, in the step after 20 at n = 0
    as in all later ones."""
    tiny.write_tiny(tmp_path, seed=11)
    loaded = load(tmp_path)
    spy = Spy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=3, planner=IdleFirst(num_idle, 3))
    ids = prompt(13)
    first, _ = bench.start(greedy("r", ids, num_idle + 24, ignore_eos=True))
    known, num_checked = [*ids, first], 0
    while bench.decode.has_work():
        bench.decode.step()
        with torch.inference_mode():
            expected = drafts_from_scratch(loaded, known, len(spy.drafts[-1][0]))
        assert spy.drafts[-1][0] == expected
        num_checked += len(expected)
        known += bench.frames[-1].updates[0].token_ids
    assert num_checked >= 18


def test_a_cold_cache_would_be_noticed(tmp_path: Path) -> None:
    tiny.write_tiny(tmp_path, seed=11)
    loaded = load(tmp_path)

    class Lazy(Spy):
        """Skips pass 1 when nothing is drafted."""

        def draft(self, state: DraftState, num_drafts: int, caches) -> Drafts:
            if num_drafts == 0:
                return Drafts(state.tokens_BM[:, :0])
            return super().draft(state, num_drafts, caches)

    spy = Lazy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=3, planner=IdleFirst(20, 3))
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
