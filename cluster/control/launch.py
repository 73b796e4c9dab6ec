"""Ray up, cluster up or joined, gateway ready; and left or ended again."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from cluster.control.members import RayMembers, stop_cluster
from cluster.control.plan import plan_gangs
from cluster.control.ray_session import ray_session
from cluster.gateway.gateway import ClusterGateway
from core.config import TandemConfig
from core.membership import LOST, READY, STARTING, Membership, NodeInfo
from core.schema import error_of
from model.tokenizer import Tokenizer

log = logging.getLogger(__name__)
OnProgress = Callable[[str], None]


@asynccontextmanager
async def launch(
    config: TandemConfig,
    ray_address: str | None = None,
    on_progress: OnProgress = lambda text: None,
) -> AsyncIterator[ClusterGateway]:
    """Yield a gateway to the cluster of ``config``.

    Without ``ray_address`` a local Ray and cluster are started for the purpose and ended with
    it. With one the cluster there is joined, or created, and only left at exit.

    Raises ValueError for what the user can mend, such as a missing checkpoint.
    """
    tokenizer = Tokenizer(config.model.path)
    # Ranks and other gateways may run in other folders.
    model = config.model.model_copy(update={"path": config.model.path.absolute()})
    config = config.model_copy(update={"model": model})
    on_progress("starting Ray" if ray_address is None else f"joining Ray at {ray_address}")
    num_cpus = sum(plan.num_ranks * plan.resources["CPU"] for plan in plan_gangs(config))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ray_session(ray_address, int(num_cpus) + 1))
        if ray_address is None:
            stack.push_async_callback(stop_cluster, config.control.stop_s)
        members = await RayMembers.attach(config)
        stack.push_async_callback(members.close)
        snapshot = await _started(members, config.control.max_deaths, on_progress)
        _tell(snapshot.ready())
        gateway = ClusterGateway(config, tokenizer, members)
        stack.push_async_callback(gateway.stop)
        on_progress("warming up")
        await gateway.fleet.ready()
        yield gateway


def _tell(infos: Sequence[NodeInfo]) -> None:
    """What users should know of the nodes, and of the checkpoint that they loaded."""
    info = infos[0]
    for why in {info.why_plain for info in infos} - {""}:
        log.warning("steps are slower than they could be, %s", why)
    if not info.model.has_mtp:
        log.warning("this checkpoint has no MTP layer: it is served without drafts")
    if info.num_mtp_layers > 1:
        log.warning(
            "this checkpoint has %d MTP layers: the first gives every draft", info.num_mtp_layers
        )


async def _started(members: RayMembers, max_deaths: int, on_progress: OnProgress) -> Membership:
    """The first snapshot that can be served: no gang starts for the first time, each kind has one
    that is ready.

    Raises what keeps a gang down, or has ended ``max_deaths`` lives of it in a row.
    """
    snapshot = members.membership
    while True:
        for gang in snapshot.gangs:
            for text in [f"{gang.name}: {gang.cause}"] if gang.state == LOST else gang.starts:
                on_progress(text)
        if _can_serve(snapshot):
            return snapshot
        for gang in snapshot.gangs:
            if gang.failure is not None and gang.is_given_up(max_deaths):
                raise error_of(gang.failure)
        snapshot = await members.changed(snapshot.version)


def _can_serve(snapshot: Membership) -> bool:
    gangs = snapshot.gangs
    kinds = {gang.kind for gang in gangs}
    ready = {gang.kind for gang in gangs if gang.state == READY}
    starting = any(gang.state == STARTING and gang.failure is None for gang in gangs)
    return bool(kinds) and kinds == ready and not starting
