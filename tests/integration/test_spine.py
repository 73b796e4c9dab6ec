"""A request enters every file of the spine's list."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

from tandem import Client
from tandem.cluster.entrypoints.server import Server
from tandem.core.config import TINY_MODEL
from tests.rig import Rig, rig
from tests.sizes import ROOT, SPINE, names, product


class Trace:
    """Records our files whose functions are called while it ``is_on``, on threads started since."""

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_name != "<module>":
            self.entered.add(_file(frame))

    def files(self) -> set[str]:
        """Return the recorded files that belong to the product."""
        folder = f"{ROOT}/src/tandem/"
        return {name.removeprefix(folder) for name in self.entered} & set(product())


def _file(frame: FrameType) -> str:
    """Return the file of a function. A generated method, as of a dataclass, gets its class's
    file."""
    name, owner = frame.f_code.co_filename, frame.f_locals.get("self")
    if name == "<string>" and owner is not None:
        return str(getattr(sys.modules.get(type(owner).__module__), "__file__", ""))
    return name


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@asynccontextmanager
async def served(cluster: Rig) -> AsyncIterator[str]:
    """Yield the address of its gRPC server."""
    async with Server(cluster.config) as server:
        await server.attach(cluster.gateway)
        yield server.address


def ask(address: str) -> int:
    with Client(address) as client:
        return len(client.complete("def fibonacci(n):", max_tokens=40).token_ids)


async def test_a_request_enters_the_whole_spine() -> None:
    with traced() as trace:
        async with rig(TINY_MODEL, "server.address=127.0.0.1:0") as cluster, served(cluster) as at:
            for node in cluster.decodes:  # a recorded step makes no Python calls any more
                await node.loop.call(node.engine.programs.clear)
            trace.is_on = True
            assert await asyncio.to_thread(ask, at) == 40
            trace.is_on = False
    missed = names(SPINE) - trace.files()
    assert not missed, missed
