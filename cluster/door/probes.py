"""What the HTTP port answers, in the gateway's own loop: one that hangs does not."""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cluster.gateway.admission import Admission
from cluster.gateway.cluster_metrics import known
from cluster.gateway.metrics import RequestMetrics
from core.info import ServerStatus


class Probes(Collector):
    """/livez, /readyz and /metrics of the server whose ``admission`` it is, as an ``app``."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._status: ServerStatus | None = None
        self._requests = RequestMetrics()
        admission.on_error, admission.on_stream = self._requests.failed, self._requests.stream
        self._registry = CollectorRegistry()
        self._registry.register(self)
        asked = self.livez, self.readyz, self.metrics
        self.app = Starlette(routes=[Route(f"/{one.__name__}", one) for one in asked])

    async def refresh(self) -> None:
        self._status = await self._admission.status()

    async def livez(self, _: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(self, _: Request) -> Response:
        """As health over gRPC says it."""
        if self._admission.is_serving():
            return PlainTextResponse("serving\n")
        return PlainTextResponse("not serving\n", 503)

    async def metrics(self, _: Request) -> Response:
        told = generate_latest(self._registry)
        return Response(told, headers={"content-type": CONTENT_TYPE_LATEST})

    def collect(self) -> Iterator[Metric]:
        yield from self._requests.registry.collect()
        yield from known(self._admission, self._status)
