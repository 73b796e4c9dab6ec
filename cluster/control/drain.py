"""A gang makes way: it gets nothing new, and what is begun ends there or goes on elsewhere."""

import asyncio
import logging

from tandem.cluster.control.gang import POLL_S, GangKeeper
from tandem.core.errors import RankLost
from tandem.core.placement import Placement
from tandem.core.tasks import until

log = logging.getLogger(__name__)


async def renew(keeper: GangKeeper, changing: asyncio.Lock, placement: Placement | None) -> None:
    """Begin its next life, with experts placed so, once its answers have ended, or after
    ``control.drain_timeout_s``. ``changing`` is held while it is stopped and started, not while it
    is waited for. Raises RankLost if somebody stopped it meanwhile, or has it make way already."""
    control = keeper.config.control
    if keeper.is_draining:
        raise RankLost(f"{keeper.gang.name} makes way already: try again when it is ready")
    keeper.drain()
    await asyncio.sleep(2 * POLL_S)  # what was routed before gateways knew arrives meanwhile
    await until(lambda: not num_held(keeper), control.drain_timeout_s - 2 * POLL_S, POLL_S)
    if num_held(keeper):
        log.warning("%s: %d sequences go on elsewhere", keeper.gang.name, num_held(keeper))
    async with changing:
        check_kept(keeper)
        await keeper.stop(control.stop_timeout_s)
        keeper.placement = placement
        keeper.start()


def check_kept(keeper: GangKeeper) -> None:
    if not keeper.is_kept:
        raise RankLost(f"{keeper.gang.name} was stopped meanwhile")


def num_held(keeper: GangKeeper) -> int:
    """Sequences of all ranks, when they were last asked."""
    return sum(state.num_held for state in keeper.ranks.states.values())
