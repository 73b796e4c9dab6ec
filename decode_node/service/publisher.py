"""Sends the updates of its sequences, and heartbeats, to each gateway session."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from tandem.core.heartbeat import Heartbeat
from tandem.core.identity import Identity
from tandem.core.request import SequenceUpdate, TokenFrame
from tandem.core.schema import pack
from tandem.decode_node.service.sessions import Sessions
from tandem.runtime.frames import Frame


class FramePublisher:
    """Distributes frames to the readers of sessions.

    Used on the asyncio loop in which it was created. Only ``publish`` is called on the engine
    thread. ``make_heartbeat`` builds the heartbeat of a session that holds the given sequences,
    without waiting for the engine.
    """

    def __init__(
        self, sessions: Sessions, make_heartbeat: Callable[[tuple[Identity, ...]], Heartbeat]
    ) -> None:
        self._sessions = sessions
        self._make_heartbeat = make_heartbeat
        self._readers: dict[int, Callable[[Frame], None]] = {}
        self._failure: BaseException | None = None
        self._asyncio = asyncio.get_running_loop()

    def subscribe(self, session: int, reader: Callable[[Frame], None]) -> Callable[[], None]:
        """Call ``reader`` with every packed frame of ``session``, and with a fatal engine error.

        A later reader replaces an earlier one. Returns a function that ends the subscription.
        """
        self._sessions.renew(session)
        self._readers[session] = reader

        def unsubscribe() -> None:
            if self._readers.get(session) is reader:
                del self._readers[session]

        return unsubscribe

    def on_heartbeat(self, session: int) -> None:
        """Renew the session and reply with a heartbeat that lists its sequences.

        If the engine has stopped, the error is sent instead.
        """
        self._sessions.renew(session)
        heartbeat = self._make_heartbeat(self._sessions.sequences_of(session))
        self._send_frame(session, self._failure or pack(TokenFrame(heartbeat=heartbeat)))

    def publish(self, updates: list[SequenceUpdate]) -> None:
        """Send a step's updates to their sessions. Called on the engine thread."""
        if updates:
            self._asyncio.call_soon_threadsafe(self._publish, updates)

    def fail(self, error: BaseException) -> None:
        """Send ``error``, which stopped the engine, to all readers and to later heartbeats."""
        self._failure = error
        for reader in list(self._readers.values()):
            reader(error)

    def _publish(self, updates: list[SequenceUpdate]) -> None:
        by_session: dict[int, list[SequenceUpdate]] = defaultdict(list)
        for update in updates:
            session = self._sessions.session_of(update.identity)
            if session is not None:
                by_session[session].append(update)
            if update.finish_reason is not None:
                self._sessions.release(update.identity)
        for session, own in by_session.items():
            self._send_frame(session, pack(TokenFrame(tuple(own))))

    def _send_frame(self, session: int, frame: Frame) -> None:
        if session in self._readers:
            self._readers[session](frame)
