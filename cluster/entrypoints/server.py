"""A server: the admission of a gateway with all its entrypoints, opened together and closed in
order."""

from contextlib import AsyncExitStack
from importlib import import_module
from typing import Self

from tandem.cluster.gateway.admission import Admission
from tandem.core.config import TandemConfig

ENTRYPOINTS = {
    "grpc": "tandem.cluster.entrypoints.grpc_server",
    "http": "tandem.cluster.entrypoints.http_server",
}
"""Modules with ``serve(admission)``, a context that listens and gives its address, None if it is
not wanted. By the names that ``tandem serve`` prints."""


class Server(Admission):
    """An async context: listens from its begin on, serves from ``attach`` on, until ``drain`` and
    ``stop``, its end at the latest; ``addresses`` are those of its entrypoints, by name."""

    def __init__(self, config: TandemConfig) -> None:
        super().__init__(config)
        self.addresses: dict[str, str | None] = {}
        self._entrypoints = AsyncExitStack()

    @property
    def address(self) -> str:
        """Of gRPC."""
        address = self.addresses["grpc"]
        assert address is not None
        return address

    async def stop(self) -> None:
        """Close the entrypoints; streams still open end with UNAVAILABLE."""
        await self.end_streams()
        await self._entrypoints.aclose()

    async def __aenter__(self) -> Self:
        """Open every entrypoint. ``ValueError`` if one of them cannot have its address."""
        async with AsyncExitStack() as entrypoints:
            for name, module in ENTRYPOINTS.items():
                context = import_module(module).serve(self)
                self.addresses[name] = await entrypoints.enter_async_context(context)
            self._entrypoints = entrypoints.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
