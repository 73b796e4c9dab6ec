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
"""Follows the token: which rank this is."""
HELLO_S = 2.0
_RECEIVE_BYTES = 1 << 16


class Hub:
    """Listens from the start; ``run`` is told what to decide by when rank 0's engine is built, and
    plans as soon as all ranks have come. ``close`` ends it."""

    def __init__(self, num_ranks: int, host: str) -> None:
        self._num_ranks = num_ranks
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), backlog=num_ranks)
        self._listener.settimeout(CONNECT_S)
        self.store, address = store_server(host, CONNECT_S)
        ports = self._listener.getsockname()[1], int(address.rpartition(":")[2])
        self.meeting = Meeting(host, *ports, self._token)
        self._connections: dict[int, socket.socket] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def run(self, decide: Decide[Any, Any], proposal: type) -> None:
        rounds: Rounds[Any, Any] = Rounds(self._num_ranks, decide)
        self._thread = threading.Thread(
            target=self._run, args=(rounds, proposal), name="planner", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Any thread. The planner's own, if it runs, sees its sockets end and lets go of them."""
        self._is_closed = True
        sockets = self._listener, *self._connections.values()
        for one in sockets:
            shut(one)
        if self._thread is None:
            self._listener.close()

    def _run(self, rounds: Rounds[Any, Any], proposal: type) -> None:
        try:
            while len(self._connections) < self._num_ranks:
                self._accept()
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

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(HELLO_S)
        try:
            data = connection.recv(TOKEN_BYTES + HELLO.size, socket.MSG_WAITALL)
        except OSError:
            data = b""
        if not hmac.compare_digest(data[:TOKEN_BYTES], self._token):
            log.warning("somebody came to the planner without the token")
            connection.close()
            return
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        [rank] = HELLO.unpack(data[TOKEN_BYTES:])
        self._connections[rank] = connection


def shut(connection: socket.socket) -> None:
    """The other end, and whoever reads here, see it at once; who reads here closes it."""
    with suppress(OSError):  # the other end was first
        connection.shutdown(socket.SHUT_RDWR)
