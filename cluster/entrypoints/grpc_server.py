"""The gRPC server: address, health and reflection."""

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
"""Maximum of open connections; grpc turns away those beyond."""
SPARE_CALLS = 256
"""Calls of a connection beyond the requests that the cluster can hold."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # A window that grows with the bandwidth holds megabytes of each call that nobody awaits yet.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_allowed_incoming_connections", MAX_GRPC_CONNECTIONS),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
WATCH_PERIOD_S = 1.0
"""How often it looks for watchers whether something has changed."""


@asynccontextmanager
async def serve(admission: Admission) -> AsyncIterator[str]:
    """Listen meanwhile; the address has the port in use. ``ValueError`` if it cannot be had.

    Health and status are answered whether or not there is a gateway.
    """
    # No bound on all calls together: a stream whose end its client leaves unread would count.
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
    """Return how many calls one connection may have open at once.

    All clients may be behind one proxy, so this is above the number of requests that the cluster
    can hold, with those that its reserve for begun answers adds.
    """
    return 2 * config.decode.num_rows + config.server.max_queued + SPARE_CALLS


async def _bind(server: grpc.aio.Server, address: str) -> str:
    try:
        return f"{address.rpartition(':')[0]}:{server.add_insecure_port(address)}"
    except RuntimeError as error:
        # The operating system says why.
        (await asyncio.to_thread(open_listener, "server.address", address)).close()
        raise ValueError(f"server.address={address!r}: was taken until now; try again") from error


class Health(health_pb2_grpc.HealthServicer):
    """``is_serving`` says it for all of ``services``, whenever somebody asks. A watcher that does
    not read holds up nobody else: grpcio's own keeps a lock meanwhile."""

    def __init__(self, services: Collection[str], is_serving: Callable[[], bool]) -> None:
        self._services = services
        self._is_serving = is_serving

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> object:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service={request.service!r}: unknown")
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
