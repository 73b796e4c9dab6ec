"""grpc.health.v1: whether requests belong here."""

import asyncio
from collections.abc import Callable, Collection

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

WATCH_S = 1.0
"""How often it looks for watchers whether something has changed."""


class Health(HealthServicer):
    """``is_serving`` says it for all of ``services``, whenever somebody asks. A watcher that does
    not read holds up nobody else: grpcio's own keeps a lock meanwhile."""

    def __init__(self, services: Collection[str], is_serving: Callable[[], bool]) -> None:
        self._services = services
        self._is_serving = is_serving

    async def Check(self, asked: HealthCheckRequest, context: grpc.aio.ServicerContext) -> object:
        if asked.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service={asked.service!r}: unknown")
        return self._now(asked.service)

    async def Watch(self, asked: HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        told = None
        while True:
            if told != (now := self._now(asked.service)):
                await context.write(told := now)
            await asyncio.sleep(WATCH_S)

    def _now(self, service: str) -> HealthCheckResponse:
        if service not in self._services:
            return HealthCheckResponse(status="SERVICE_UNKNOWN")
        return HealthCheckResponse(status="SERVING" if self._is_serving() else "NOT_SERVING")
