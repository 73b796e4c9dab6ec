"""Control calls between two processes over a socket, without Ray."""

import asyncio
import itertools
import struct
from contextlib import suppress

import msgpack

from core.control import Handler
from core.errors import RankLost


async def serve(handler: Handler, reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter) -> None:  # fmt: skip
    async def one(call: int, epoch: int, method: str, payload: bytes) -> None:
        data = msgpack.packb([call, await handler(epoch, method, payload)])
        writer.write(struct.pack("!I", len(data)) + data)

    tasks = set()
    with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        while True:
            frame = await reader.readexactly(struct.unpack("!I", await reader.readexactly(4))[0])
            tasks.add(task := asyncio.create_task(one(*msgpack.unpackb(frame))))
            task.add_done_callback(tasks.discard)
    writer.close()


class SocketControl:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._ids = itertools.count()
        self._reading = asyncio.create_task(self._read(reader))

    async def call(self, epoch: int, method: str, payload: bytes) -> bytes:
        if self._reading.done():
            raise RankLost("the control connection is closed")
        call = next(self._ids)
        self._calls[call] = asyncio.get_running_loop().create_future()
        data = msgpack.packb([call, epoch, method, payload])
        self._writer.write(struct.pack("!I", len(data)) + data)
        return await self._calls[call]

    async def close(self) -> None:
        self._writer.close()
        await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = struct.unpack("!I", await reader.readexactly(4))[0]
                call, data = msgpack.unpackb(await reader.readexactly(size))
                waiter = self._calls.pop(call)
                if not waiter.done():
                    waiter.set_result(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            for waiter in self._calls.values():
                if not waiter.done():
                    waiter.set_exception(RankLost("the control connection broke"))
