"""The gRPC server: options, address, health and reflection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection

from tandem.cluster.entrypoints.calls import CallInterceptor
from tandem.cluster.entrypoints.listening import open_listener
from tandem.cluster.entrypoints.servicer import InferenceServicer
from tandem.cluster.entrypoints.uploads import max_message_bytes
from tandem.cluster.gateway.admission import Admission
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import MAX_MESSAGE_BYTES
from tandem.core.config import TandemConfig

SERVICE = "tandem.v1.Inference"
MAX_GRPC_CONNECTIONS = 1024
"""Maximum number of open connections; grpc rejects further ones."""
SPARE_CALLS = 256
"""Calls of one connection allowed beyond the requests that the cluster can hold."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # A window that grows with the bandwidth would buffer megabytes of calls not yet awaited.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_allowed_incoming_connections", MAX_GRPC_CONNECTIONS),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
WATCH_PERIOD_S = 1.0
"""Seconds between checks for changes that health watchers receive."""


@asynccontextmanager
async def serve(admission: Admission) -> AsyncIterator[str]:
    """Listen until the block ends. Yields the address, with the port in use.

    Health and status are answered even without a gateway.

    Raises:
        ValueError: The address is unavailable.
    """
    # No bound on the total number of calls: ended streams whose end is unread would count too.
    server = grpc.aio.server(
        interceptors=(CallInterceptor(lambda code: admission.on_error(code)),),
        options=(*_OPTIONS, *_size_options(admission.config)),
    )
    rpc.add_InferenceServicer_to_server(InferenceServicer(admission), server)
    health_servicer = Health(("", SERVICE), admission.is_serving)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    services = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(services, server)
    try:
        address = await _bind(server, admission.config.server.address)
        await server.start()
        yield address
    finally:
        await server.stop(None)


def _size_options(config: TandemConfig) -> list[tuple[str, int]]:
    bounds = [
        ("grpc.max_concurrent_streams", max_streams(config)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_message_bytes(config)),
    ]
    if (age_s := config.server.max_connection_age_s) is not None:
        bounds.append(("grpc.max_connection_age_ms", int(1e3 * age_s)))
        bounds.append(
            ("grpc.max_connection_age_grace_ms", int(1e3 * config.server.drain_timeout_s))
        )
    return bounds


def max_streams(config: TandemConfig) -> int:
    """Return the maximum number of open calls per connection.

    All clients may share the connection of one proxy. The bound therefore exceeds the number of
    requests that the cluster can hold, including its reserve for resumed answers.
    """
    return 2 * config.decode.num_rows + config.server.max_queued + SPARE_CALLS


async def _bind(server: grpc.aio.Server, address: str) -> str:
    try:
        return f"{address.rpartition(':')[0]}:{server.add_insecure_port(address)}"
    except RuntimeError as error:
        # Binding the address again raises an error that contains the operating system's reason.
        (await asyncio.to_thread(open_listener, "server.address", address)).close()
        raise ValueError(
            f"server.address={address!r}: was in use a moment ago; try again"
        ) from error


class Health(health_pb2_grpc.HealthServicer):
    """gRPC health service with the same state for all ``services``.

    ``is_serving`` is called for every check. A watcher that does not read blocks no other call,
    unlike in grpcio's own servicer, which holds a lock while it writes.
    """

    def __init__(self, services: Collection[str], is_serving: Callable[[], bool]) -> None:
        self._services = services
        self._is_serving = is_serving

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> object:
        if request.service not in self._services:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service={request.service!r}: unknown to this server"
            )
        return self._now(request.service)

    async def Watch(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        last_response = None
        while True:
            if last_response != (now := self._now(request.service)):
                await context.write(last_response := now)
            await asyncio.sleep(WATCH_PERIOD_S)

    def _now(self, service: str) -> HealthCheckResponse:
        if service not in self._services:
            return HealthCheckResponse(status="SERVICE_UNKNOWN")
        return HealthCheckResponse(status="SERVING" if self._is_serving() else "NOT_SERVING")
