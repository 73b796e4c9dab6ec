"""Control calls between ranks over dedicated TCP connections.

A connection carries any number of concurrent calls, each answered when it completes. The client's
greeting names the epoch of the called rank, for all calls of the connection.
"""

import asyncio
import struct
from dataclasses import dataclass
from itertools import count

from tandem.core.control import Control, Handler, call_rank
from tandem.core.errors import RankLost
from tandem.core.membership import PortAddress
from tandem.core.schema import pack, unpack
from tandem.core.tasks import Tasks, cancel_and_wait, resolve
from tandem.net.framing import GREETING_S, encode_frame, iter_frames
from tandem.net.listener import Listener, connect

MAX_CALL_BYTES = 16 << 20
"""Maximum size in bytes of a call or reply.

The largest message is a seal (kv_transfer/messages.py). One with hidden states and the generations
of a million pages fits.
"""
CALL_ADDRESS = "call_address"
"""Method that returns the PortAddress of a rank's CallServer."""
IDLE_S = 600.0
"""Seconds without a call after which a CallServer closes a connection."""
_EPOCH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Call:
    number: int
    method: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class CallReply:
    number: int
    payload: bytes


class CallServer(Listener):
    """Server for control calls, which ``handle`` answers.

    Clients must send the server's secret token.
    """

    def __init__(self, host: str, handle: Handler) -> None:
        super().__init__(host, _EPOCH.size, self._serve_calls)
        self._handle = handle

    async def _serve_calls(
        self, greeting: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve the calls of one connection. Calls that still run when it ends are cancelled."""
        [epoch], tasks = _EPOCH.unpack(greeting), Tasks()
        now = asyncio.get_running_loop().time

        async def answer(call: Call) -> None:
            payload = await self._handle(epoch, call.method, call.payload)
            writer.write(encode_frame(pack(CallReply(call.number, payload))))

        try:
            async with asyncio.timeout(IDLE_S) as idle:
                async for data in iter_frames(reader, MAX_CALL_BYTES):
                    tasks.start(answer(unpack(Call, data)))
                    idle.reschedule(now() + IDLE_S)
        finally:
            await cancel_and_wait(*tasks)


class CallClient(Control):
    """Control connection to one epoch of a rank. Owned by one asyncio loop.

    The first call opens the connection. The first call after the connection has ended opens it
    again.

    Args:
        name: Name of the rank, for errors.
        epoch: Epoch of the rank.
        bootstrap: Control connection of another kind, over which the rank's address is requested
            (CALL_ADDRESS).
    """

    def __init__(self, name: str, epoch: int, bootstrap: Control) -> None:
        self._name = name
        self._epoch = epoch
        self._bootstrap = bootstrap
        self._writer: asyncio.StreamWriter | None = None
        self._opening = asyncio.Lock()
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def call(self, method: str, payload: bytes) -> bytes:
        """Call ``method`` and return the reply, connecting if necessary.

        Raises:
            RankLost: The rank cannot be reached, or the connection ends before the reply.
            TandemError: Any error of the call over ``bootstrap``.
        """
        async with self._opening:
            if self._reading is None or self._reading.done():
                address = await call_rank(
                    control=self._bootstrap,
                    method=CALL_ADDRESS,
                    message=None,
                    reply=PortAddress,
                    timeout_s=GREETING_S,
                )
                reader, self._writer = await connect(self._name, address, _EPOCH.pack(self._epoch))
                self._reading = asyncio.create_task(self._read(reader, self._writer))
        number = next(self._numbers)
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._writer is not None
        self._writer.write(encode_frame(pack(Call(number, method, payload))))
        try:
            return await waiter
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Close the connection. Calls without a reply fail with RankLost."""
        if self._reading is not None:
            await cancel_and_wait(self._reading)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = "closed"
        try:
            async for data in iter_frames(reader, MAX_CALL_BYTES):
                answer = unpack(CallReply, data)
                if answer.number in self._waiting:
                    resolve(self._waiting[answer.number], answer.payload)
        except (OSError, ValueError) as error:
            why = repr(error)
        finally:
            writer.close()
            for waiter in self._waiting.values():
                resolve(waiter, RankLost(f"{self._name}: its connection ended: {why}"))
