"""Draining of a gang.

The gang gets no new sequences. Its existing ones finish or migrate to another gang.
"""

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
    """Drain a gang and restart it with the experts placed as in ``placement``.

    Waits until its sequences have ended, at most ``control.drain_timeout_s``. Holds ``change_lock``
    only while stopping and starting the gang, not while waiting. Raises RankLost if the gang was
    stopped during the wait or is already draining.
    """
    control = supervisor.config.control
    if supervisor.is_draining:
        raise RankLost(f"{supervisor.gang.name} is draining already; try again when it is ready")
    supervisor.drain()
    await asyncio.sleep(2 * POLL_S)  # requests routed before gateways knew still arrive
    await poll_until(
        lambda: not count_sequences(supervisor), control.drain_timeout_s - 2 * POLL_S, POLL_S
    )
    if count_sequences(supervisor):
        log.warning(
            "%s: %d sequences did not end in time and migrate to other ranks",
            supervisor.gang.name,
            count_sequences(supervisor),
        )
    async with change_lock:
        check_supervised(supervisor)
        await supervisor.stop(control.stop_timeout_s)
        supervisor.placement = placement
        supervisor.start()


def check_supervised(supervisor: GangSupervisor) -> None:
    if not supervisor.is_supervised:
        raise RankLost(f"{supervisor.gang.name} was stopped during the call")


def count_sequences(supervisor: GangSupervisor) -> int:
    """Return the number of sequences on all ranks of the gang, as of the last poll."""
    return sum(state.num_sequences for state in supervisor.ranks.states.values())
