"""A gateway's view of the nodes: how to call them, and how much it has sent to each."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from cluster.gateway.router import DecodeLoad, PrefillLoad
from core.control import Control
from core.errors import NodeLost
from core.info import NodeInfo
from core.request import ERROR, SequenceUpdate, TokenFrame
from core.schema import unpack

log = logging.getLogger(__name__)
Frames = Callable[[], AsyncIterator[bytes]]


@dataclass(slots=True)
class PrefillHandle:
    info: NodeInfo
    control: Control
    num_tokens: int = 0
    num_sent: int = 0

    def load(self) -> PrefillLoad:
        info = self.info
        return PrefillLoad(info.name, self.num_tokens, info.fingerprint, self.num_sent)


@dataclass(slots=True)
class DecodeHandle:
    """``frames()`` streams one packed TokenFrame per step of the node, once; ``reopen()`` gives
    another such stream, subscribed to, or raises NodeLost. Whoever reserves there holds ``turn``,
    first come, first served."""

    info: NodeInfo
    control: Control
    frames: Frames
    reopen: Callable[[], Awaitable[Frames]]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    inboxes: dict[str, "asyncio.Queue[SequenceUpdate]"] = field(default_factory=dict)

    def open_inbox(self, request_id: str) -> "asyncio.Queue[SequenceUpdate]":
        """Where the request's updates will arrive."""
        assert request_id not in self.inboxes, f"{request_id!r} has an inbox already"
        inbox = self.inboxes[request_id] = asyncio.Queue()
        return inbox

    def close_inbox(self, request_id: str) -> None:
        del self.inboxes[request_id]

    def load(self) -> DecodeLoad:
        info = self.info
        return DecodeLoad(info.name, len(self.inboxes), info.max_rows, info.fingerprint)


class FramePump:
    """Reads a decode node's frames and hands each update to its request's inbox.

    When the stream breaks, every open inbox gets an error update: nobody waits for ever.
    """

    def __init__(self, handle: DecodeHandle, on_lost: Callable[[str, BaseException], None]) -> None:
        self._handle = handle
        self._on_lost = on_lost
        self.is_broken = False
        self._task = asyncio.create_task(self._run(), name=f"frames-{handle.info.name}")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async for data in self._handle.frames():
                self._deliver(unpack(TokenFrame, data))
            raise NodeLost(f"{self._handle.info.name} ended its frame stream")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("frames of %s broke: %s", self._handle.info.name, error)
            for request_id, inbox in self._handle.inboxes.items():
                text = f"decode node {self._handle.info.name} was lost: {error}"
                inbox.put_nowait(SequenceUpdate(request_id, (), ERROR, error=text))
            self.is_broken = True
            self._on_lost(self._handle.info.name, error)

    def _deliver(self, frame: TokenFrame) -> None:
        for update in frame.updates:
            inbox = self._handle.inboxes.get(update.request_id)
            if inbox is not None:
                inbox.put_nowait(update)
