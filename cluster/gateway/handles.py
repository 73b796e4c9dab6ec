"""A gateway's view of the ranks: how to call them, and how much it has sent to each."""

import asyncio
from dataclasses import dataclass, field

from core.control import Control
from core.identity import Identity
from core.info import NodeStatus
from core.membership import NodeInfo
from core.request import ERROR, SequenceUpdate, TokenFrame
from core.schema import decode

STATUS_TIMEOUT_S = 2.0


@dataclass(slots=True, eq=False)
class Handle:
    """One life of a rank. While ``is_out`` it was found lost and gets no requests.

    Of a rank that prefills: ``num_tokens`` are prompt tokens sent there and not yet answered,
    ``num_sent`` requests ever sent there. Of one that decodes: ``is_heard`` is set while frames
    come, ``granted`` are the sequences that it was heard to hold for this gateway, ``num_others``
    those of other gateways as of the last heartbeat.
    """

    info: NodeInfo
    control: Control
    is_out: bool = False
    num_tokens: int = 0
    num_sent: int = 0
    is_heard: asyncio.Event = field(default_factory=asyncio.Event)
    inboxes: dict[Identity, "asyncio.Queue[SequenceUpdate]"] = field(default_factory=dict)
    granted: set[Identity] = field(default_factory=set)
    num_others: int = 0

    @property
    def name(self) -> str:
        return self.info.spec.name

    @property
    def num_rows(self) -> int:
        """Sequences that run or wait there, of all gateways as far as is known here."""
        return len(self.inboxes) + self.num_others

    async def status(self) -> NodeStatus:
        """What the rank says of itself now; raises whatever keeps it from that."""
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return decode(NodeStatus, await self.control.call("status", b""))

    def open_inbox(self, identity: Identity) -> "asyncio.Queue[SequenceUpdate]":
        """Where the sequence's updates will arrive."""
        inbox = self.inboxes[identity] = asyncio.Queue()
        return inbox

    def close_inbox(self, identity: Identity) -> None:
        del self.inboxes[identity]
        self.granted.discard(identity)

    def deliver(self, frame: TokenFrame, expected: set[Identity]) -> None:
        """Updates to their inboxes. A beat says of each sequence that was ``expected`` when it was
        asked for whether the rank still holds it."""
        for update in frame.updates:
            self._put(update)
        if frame.beat is not None:
            alive = set(frame.beat.alive)
            self.num_others = max(0, frame.beat.num_rows + frame.beat.num_waiting - len(alive))
            for identity in expected - alive:
                self._fail(identity, "the rank no longer holds it")

    def fail_all(self, reason: str) -> None:
        """Nobody waits for a rank that cannot be heard."""
        for identity in self.inboxes:
            self._fail(identity, reason)

    def _fail(self, identity: Identity, reason: str) -> None:
        text = f"decode rank {self.name} lost {identity}: {reason}"
        self._put(SequenceUpdate(identity, (), ERROR, error=text))

    def _put(self, update: SequenceUpdate) -> None:
        inbox = self.inboxes.get(update.identity)
        if inbox is not None:
            inbox.put_nowait(update)
