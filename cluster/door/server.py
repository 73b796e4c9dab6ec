"""The gRPC server: address, health, reflection and an orderly end."""

import asyncio
import socket
from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.door.calls import EveryCall
from cluster.door.health import Health
from cluster.door.servicer import InferenceServicer
from cluster.proto import tandem_pb2_grpc as rpc
from cluster.proto.wire import MAX_MESSAGE_BYTES
from core.config import TandemConfig

if TYPE_CHECKING:  # the client's commands need no torch
    from cluster.gateway.gateway import ClusterGateway

SERVICE = "tandem.v1.Inference"
CLOSE_S = 5.0
"""How long evicted streams may take to free what they hold."""

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

SPARE_CALLS = 1024


class Server:
    """Listens from ``start`` on, serves from ``attach`` on, until ``drain`` and ``stop``.

    As an async context manager it starts and stops itself. Before ``attach`` it answers
    health and status calls, and refuses requests with UNAVAILABLE.
    """

    def __init__(self, config: TandemConfig) -> None:
        self._config = config.server
        self._servicer = InferenceServicer(config.mode, config.server.write_s)
        # No bound on all calls together: a stream whose end its client leaves unread would count.
        self._server = grpc.aio.server(
            interceptors=(EveryCall(),),
            options=(*_OPTIONS, ("grpc.max_concurrent_streams", max_streams(config))),
        )
        rpc.add_InferenceServicer_to_server(self._servicer, self._server)
        told = Health(("", SERVICE), lambda: self._servicer.is_serving)
        health_pb2_grpc.add_HealthServicer_to_server(told, self._server)
        services = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._server)
        self.address = self._config.address

    async def start(self) -> None:
        """Listen; ``address`` then has the port in use. ``ValueError`` if it cannot be had."""
        address = self._config.address
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            problem = await asyncio.to_thread(_bind_problem, *self._config.host_port)
            raise ValueError(
                f"server.address={address!r}: cannot listen there ({problem}); stop what uses "
                "it or choose another address, such as --set server.address=127.0.0.1:0"
            ) from error
        self.address = f"{address.rpartition(':')[0]}:{port}"
        await self._server.start()

    async def attach(self, gateway: "ClusterGateway") -> None:
        """Serve requests through ``gateway`` from now on."""
        self._servicer.gateway = gateway

    async def drain(self) -> None:
        """Refuse new requests, let running ones finish for ``server.drain_s``, end the rest.

        Those that are ended get UNAVAILABLE, so that clients resume them elsewhere.
        """
        self._servicer.draining = True
        if not await self._servicer.wait_idle(self._config.drain_s):
            await self._servicer.evict(CLOSE_S)

    async def stop(self) -> None:
        """Close the port; streams still open end with UNAVAILABLE."""
        self._servicer.draining = True
        await self._servicer.evict(CLOSE_S)
        await self._server.stop(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def max_streams(config: TandemConfig) -> int:
    """Calls that one connection may have open at once, well above the streams that a gateway lets
    in: all clients may be behind one proxy. It bounds what a client can leave unread."""
    num_rows = config.decode.replicas * config.decode.dp_size * config.decode.max_rows
    return 2 * (num_rows + config.server.max_queued) + SPARE_CALLS


def _bind_problem(host: str, port: int) -> str:
    """What the operating system says to binding the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.strerror or str(error)
    return "the reason has gone meanwhile"
