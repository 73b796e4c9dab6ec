"""After a gang was drained, its experts are placed according to the ranks' row counts."""

import asyncio
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tandem.cluster.control import drain
from tandem.cluster.control import rebalance as rebalance_module
from tandem.cluster.control.gang_supervisor import GangSupervisor
from tandem.cluster.control.plan import plan_gangs
from tandem.cluster.control.rebalance import (
    RebalanceResult,
    num_machines,
    rebalance_gang,
    sum_expert_rows,
)
from tandem.cluster.gateway.balance import balance_ratios
from tandem.cluster.gateway.handles import RankHandle
from tandem.core.config import load
from tandem.core.eplb import balance_ratio, rebalance
from tandem.core.errors import RankLost
from tandem.core.heartbeat import Heartbeat, RankLoad
from tandem.core.info import DECODE
from tandem.core.membership import (
    DRAINING,
    LOST,
    READY,
    STARTING,
    ExpertRows,
    Gang,
    RankInfo,
    RankSpec,
)
from tandem.core.placement import Placement
from tandem.core.progress import EngineProgress
from tandem.core.tasks import Tasks
from tests.unit.test_gang import MODEL
from tests.unit.test_gang_lives import FakeMachines, haste
from tests.waiting import until

__all__ = ["haste"]
PLAIN = Placement.in_order(2, 8, 4, 4)
SKEWED = ((900, 800, 10, 10, 10, 10, 10, 10), (5, 5, 5, 5, 5, 5, 5, 700))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance_module, "POLL_S", 0.01)
    monkeypatch.setattr(drain, "POLL_S", 0.01)


class Kept:
    """A ready gang of four ranks, each of which has counted a quarter of ``rows_LE``."""

    def __init__(self, rows_LE: tuple[tuple[int, ...], ...], drain_s: float = 60.0) -> None:
        self.machines = FakeMachines()
        config = load(
            None,
            [
                *(
                    "prefill.dp_size=4",
                    "prefill.num_redundant_experts=4",
                    "control.stop_timeout_s=0.05",
                ),
                f"control.drain_timeout_s={drain_s}",
            ],
        )
        self.states: list[str] = []
        self.change_lock = asyncio.Lock()
        self.supervisor = GangSupervisor(
            plan_gangs(config)[0],
            config,
            self.machines,
            self.machines,
            lambda: self.states.append(self.supervisor.gang.state),
        )
        self.rows = ExpertRows(rows_LE, PLAIN, 2)

    async def ready(self) -> None:
        self.supervisor.start()
        await until(lambda: self.supervisor.gang.state == READY)
        for rank in self.machines.ranks.values():
            rank.rows = self.rows


async def test_a_skewed_gang_is_drained_and_begins_anew_better_balanced() -> None:
    kept = Kept(SKEWED)
    await kept.ready()
    first = kept.machines.ranks[2]
    first.says(num_sequences=1)
    moving = asyncio.create_task(rebalance_gang(kept.supervisor, kept.change_lock))
    await until(lambda: kept.supervisor.gang.state == DRAINING)
    await first.asked(5)
    assert kept.supervisor.gang.members and not moving.done(), "it ends what it has"
    first.says(num_sequences=0)
    done = await moving
    assert kept.states[-1] == READY and {DRAINING, LOST, STARTING} <= set(kept.states)
    assert [len(missing) for _, _, missing in kept.machines.begun] == [4, 4]
    assert kept.machines.placements == [None, kept.supervisor.placement]
    counts = sum_expert_rows([kept.rows] * 4)
    assert counts == [[4 * n for n in layer] for layer in SKEWED]
    assert kept.supervisor.placement is not None
    kept.supervisor.placement.check_integrity(8)
    after = balance_ratio(counts, kept.supervisor.placement)
    assert done == RebalanceResult("prefill-0", 4 * 2495, balance_ratio(counts, PLAIN), after, True)
    assert done.after > 0.7 > 0.5 > done.before
    await kept.supervisor.stop(0.05)


async def test_who_does_not_end_in_time_is_not_waited_for() -> None:
    kept = Kept(SKEWED, drain_s=0.0)
    await kept.ready()
    kept.machines.ranks[0].says(num_sequences=3)
    assert (await rebalance_gang(kept.supervisor, kept.change_lock)).is_moved
    await kept.supervisor.stop(0.05)


@pytest.mark.parametrize("when", [DRAINING, STARTING])
async def test_others_may_change_gangs_while_one_is_waited_for(when: str) -> None:
    """The rebalance does not block them, and ends when the gang is stopped."""
    kept = Kept(SKEWED, drain_s=3600.0)
    await kept.ready()
    kept.machines.is_held = when == STARTING
    kept.machines.ranks[2].says(num_sequences=1 if when == DRAINING else 0)
    moving = asyncio.create_task(rebalance_gang(kept.supervisor, kept.change_lock))
    await until(lambda: kept.supervisor.gang.state == when)
    async with kept.change_lock:
        await kept.supervisor.stop(0.05)
    with pytest.raises(RankLost, match="prefill-0 was stopped during the call"):
        await moving


async def test_a_gang_makes_way_for_one_reason_at_a_time() -> None:
    """A machine drains while its gang is rebalanced; the new placement is kept."""
    kept = Kept(SKEWED)
    await kept.ready()
    first = kept.machines.ranks[2]
    first.says(num_sequences=1)
    moving = asyncio.create_task(rebalance_gang(kept.supervisor, kept.change_lock))
    await until(lambda: kept.supervisor.gang.state == DRAINING)
    with pytest.raises(RankLost, match="prefill-0 is draining already"):
        await drain.drain_and_restart(kept.supervisor, kept.change_lock, kept.supervisor.placement)
    first.says(num_sequences=0)
    assert (await moving).is_moved
    assert len(kept.machines.begun) == 2 and kept.supervisor.placement is not None
    await drain.drain_and_restart(kept.supervisor, kept.change_lock, kept.supervisor.placement)
    await until(lambda: len(kept.machines.begun) == 3)
    await kept.supervisor.stop(0.05)


async def test_what_gains_nothing_is_left_alone() -> None:
    kept = Kept(SKEWED)
    kept.rows = replace(kept.rows, placement=rebalance(SKEWED, 12, 2, 1, 4))
    await kept.ready()
    done = await rebalance_gang(kept.supervisor, kept.change_lock)
    assert not done.is_moved and len(kept.machines.begun) == 1 and DRAINING not in kept.states
    await kept.supervisor.stop(0.05)
    with pytest.raises(RankLost, match="prefill-0 is lost: try again"):
        await rebalance_gang(kept.supervisor, kept.change_lock)


def test_machines_count_where_each_has_as_many_ranks() -> None:
    def gang(*hosts: str) -> Gang:
        specs = [RankSpec("d", DECODE, 1, i, len(hosts), host) for i, host in enumerate(hosts)]
        members = tuple(RankInfo(spec, ("f",), "none", MODEL, 9, 9) for spec in specs)
        return Gang("d", DECODE, 1, READY, members)

    assert num_machines(gang("a", "a", "b", "b")) == 2
    assert num_machines(gang("a", "a", "a", "b")) == 1
    assert num_machines(gang("a", "a")) == 1


def test_status_tells_how_evenly_each_gangs_experts_are_used() -> None:
    gangs: dict[str, list[tuple[int, ...] | None]] = {
        "p": [(10, 0), (30, 40)],
        "d": [(5, 5), (5, 5)],
        "alone": [()],
        "silent": [None],
    }
    ranks = []
    for gang, rows_RL in gangs.items():
        for i, rows_L in enumerate(rows_RL):
            spec = RankSpec(gang, DECODE, 1, i, len(rows_RL))
            rank = RankHandle(RankInfo(spec, ("f",), "none", MODEL, 9, 9), Mock(), Tasks())
            if rows_L is not None:
                rank.heartbeat = Heartbeat(
                    EngineProgress(0, 0.0, 60.0), RankLoad(rows_by_layer=rows_L)
                )
            ranks.append(rank)
    expected = (40 * 20 / 30 + 40 * 20 / 40) / 80
    assert balance_ratios(ranks) == {"p": pytest.approx(expected), "d": 1.0}
