"""A server: the admission of a gateway with all its doors, opened together and closed in order."""

from contextlib import AsyncExitStack
from importlib import import_module
from typing import Self

from tandem.cluster.gateway.admission import Admission
from tandem.core.config import TandemConfig

DOORS = {
    "grpc": "tandem.cluster.door.grpc_door",
    "http": "tandem.cluster.door.http_door",
}
"""Modules with ``opened(admission)``, a context that listens and gives its address, None if it is
not wanted. By the names that ``tandem serve`` prints."""


class Server(Admission):
    """An async context: listens from its begin on, serves from ``attach`` on, until ``drain`` and
    ``stop``, its end at the latest; ``addresses`` are those of its doors, by name."""

    def __init__(self, config: TandemConfig) -> None:
        super().__init__(config)
        self.addresses: dict[str, str | None] = {}
        self._doors = AsyncExitStack()

    @property
    def address(self) -> str:
        """Of gRPC."""
        address = self.addresses["grpc"]
        assert address is not None
        return address

    async def stop(self) -> None:
        """Close the doors; streams still open end with UNAVAILABLE."""
        await self.end()
        await self._doors.aclose()

    async def __aenter__(self) -> Self:
        """Open every door. ``ValueError`` if one of them cannot have its address."""
        async with AsyncExitStack() as doors:
            for name, module in DOORS.items():
                opened = import_module(module).opened(self)
                self.addresses[name] = await doors.enter_async_context(opened)
            self._doors = doors.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
