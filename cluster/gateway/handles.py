"""A gateway's view of the ranks: how to call them, and how much it has sent to each."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from core.control import Control, Done, ask
from core.errors import NodeLost
from core.identity import Identity
from core.info import NodeStatus
from core.membership import NodeInfo
from core.request import ERROR, SequenceUpdate, TokenFrame
from core.schema import Failure
from core.tasks import Tasks
from decode_node.messages import Abort
from prefill_node.messages import Cancel

STATUS_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 5.0
_releases = Tasks()


@dataclass(slots=True, eq=False)
class Handle:
    """One life of a rank. While ``is_out`` it was found lost and gets no requests, while
    ``is_draining`` it ends those it has; ``is_heard`` is set while it answers heartbeats and its
    engine goes on.

    Of a rank that prefills: ``num_tokens`` are those sent there that it has not computed yet,
    ``num_other_tokens`` those of other gateways as of the last heartbeat, ``num_sent`` requests
    ever sent there. Of one that decodes: ``granted`` are the sequences that it was heard to hold
    for this gateway, ``num_others`` those of other gateways and ``num_free_pages`` its pages, both
    as of the last heartbeat.
    """

    info: NodeInfo
    control: Control
    is_out: bool = False
    is_draining: bool = False
    num_tokens: int = 0
    num_other_tokens: int = 0
    num_sent: int = 0
    is_heard: asyncio.Event = field(default_factory=asyncio.Event)
    inboxes: dict[Identity, "asyncio.Queue[SequenceUpdate]"] = field(default_factory=dict)
    granted: set[Identity] = field(default_factory=set)
    _orphans: set[Identity] = field(default_factory=set)
    """Held there in the last beat, and nobody's here."""
    num_others: int = 0
    num_free_pages: int = field(init=False)
    _scopes: set[asyncio.Timeout] = field(default_factory=set)
    _loss: NodeLost = field(default_factory=NodeLost)

    def __post_init__(self) -> None:
        self.num_free_pages = self.info.num_pages

    @property
    def name(self) -> str:
        return self.info.spec.name

    @property
    def num_waiting_tokens(self) -> int:
        """To be computed there, of all gateways as far as is known here."""
        return self.num_tokens + self.num_other_tokens

    @contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """A text of so many tokens is sent there, until it has computed them."""
        self.num_tokens += num_tokens
        self.num_sent += 1
        try:
            yield
        finally:
            self.num_tokens -= num_tokens

    @property
    def is_well(self) -> bool:
        return self.is_heard.is_set() and not self.is_out and not self.is_draining

    @property
    def num_rows(self) -> int:
        """Sequences that run or wait there, of all gateways as far as is known here."""
        return len(self.inboxes) + self.num_others

    async def status(self) -> NodeStatus:
        """What the rank says of itself now; raises whatever keeps it from that."""
        return await ask(self.control, "status", None, NodeStatus, STATUS_TIMEOUT_S)

    def open_inbox(self, identity: Identity) -> "asyncio.Queue[SequenceUpdate]":
        """Where the sequence's updates will arrive."""
        inbox = self.inboxes[identity] = asyncio.Queue()
        return inbox

    def close_inbox(self, identity: Identity) -> None:
        del self.inboxes[identity]
        self.granted.discard(identity)

    def deliver(self, frame: TokenFrame, expected: set[Identity]) -> None:
        """Updates to their inboxes. A beat says of each sequence that was ``expected`` when it was
        asked for whether the rank still holds it; what two beats in a row name and nobody here
        knows is aborted again."""
        for update in frame.updates:
            self._put(update)
        if frame.beat is not None:
            alive = set(frame.beat.alive)
            self.num_free_pages = frame.beat.num_free_pages
            self.num_others = max(0, frame.beat.num_rows + frame.beat.num_waiting - len(alive))
            for identity in expected - alive:
                self._fail(identity, "the rank no longer holds it")
            orphans = alive - self.inboxes.keys()
            for identity in orphans & self._orphans:
                self.release("abort", Abort(identity))
            self._orphans = orphans

    def release(self, method: str, asked: Abort | Cancel) -> "asyncio.Task[Done]":
        """Have it let go of a sequence. One that cannot be told is dead, or its lease runs out, or
        its beats name what it still holds."""
        return _releases.start(ask(self.control, method, asked, Done, RELEASE_TIMEOUT_S))

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """As soon as the rank is lost the body ends with the error of that, whatever it awaits."""
        scope = asyncio.timeout(None)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            error = type(self._loss)(str(self._loss))
            error.node = self.name
            raise error from None
        finally:
            self._scopes.discard(scope)

    def fail_all(self, error: Exception) -> None:
        """It is heard no more, and nobody waits for it any longer."""
        self.is_heard.clear()
        self._loss = error if isinstance(error, NodeLost) else NodeLost(f"{self.name}: {error!r}")
        scopes, self._scopes = self._scopes, set()
        for scope in scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    def _fail(self, identity: Identity, reason: str) -> None:
        text = f"decode rank {self.name} lost {identity}: {reason}"
        self._put(SequenceUpdate(identity, (), ERROR, failure=Failure("NodeLost", text)))

    def _put(self, update: SequenceUpdate) -> None:
        inbox = self.inboxes.get(update.identity)
        if inbox is not None:
            inbox.put_nowait(update)
