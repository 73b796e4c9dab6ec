"""HTTP port for operators: liveness, readiness and metrics.

Off unless ``server.http_address`` is set. The port is separate from gRPC because Kubernetes probes
cannot use gRPC over TLS.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tandem.cluster.entrypoints.listening import open_listener
from tandem.cluster.gateway.admission import Admission


@asynccontextmanager
async def serve(admission: Admission) -> AsyncIterator[str | None]:
    """Listen until the block ends. Yields the address with the port in use, or None if it is off.

    Raises:
        ValueError: The address is unavailable.
    """
    address = admission.config.server.http_address
    if address is None:
        yield None
        return
    import uvicorn

    from tandem.cluster.entrypoints.http_limits import BoundedProtocol
    from tandem.cluster.entrypoints.probes import Probes

    class UvicornServer(uvicorn.Server):
        """Uvicorn server that leaves signals to the process."""

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
    server = UvicornServer(config)
    listener = open_listener("server.http_address", address)
    serving = asyncio.create_task(server.serve([listener]), name="http")
    try:
        yield f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
