"""A server: the admission of a gateway, and all its entrypoints."""

from contextlib import AsyncExitStack
from importlib import import_module
from typing import Self

from tandem.cluster.gateway.admission import Admission
from tandem.core.config import TandemConfig

ENTRYPOINTS = {
    "grpc": "tandem.cluster.entrypoints.grpc_server",
    "http": "tandem.cluster.entrypoints.http_server",
}
"""Modules by the names that ``tandem serve`` prints. ``serve(admission)`` of each is a context
manager that listens and yields its address, or None if the entrypoint is off.
"""


class Server(Admission):
    """Async context manager that listens until it exits.

    Requests are served from ``attach`` until ``drain`` or ``stop``.

    Attributes:
        addresses: Addresses of the entrypoints by name; None for those that are off.
    """

    def __init__(self, config: TandemConfig) -> None:
        super().__init__(config)
        self.addresses: dict[str, str | None] = {}
        self._entrypoints = AsyncExitStack()

    @property
    def address(self) -> str:
        """Address of the gRPC entrypoint."""
        address = self.addresses["grpc"]
        assert address is not None
        return address

    async def stop(self) -> None:
        """Close the entrypoints. Open streams end with UNAVAILABLE."""
        await self.end_streams()
        await self._entrypoints.aclose()

    async def __aenter__(self) -> Self:
        """Open every entrypoint. Raises ``ValueError`` if an address is unavailable."""
        async with AsyncExitStack() as entrypoints:
            for name, module in ENTRYPOINTS.items():
                context = import_module(module).serve(self)
                self.addresses[name] = await entrypoints.enter_async_context(context)
            self._entrypoints = entrypoints.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
