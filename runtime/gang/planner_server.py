"""The planner of an epoch: a thread of rank 0 that merges all ranks' proposals into one plan.

When one rank's connection ends, the planner closes all others and ends. Every rank therefore learns
at once that the epoch is over.
"""

import logging
import selectors
import socket
import struct
import threading
from queue import SimpleQueue
from typing import Any

from tandem.core.membership import Rendezvous
from tandem.core.schema import pack, unpack
from tandem.net.framing import (
    GREETING_S,
    MAX_PENDING_HANDSHAKES,
    FrameDecoder,
    PendingHandshakes,
    read_frames,
    shutdown_socket,
)
from tandem.net.groups import store_server
from tandem.runtime.gang.collectives import CONNECT_S
from tandem.runtime.gang.planner_messages import (
    MAX_PLAN_MESSAGE_BYTES,
    PlanMessage,
    ProposalMessage,
    send,
)
from tandem.runtime.gang.proposal_rounds import ProposalRounds
from tandem.runtime.lockstep import Decide

log = logging.getLogger(__name__)
RANK_GREETING = struct.Struct("!I")
"""Format of the rank number, which a connecting rank sends after the secret token."""


class PlannerServer:
    """Accepts connections of the gang's ranks, and of no other clients, from its creation on.

    ``start_planning`` is called when rank 0's engine is built. Planning starts once all ranks have
    connected as well. ``close`` ends it.
    """

    def __init__(self, num_ranks: int, host: str) -> None:
        self._num_ranks = num_ranks
        self._selector = selectors.DefaultSelector()
        self._handshakes = PendingHandshakes(RANK_GREETING.size, self._reject)
        self._listener = socket.create_server((host, 0), backlog=MAX_PENDING_HANDSHAKES)
        self._store, store_port = store_server(host, CONNECT_S)
        port = self._listener.getsockname()[1]
        self.rendezvous = Rendezvous(
            host=host, port=port, store_port=store_port, token=self._handshakes.token
        )
        self._connections: dict[int, socket.socket] = {}
        self._is_closed = False
        self._planning: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name="planner", daemon=True).start()

    def start_planning(self, decide: Decide[Any, Any], proposal: type) -> None:
        self._planning.put((ProposalRounds(self._num_ranks, decide), proposal))

    def close(self) -> None:
        """End the epoch. The planner thread then closes its sockets. Any thread may call this."""
        self._is_closed = True
        self._planning.put((None, None))
        for connection in (self._listener, *self._connections.values()):
            shutdown_socket(connection)

    def _run(self) -> None:
        try:
            self._accept_ranks()
            rounds, proposal = self._planning.get()
            for rank, connection in self._connections.items():
                state = rank, FrameDecoder(MAX_PLAN_MESSAGE_BYTES)
                self._selector.register(connection, selectors.EVENT_READ, state)
            while not self._is_closed:
                self._run_round(rounds, proposal)
        except OSError as error:
            if not self._is_closed:
                log.info("the planner stops because the epoch has ended: %r", error)
        except Exception:
            log.exception("the planner failed, which ends the epoch")
        finally:
            self.close()
            self._reject_all()
            for connection in self._connections.values():
                connection.close()

    def _run_round(self, rounds: ProposalRounds[Any, Any], proposal: type) -> None:
        for ready, _ in self._selector.select():
            rank, decoder = ready.data
            for frame in read_frames(self._connections[rank], decoder):
                message = unpack(ProposalMessage, frame)
                rounds.propose(rank, message.step, unpack(proposal, message.proposal))
        self._poll_ranks(rounds)
        while (planned := rounds.plan()) is not None:
            step, key = planned
            plan_message = PlanMessage(step, None if key is None else pack(key))
            for connection in self._connections.values():
                send(connection, plan_message)
            self._poll_ranks(rounds)  # some rank may have proposed the next step early

    def _poll_ranks(self, rounds: ProposalRounds[Any, Any]) -> None:
        for rank in rounds.ranks_to_poll():
            send(self._connections[rank], PlanMessage(rounds.step, is_poll=True))

    def _accept_ranks(self) -> None:
        """Accept connections until all ranks have connected, and none after that."""
        missing = {RANK_GREETING.pack(rank): rank for rank in range(self._num_ranks)}
        self._selector.register(self._listener, selectors.EVENT_READ)
        while missing:
            ready: set[Any] = {key.fileobj for key, _ in self._selector.select(GREETING_S)}
            for connection in ready - {self._listener}:
                self._handshake(connection, missing)
            if self._listener in ready:
                connection = self._listener.accept()[0]
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                self._handshakes.add(connection)
            self._handshakes.sweep()
        self._reject_all()

    def _handshake(self, connection: socket.socket, missing: dict[bytes, int]) -> None:
        try:
            hello = self._handshakes.feed(
                connection, connection.recv(self._handshakes.num_bytes_needed(connection))
            )
            rank = None if hello is None else missing.pop(hello)
        except (OSError, ValueError, KeyError) as error:
            log.warning(
                "refused a connection to the planner that is not from a rank of the gang: %r", error
            )
            self._reject(connection)
            return
        if rank is not None:
            self._selector.unregister(connection)
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[rank] = connection

    def _reject(self, connection: socket.socket) -> None:
        self._handshakes.forget(connection)
        self._selector.unregister(connection)
        connection.close()

    def _reject_all(self) -> None:
        """Close all sockets that are registered with the selector."""
        for key in [*self._selector.get_map().values()]:
            self._reject(key.fileobj)  # type: ignore[arg-type]
