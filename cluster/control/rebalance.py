"""Rebalancing of experts: compute a placement from row counts, restart the gang with it.

The gang is drained first. Callers rebalance one gang after the other.
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
"""Minimum gain of the balance ratio for which a gang is restarted."""


@dataclass(frozen=True, slots=True)
class RebalanceResult:
    """Result of a rebalance.

    Attributes:
        num_rows: Number of rows counted.
        before: Balance ratio of the counted rows in the previous placement.
        after: Balance ratio in the best placement.
        is_moved: Whether the gang was restarted with the best placement.
    """

    gang: str
    num_rows: int
    before: float
    after: float
    is_moved: bool


async def rebalance_gang(supervisor: GangSupervisor, change_lock: asyncio.Lock) -> RebalanceResult:
    """Rebalance the experts of a gang. For ``change_lock`` see ``drain_and_restart``.

    Raises RankLost if the gang is not ready, and the error of its next epoch if that fails to
    start.
    """
    gang = supervisor.gang
    if gang.state != READY:
        raise RankLost(f"{gang.name} is {gang.state}: try again when it is ready")
    rows_of_ranks = await supervisor.ranks.expert_rows()
    counts_LE = sum_expert_rows(rows_of_ranks)
    placement = rows_of_ranks[0].placement
    best = rebalance(
        counts_LE=counts_LE,
        num_slots=placement.num_slots,
        num_groups=rows_of_ranks[0].num_groups,
        num_machines=num_machines(gang),
        num_ranks=placement.num_ranks,
    )
    before = balance_ratio(counts_LE, placement)
    after = balance_ratio(counts_LE, best)
    is_moved = after > before + MIN_GAIN
    if is_moved:
        await drain_and_restart(supervisor, change_lock, best)
        await _wait_until_ready(supervisor)
    return RebalanceResult(
        gang=gang.name,
        num_rows=sum(map(sum, counts_LE)),
        before=before,
        after=after,
        is_moved=is_moved,
    )


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
    """Return the rows of all ranks together, by layer and expert."""
    layers = zip(*(rows.rows_LE for rows in rows_of_ranks), strict=True)
    return [[sum(counts) for counts in zip(*ranks, strict=True)] for ranks in layers]


def num_machines(gang: Gang) -> int:
    """Return the number of machines of the gang, 1 if its ranks are not spread evenly."""
    hosts = Counter(member.spec.host for member in gang.members)
    return len(hosts) if len(set(hosts.values())) == 1 else 1
