"""Handlers of the HTTP port.

They run in the gateway's asyncio loop, so the probes of a gateway that hangs fail.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tandem.cluster.gateway.admission import Admission
from tandem.cluster.gateway.cluster_metrics import collect_cluster_metrics
from tandem.cluster.gateway.metrics import RequestMetrics


class Probes(Collector):
    """/livez, /readyz and /metrics of one server, as the ASGI application ``app``."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._requests = RequestMetrics()
        admission.on_error = self._requests.on_call_failed
        admission.on_stream = self._requests.watch_stream
        self._registry = CollectorRegistry()
        self._registry.register(self)
        handlers = self.livez, self.readyz, self.metrics
        routes = [Route(f"/{handler.__name__}", handler) for handler in handlers]
        self.app = Starlette(
            routes=routes, middleware=[Middleware(GZipMiddleware, compresslevel=5)]
        )

    async def livez(self, _: Request) -> Response:
        """Answer 200 as long as the asyncio loop runs."""
        return PlainTextResponse("alive\n")

    async def readyz(self, _: Request) -> Response:
        """Answer 200 if the server is serving, else 503. gRPC health reports the same state."""
        if self._admission.is_serving():
            return PlainTextResponse("serving\n")
        return PlainTextResponse("not serving\n", 503)

    async def metrics(self, request: Request) -> Response:
        """Answer with all metrics, in the format that the scraper prefers.

        If it accepts no supported format, the oldest one is used.
        """
        try:
            encode, content_type = choose_encoder(",".join(request.headers.getlist("accept")))
        except TypeError:  # a version that is not a number
            encode, content_type = choose_encoder("")
        return Response(encode(self._registry), headers={"content-type": content_type})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of requests and of the cluster."""
        yield from self._requests.registry.collect()
        yield from collect_cluster_metrics(self._admission)
