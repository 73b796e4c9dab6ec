"""Ray up, controller up, nodes up, gateway ready; and all of it down again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import ray

from cluster.control.controller import CONTROLLER, NAMESPACE, Controller
from cluster.control.plan import plan_nodes
from cluster.control.ray_control import RayControl, open_frames
from cluster.gateway.gateway import ClusterGateway
from cluster.gateway.nodes import DecodeHandle, PrefillHandle
from core.config import TandemConfig
from core.info import COLOCATED, DECODE, PREFILL, NodeInfo
from core.schema import decode
from model.tokenizer import Tokenizer

OBJECT_STORE_BYTES = 128 << 20
log = logging.getLogger(__name__)


@asynccontextmanager
async def launch(
    config: TandemConfig,
    ray_address: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[ClusterGateway]:
    """Start the nodes of ``config`` and yield a gateway to them; stop them at exit.

    Without ``ray_address`` a local Ray is started for the purpose and ended after it.

    Raises ValueError for what the user can mend, such as a missing checkpoint.
    """
    tokenizer = Tokenizer(config.model.path)
    on_progress("starting Ray" if ray_address is None else f"joining Ray at {ray_address}")
    await asyncio.to_thread(_init_ray, config, ray_address)
    try:
        on_progress("starting nodes and loading the model")
        controller = ray.remote(Controller).options(
            name=CONTROLLER, namespace=NAMESPACE, lifetime="detached", num_cpus=0
        )
        actor: Any = controller.remote(config.model_dump_json())
        try:
            infos = [decode(NodeInfo, data) for data in await actor.start.remote()]
            for notice in notices(infos):
                log.warning(notice)
            gateway = await _gateway(config, tokenizer, infos)
            try:
                on_progress("warming up")
                await gateway.warm_up()
                yield gateway
            finally:
                await gateway.stop()
        finally:
            await actor.stop.remote()
            ray.kill(actor)
    finally:
        await asyncio.to_thread(ray.shutdown)


def notices(infos: list[NodeInfo]) -> list[str]:
    """What users should know of the checkpoint that the nodes loaded."""
    info = infos[0]
    found = []
    if not info.has_mtp:
        found.append("this checkpoint has no MTP layer: it is served without drafts")
    if info.num_mtp_layers > 1:
        found.append(
            f"this checkpoint has {info.num_mtp_layers} MTP layers: the first gives every draft"
        )
    return found


def _init_ray(config: TandemConfig, ray_address: str | None) -> None:
    common: dict[str, Any] = {
        "namespace": NAMESPACE,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    if ray_address is not None:
        try:
            ray.init(address=ray_address, **common)
        except ConnectionError as error:
            raise ValueError(
                f"--ray-address={ray_address!r}: cannot join ({error}); is it up, and if it "
                "wants a token, is RAY_AUTH_TOKEN set?"
            ) from error
        return
    plans = plan_nodes(config)
    ray.init(
        address="local",
        num_cpus=int(sum(plan.resources["CPU"] for plan in plans)) + 1,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        **common,
    )


async def _gateway(
    config: TandemConfig, tokenizer: Tokenizer, infos: list[NodeInfo]
) -> ClusterGateway:
    prefills, decodes = [], []
    for info in infos:
        actor = ray.get_actor(info.name, namespace=NAMESPACE)
        control = RayControl(info.name, actor)
        if info.kind in (PREFILL, COLOCATED):
            prefills.append(PrefillHandle(info, control))
        if info.kind in (DECODE, COLOCATED):
            reopen = partial(open_frames, info.name, actor)
            decodes.append(DecodeHandle(info, control, await reopen(), reopen))
    return ClusterGateway(config, tokenizer, prefills, decodes)
