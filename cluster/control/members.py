"""A gateway's client of the controller: the latest membership, and control calls to its ranks."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, RayError

from tandem.cluster.control.actors import NAMESPACE, RayControl
from tandem.cluster.control.controller import Controller
from tandem.cluster.control.machines import (
    CONTROLLER,
    DETACHED_OPTIONS,
    find_ranks,
    remove_placement_groups,
)
from tandem.cluster.control.ray_private import HEAD_RESOURCE
from tandem.cluster.control.rebalance import RebalanceResult
from tandem.core.config import TandemConfig
from tandem.core.config_shared import shared_digest
from tandem.core.control import Control
from tandem.core.errors import TandemError
from tandem.core.membership import LOST, READY, STARTING, Gang, Membership, RankInfo, RankSpec
from tandem.core.schema import decode, to_error
from tandem.core.tasks import run_in_thread

LONG_POLL_S = 30.0
STOP_GRACE_S = 5.0
RETRY_PAUSE_S = 0.5
log = logging.getLogger(__name__)
OnProgress = Callable[[str], None]


class RayMembers:
    """Client of the controller; created by ``attach``.

    ``membership`` is the latest snapshot received. It does not change while the controller restarts
    or after the cluster was stopped.
    """

    def __init__(self, config: TandemConfig, controller: Any, membership: Membership) -> None:
        self.membership = membership
        self._config_json = config.model_dump_json()
        self._config = shared_digest(config)
        self._controller = controller

    @classmethod
    async def attach(cls, config: TandemConfig) -> Self:
        """Join the cluster of this Ray, or create it if there is none.

        Raises ValueError naming every key in which the cluster's config differs.
        """
        controller = await run_in_thread(_create_controller)
        data = await controller.attach.remote(config.model_dump_json())
        return cls(config, controller, decode(Membership, data))

    async def wait_for_change(self, after_version: tuple[int, int]) -> Membership:
        """Wait for a snapshot later than ``after_version`` and return the latest one."""
        while self.membership.version <= after_version:
            try:
                version = self.membership.version
                data = await self._controller.membership.remote(*version, LONG_POLL_S)
                snapshot = decode(Membership, data)
                if snapshot.version[0] > version[0]:
                    # A restarted controller that found no rank alive needs the config again.
                    data = await self._controller.attach.remote(self._config_json)
                    snapshot = decode(Membership, data)
                if snapshot.config not in ("", self._config):
                    snapshot = await self._without_gangs(snapshot)
                self.membership = max(self.membership, snapshot, key=attrgetter("version"))
            except ActorDiedError:
                # Only `tandem stop` ends the controller. A later cluster is a different one.
                log.error("the cluster was stopped")
                await asyncio.Event().wait()
            except (RayError, TandemError, ValueError) as error:
                log.warning(
                    "cannot get the cluster membership from the controller, trying again: %s", error
                )
                await asyncio.sleep(RETRY_PAUSE_S)
        return self.membership

    async def _without_gangs(self, snapshot: Membership) -> Membership:
        """Return ``snapshot`` without its gangs, and log which keys of its configuration differ.

        This gateway's limits and answers follow its own configuration, so it cannot use these
        gangs.
        """
        try:
            decode(Membership, await self._controller.attach.remote(self._config_json))
        except ValueError as error:
            log.error("the cluster was replaced; this gateway serves no more requests: %s", error)
        return replace(snapshot, gangs=())

    async def wait_until_started(self, on_progress: OnProgress) -> None:
        """Wait until each kind of gang has a ready one and no gang is starting for the first time.

        Raises the failure of a gang that the controller has given up.
        """
        snapshot = self.membership
        while True:
            for gang in snapshot.gangs:
                for text in (
                    [f"{gang.name}: {gang.cause}"] if gang.state == LOST else gang.startup_notes
                ):
                    on_progress(text)
            if _can_serve(snapshot):
                return _log_notices(snapshot.ready())
            failures = [
                gang.failure for gang in snapshot.gangs if gang.is_given_up and gang.failure
            ]
            if failures:
                raise to_error(failures[0])
            snapshot = await self.wait_for_change(snapshot.version)

    def control(self, spec: RankSpec) -> Control:
        """Return a client of this rank, valid in this epoch only."""
        return RayControl(spec.process_name, spec.epoch)

    def report(self, gang: str, epoch: int, reason: str) -> None:
        """Report to the controller that this epoch looks dead. Does not wait for a reply."""
        self._controller.report.remote(gang, epoch, reason)


def _create_controller() -> Any:
    # Calls wait while the actor restarts. It runs on the head, because other machines may leave.
    options: dict[str, Any] = {"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}}
    options |= {"get_if_exists": True, "max_restarts": -1, "max_task_retries": -1}
    make = ray.remote(Controller).options(name=CONTROLLER, **options, **DETACHED_OPTIONS)
    return make.remote(secrets.token_bytes(32))


async def find_gangs() -> tuple[Gang, ...]:
    """Return the gangs of the cluster of this Ray, () if there is no cluster."""
    try:
        controller = await run_in_thread(lambda: ray.get_actor(CONTROLLER, NAMESPACE))
    except ValueError:
        return ()
    return decode(Membership, await controller.membership.remote(0, 0, 0.0)).gangs


async def rebalance_gang(name: str) -> RebalanceResult:
    """Rebalance the experts of a gang; see cluster/control/rebalance.py."""
    controller = await run_in_thread(lambda: ray.get_actor(CONTROLLER, NAMESPACE))
    return decode(RebalanceResult, await controller.rebalance.remote(name))


async def stop_cluster(deadline_s: float) -> list[str]:
    """End the cluster of this Ray and return the names of its ranks.

    Any process may do so, not only the one that started the cluster. Ranks have ``deadline_s``
    seconds to stop by themselves. The remaining ones are killed.
    """
    ranks = await run_in_thread(find_ranks)
    try:
        controller = await run_in_thread(lambda: ray.get_actor(CONTROLLER, NAMESPACE))
        try:
            async with asyncio.timeout(deadline_s + STOP_GRACE_S):
                await controller.stop.remote(deadline_s)
        finally:
            ray.kill(controller)
    except (ValueError, TimeoutError, RayError) as error:
        log.warning("the controller failed to stop the ranks, killing them: %s", error)
    for rank in await run_in_thread(find_ranks):
        rank.kill()
    await run_in_thread(remove_placement_groups)
    return [rank.name for rank in ranks]


def _can_serve(snapshot: Membership) -> bool:
    gangs = snapshot.gangs
    kinds = {gang.kind for gang in gangs}
    ready = {gang.kind for gang in gangs if gang.state == READY}
    starting = any(gang.state == STARTING and gang.failure is None for gang in gangs)
    return bool(kinds) and kinds == ready and not starting


def _log_notices(infos: Sequence[RankInfo]) -> None:
    """Log warnings about slow kernels and about a checkpoint without MTP layers."""
    info = infos[0]
    for reason in {info.fallback_reason for info in infos} - {""}:
        log.warning("steps are slower than they could be: %s", reason)
    if not info.model.has_mtp:
        log.warning("this checkpoint has no MTP layer: the drafter mtp cannot be used")
