"""The planner of a gang's life: a thread beside rank 0 that answers all proposals with one plan.

Its death is rank 0's death. It ends with the first connection that does, and closes all others: so
every rank learns at once that the epoch is over.
"""

import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from core.membership import Meeting
from core.schema import pack, unpack
from kv_transfer.channel import store_server
from runtime.gang.collectives import CONNECT_S
from runtime.gang.messages import Inbox, Proposed, Told, send
from runtime.gang.rounds import Rounds
from runtime.lockstep import Decide

log = logging.getLogger(__name__)
TOKEN_BYTES = 32
HELLO = struct.Struct("!I")
"""Follows the token, in one piece with it: which rank this is."""
MAX_SILENT = 64
"""Connections that have said nothing yet: another one ends the oldest."""
_RECEIVE_BYTES = 1 << 16


class Hub:
    """Takes in ranks from the start, and no strangers; ``run`` is told what to decide by when rank
    0's engine is built, and plans as soon as all ranks have come. ``close`` ends it."""

    def __init__(self, num_ranks: int, host: str) -> None:
        self._num_ranks = num_ranks
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), backlog=MAX_SILENT)
        self.store, address = store_server(host, CONNECT_S)
        ports = self._listener.getsockname()[1], int(address.rpartition(":")[2])
        self.meeting = Meeting(host, *ports, self._token)
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
            with selectors.DefaultSelector() as selector:
                for rank, connection in self._connections.items():
                    selector.register(connection, selectors.EVENT_READ, (rank, Inbox(Proposed)))
                while not self._is_closed:
                    self._turn(selector, rounds, proposal)
        except OSError as error:
            if not self._is_closed:
                log.info("the epoch is over: %r", error)
        except Exception:
            log.exception("the planner failed, and the epoch with it")
        finally:
            self.close()
            for one in (self._listener, *self._connections.values()):
                one.close()

    def _turn(
        self, selector: selectors.BaseSelector, rounds: Rounds[Any, Any], proposal: type
    ) -> None:
        for ready, _ in selector.select():
            rank, inbox = ready.data
            data = self._connections[rank].recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError(f"rank {rank} has gone")
            for message in inbox.feed(data):
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
        silent: list[socket.socket] = []
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while len(self._connections) < self._num_ranks:
                    ready = {key.fileobj for key, _ in selector.select()}
                    if self._listener in ready:
                        silent.append(self._listener.accept()[0])
                        selector.register(silent[-1], selectors.EVENT_READ)
                    for one in [*silent]:
                        if one in ready or len(silent) > MAX_SILENT:
                            selector.unregister(one)
                            silent.remove(one)
                            self._greet(one)
        finally:
            for one in (self._listener, *silent):
                one.close()

    def _greet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        data = b""
        with suppress(OSError):
            data = connection.recv(TOKEN_BYTES + HELLO.size)
        for rank in set(range(self._num_ranks)) - self._connections.keys():
            if hmac.compare_digest(data, self._token + HELLO.pack(rank)):
                connection.settimeout(CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections[rank] = connection
                return
        log.warning("somebody came to the planner who is none of its ranks")
        connection.close()


def shut(connection: socket.socket) -> None:
    """The other end, and whoever reads here, see it at once; who reads here closes it."""
    with suppress(OSError):  # the other end was first
        connection.shutdown(socket.SHUT_RDWR)
