"""The HTTP port, for those who run the cluster: whether it lives, whether it serves, its figures.

Off unless ``server.http_address`` is set. It is apart from gRPC because probes speak HTTP alone
where gRPC has TLS.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tandem.cluster.entrypoints.listening import open_listener
from tandem.cluster.gateway.admission import Admission


@asynccontextmanager
async def serve(admission: Admission) -> AsyncIterator[str | None]:
    """Listen meanwhile, if that is wanted; the address has the port in use. ``ValueError`` if it
    cannot be had."""
    address = admission.config.server.http_address
    if address is None:
        yield None
        return
    import uvicorn

    from tandem.cluster.entrypoints.http_limits import BoundedProtocol
    from tandem.cluster.entrypoints.probes import Probes

    class UvicornServer(uvicorn.Server):
        """Signals are the process's own affair."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    probes = Probes(admission)
    config = uvicorn.Config(
        probes.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedProtocol,
        timeout_graceful_shutdown=1,
    )
    server, listener = UvicornServer(config), open_listener("server.http_address", address)
    serving = asyncio.create_task(server.serve([listener]), name="http")
    try:
        yield f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
