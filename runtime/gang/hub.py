"""The planner of a gang's life: a thread beside rank 0 that answers all proposals with one plan.

Its death is rank 0's death. It ends with the first connection that does, and closes all others: so
every rank learns at once that the epoch is over.
"""

import logging
import selectors
import socket
import struct
import threading
from queue import SimpleQueue
from typing import Any

from tandem.core.membership import Meeting
from tandem.core.schema import pack, unpack
from tandem.net.framing import GREETING_S, MAX_STRANGERS, Inbox, Strangers, received, shut
from tandem.net.groups import store_server
from tandem.runtime.gang.collectives import CONNECT_S
from tandem.runtime.gang.rounds import Rounds
from tandem.runtime.gang.told import MAX_BYTES, Proposed, Told, send
from tandem.runtime.lockstep import Decide

log = logging.getLogger(__name__)
HELLO = struct.Struct("!I")
"""Of a greeting, after the token: which rank this is."""


class Hub:
    """Takes in ranks from the start, and no strangers; ``run`` is told what to decide by when rank
    0's engine is built, and plans as soon as all ranks have come. ``close`` ends it."""

    def __init__(self, num_ranks: int, host: str) -> None:
        self._num_ranks = num_ranks
        self._selector = selectors.DefaultSelector()
        self._strangers = Strangers(HELLO.size, self._turn_away)
        self._listener = socket.create_server((host, 0), backlog=MAX_STRANGERS)
        self._store, store_port = store_server(host, CONNECT_S)
        port = self._listener.getsockname()[1]
        self.meeting = Meeting(host, port, store_port, self._strangers.token)
        self._connections: dict[int, socket.socket] = {}
        self._is_closed = False
        self._work: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name="planner", daemon=True).start()

    def run(self, decide: Decide[Any, Any], proposal: type) -> None:
        self._work.put((Rounds(self._num_ranks, decide), proposal))

    def close(self) -> None:
        """Any thread. The planner's own sees its sockets end and lets go of them."""
        self._is_closed = True
        self._work.put((None, None))
        for one in (self._listener, *self._connections.values()):
            shut(one)

    def _run(self) -> None:
        try:
            self._gather()
            rounds, proposal = self._work.get()
            for rank, connection in self._connections.items():
                given = rank, Inbox(MAX_BYTES)
                self._selector.register(connection, selectors.EVENT_READ, given)
            while not self._is_closed:
                self._turn(rounds, proposal)
        except OSError as error:
            if not self._is_closed:
                log.info("the epoch is over: %r", error)
        except Exception:
            log.exception("the planner failed, and the epoch with it")
        finally:
            self.close()
            self._close_all()
            for connection in self._connections.values():
                connection.close()

    def _turn(self, rounds: Rounds[Any, Any], proposal: type) -> None:
        for ready, _ in self._selector.select():
            rank, inbox = ready.data
            for frame in received(self._connections[rank], inbox):
                message = unpack(Proposed, frame)
                rounds.propose(rank, message.step, unpack(proposal, message.proposal))
        self._ask(rounds)
        while (planned := rounds.plan()) is not None:
            step, key = planned
            told = Told(step, None if key is None else pack(key))
            for connection in self._connections.values():
                send(connection, told)
            self._ask(rounds)  # for the next step, which somebody may have proposed early

    def _ask(self, rounds: Rounds[Any, Any]) -> None:
        for rank in rounds.asks():
            send(self._connections[rank], Told(rounds.step, is_asked=True))

    def _gather(self) -> None:
        """Until all ranks have come; then nobody else may."""
        missing = {HELLO.pack(rank): rank for rank in range(self._num_ranks)}
        self._selector.register(self._listener, selectors.EVENT_READ)
        while missing:
            ready: set[Any] = {key.fileobj for key, _ in self._selector.select(GREETING_S)}
            for one in ready - {self._listener}:
                self._greet(one, missing)
            if self._listener in ready:
                one = self._listener.accept()[0]
                one.setblocking(False)
                self._selector.register(one, selectors.EVENT_READ)
                self._strangers.come(one)
            self._strangers.sweep()
        self._close_all()

    def _greet(self, one: socket.socket, missing: dict[bytes, int]) -> None:
        try:
            hello = self._strangers.hear(one, one.recv(self._strangers.num_wanted(one)))
            rank = None if hello is None else missing.pop(hello)
        except (OSError, ValueError, KeyError) as error:
            log.warning("somebody came to the planner who is none of its ranks: %r", error)
            self._turn_away(one)
            return
        if rank is not None:
            self._selector.unregister(one)
            one.settimeout(CONNECT_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[rank] = one

    def _turn_away(self, connection: socket.socket) -> None:
        self._strangers.forget(connection)
        self._selector.unregister(connection)
        connection.close()

    def _close_all(self) -> None:
        """That are waited for."""
        for key in [*self._selector.get_map().values()]:
            self._turn_away(key.fileobj)  # type: ignore[arg-type]
