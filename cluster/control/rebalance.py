"""Experts where they balance best: one placement from what a gang has counted, and its next life.

The gang is drained and begun anew with it; who asks does so for one gang after the other.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cluster.control.drain import check_supervised, drain_and_restart
from tandem.cluster.control.gang_supervisor import POLL_S, GangSupervisor
from tandem.core.eplb import balance_ratio, rebalance
from tandem.core.errors import RankLost
from tandem.core.membership import READY, ExpertRows, Gang
from tandem.core.schema import to_error

MIN_GAIN = 0.01
"""Of the ratio, for which a gang is begun anew."""


@dataclass(frozen=True, slots=True)
class RebalanceResult:
    """``num_rows`` were counted; their balance ratio as experts lay ``before`` and as they would
    lie ``after``. The gang was begun anew if ``is_moved``."""

    gang: str
    num_rows: int
    before: float
    after: float
    is_moved: bool


async def rebalance_gang(supervisor: GangSupervisor, change_lock: asyncio.Lock) -> RebalanceResult:
    """See ``drain_and_restart`` for ``change_lock``. Raises RankLost while the gang is not ready,
    and what ended its next life."""
    gang = supervisor.gang
    if gang.state != READY:
        raise RankLost(f"{gang.name} is {gang.state}: try again when it is ready")
    rows_of_ranks = await supervisor.ranks.expert_rows()
    counts_LE, placement = sum_expert_rows(rows_of_ranks), rows_of_ranks[0].placement
    best = rebalance(
        counts_LE,
        placement.num_slots,
        rows_of_ranks[0].num_groups,
        num_machines(gang),
        placement.num_ranks,
    )
    before, after = balance_ratio(counts_LE, placement), balance_ratio(counts_LE, best)
    is_moved = after > before + MIN_GAIN
    if is_moved:
        await drain_and_restart(supervisor, change_lock, best)
        await _wait_until_ready(supervisor)
    return RebalanceResult(gang.name, sum(map(sum, counts_LE)), before, after, is_moved)


async def _wait_until_ready(supervisor: GangSupervisor) -> None:
    while supervisor.gang.state != READY:
        if supervisor.gang.failure is not None:
            raise to_error(supervisor.gang.failure)
        check_supervised(supervisor)
        if waits := [
            state.wait_reason for state in supervisor.ranks.states.values() if state.wait_reason
        ]:
            raise RankLost(f"{supervisor.gang.name}: {waits[0]}")
        await asyncio.sleep(POLL_S)


def sum_expert_rows(rows_of_ranks: Sequence[ExpertRows]) -> list[list[int]]:
    """Of all ranks, by layer and expert."""
    layers = zip(*(rows.rows_LE for rows in rows_of_ranks), strict=True)
    return [[sum(counts) for counts in zip(*ranks, strict=True)] for ranks in layers]


def num_machines(gang: Gang) -> int:
    """That its ranks lie on, 1 where they are not spread evenly."""
    hosts = Counter(member.spec.host for member in gang.members)
    return len(hosts) if len(set(hosts.values())) == 1 else 1
