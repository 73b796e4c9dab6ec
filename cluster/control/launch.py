"""Startup of a gateway: start or join Ray and the cluster, and end or leave them at exit."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tandem.cluster.control.members import OnProgress, RayMembers, stop_cluster
from tandem.cluster.control.ray_session import ray_session
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.core.config import Section, TandemConfig
from tandem.core.membership import RankInfo
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.files import read_headers
from tandem.model.checkpoint.headers import read_header
from tandem.text.tokenizer import Tokenizer


@asynccontextmanager
async def launch(
    config: TandemConfig,
    ray_address: str | None = None,
    on_progress: OnProgress = lambda text: None,
) -> AsyncIterator[ClusterGateway]:
    """Yield a gateway to the cluster of ``config``.

    Without ``ray_address``, a local Ray and cluster are started, and ended at exit. With it, the
    cluster of that Ray is joined or created, and continues after the exit.

    Raises ValueError for mistakes of the user, such as a missing checkpoint.
    """
    config = with_absolute_paths(config)
    tokenizer = Tokenizer(config.model.path)
    # A gateway without weights may join ranks on other machines; ranks check the weights.
    if ray_address is None or any(config.model.path.glob("*.safetensors")):
        ModelConfig.from_dir(config.model.path, config.model.ignore_config_keys)
        read_headers(config.model.path)
    for file in (
        config.speculation.draft_model_path.glob("*.safetensors")
        if config.speculation.draft_model_path
        else ()
    ):
        read_header(file)
    on_progress("starting Ray" if ray_address is None else f"joining Ray at {ray_address}")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ray_session(ray_address, config.num_threads + 1))
        if ray_address is None:
            stack.push_async_callback(stop_cluster, config.control.stop_timeout_s)
        members = await RayMembers.attach(config)
        await members.wait_until_started(on_progress)
        check_tokenizer(tokenizer, members.membership.ready())
        gateway = ClusterGateway(config, tokenizer, members)
        stack.push_async_callback(gateway.fleet.stop)
        on_progress("warming up")
        await gateway.fleet.wait_until_warm()
        yield gateway


def check_tokenizer(tokenizer: Tokenizer, ranks: Sequence[RankInfo]) -> None:
    """Raise ValueError if a rank loaded a checkpoint with another tokenizer than this server's."""
    for rank in ranks:
        if rank.tokenizer not in ("", tokenizer.digest):
            raise ValueError(
                f"model.path: the tokenizer (digest {tokenizer.digest}) differs from that of the "
                f"checkpoint loaded by {rank.spec.label} (digest {rank.tokenizer}); serve from "
                "that checkpoint, or stop the cluster with `tandem stop` and serve the new one"
            )


def with_absolute_paths(config: TandemConfig) -> TandemConfig:
    """Return ``config`` with absolute paths.

    Ranks and other gateways may run in other working directories.
    """
    sections = {
        name: section.model_copy(
            update={key: value.absolute() for key, value in section if isinstance(value, Path)}
        )
        for name, section in config
        if isinstance(section, Section)
    }
    return config.model_copy(update=sections)
