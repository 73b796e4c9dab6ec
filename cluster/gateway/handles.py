"""A gateway's view of the ranks: how to call them, and how much it has sent to each."""

import asyncio
from dataclasses import dataclass, field

from cluster.gateway.router import DecodeLoad, PrefillLoad
from core.control import Control
from core.identity import Identity
from core.info import NodeInfo
from core.membership import Member
from core.request import ERROR, SequenceUpdate, TokenFrame


@dataclass(slots=True)
class Handle:
    """One life of a rank. While ``is_out`` it was found lost and gets no requests."""

    member: Member
    control: Control
    is_out: bool = False

    @property
    def name(self) -> str:
        return self.member.spec.name

    @property
    def info(self) -> NodeInfo:
        assert self.member.info is not None, f"{self.name} is not ready"
        return self.member.info


@dataclass(slots=True)
class PrefillHandle(Handle):
    num_tokens: int = 0
    num_sent: int = 0

    def load(self) -> PrefillLoad:
        return PrefillLoad(self.name, self.num_tokens, self.num_sent)


@dataclass(slots=True)
class DecodeHandle(Handle):
    """``granted`` are the sequences that the rank was heard to hold for this gateway,
    ``num_others`` those of other gateways as of the last heartbeat."""

    inboxes: dict[Identity, "asyncio.Queue[SequenceUpdate]"] = field(default_factory=dict)
    granted: set[Identity] = field(default_factory=set)
    num_others: int = 0

    def open_inbox(self, identity: Identity) -> "asyncio.Queue[SequenceUpdate]":
        """Where the sequence's updates will arrive."""
        inbox = self.inboxes[identity] = asyncio.Queue()
        return inbox

    def close_inbox(self, identity: Identity) -> None:
        del self.inboxes[identity]
        self.granted.discard(identity)

    def load(self) -> DecodeLoad:
        return DecodeLoad(self.name, len(self.inboxes) + self.num_others)

    def deliver(self, frame: TokenFrame, expected: set[Identity]) -> None:
        """Updates to their inboxes. A beat says of each sequence that was ``expected`` when it was
        asked for whether the rank still holds it."""
        for update in frame.updates:
            self._put(update)
        if frame.beat is not None:
            alive = set(frame.beat.alive)
            num_held = frame.beat.num_rows + frame.beat.num_waiting
            self.num_others = max(0, num_held - len(alive))
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
