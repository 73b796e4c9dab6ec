"""A gang makes way: it gets nothing new, and what is begun ends there or goes on elsewhere."""

import asyncio
import logging

from tandem.cluster.control.gang_supervisor import POLL_S, GangSupervisor
from tandem.core.errors import RankLost
from tandem.core.placement import Placement
from tandem.core.tasks import poll_until

log = logging.getLogger(__name__)


async def drain_and_restart(
    supervisor: GangSupervisor, change_lock: asyncio.Lock, placement: Placement | None
) -> None:
    """Begin its next life, with experts placed so, once its answers have ended, or after
    ``control.drain_timeout_s``. ``change_lock`` is held while it is stopped and started, not while
    it is waited for. Raises RankLost if somebody stopped it meanwhile, or has it make way
    already."""
    control = supervisor.config.control
    if supervisor.is_draining:
        raise RankLost(f"{supervisor.gang.name} makes way already: try again when it is ready")
    supervisor.drain()
    await asyncio.sleep(2 * POLL_S)  # what was routed before gateways knew arrives meanwhile
    await poll_until(
        lambda: not count_sequences(supervisor), control.drain_timeout_s - 2 * POLL_S, POLL_S
    )
    if count_sequences(supervisor):
        log.warning(
            "%s: %d sequences go on elsewhere", supervisor.gang.name, count_sequences(supervisor)
        )
    async with change_lock:
        check_supervised(supervisor)
        await supervisor.stop(control.stop_timeout_s)
        supervisor.placement = placement
        supervisor.start()


def check_supervised(supervisor: GangSupervisor) -> None:
    if not supervisor.is_supervised:
        raise RankLost(f"{supervisor.gang.name} was stopped meanwhile")


def count_sequences(supervisor: GangSupervisor) -> int:
    """Sequences of all ranks, when they were last asked."""
    return sum(state.num_sequences for state in supervisor.ranks.states.values())
