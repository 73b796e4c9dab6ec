"""What a decode rank tells the gateways: each session its own sequences' updates, and its beats."""

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
    """Owned by the asyncio loop it was made in; ``publish`` is called on the engine thread.

    ``make_heartbeat`` makes the beat of a session that holds these, without waiting for the engine.
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
        """Call ``reader`` with the packed frames of ``session`` from now on, and with the error
        that stops the engine; returns what ends that. A later reader replaces an earlier one."""
        self._sessions.renew(session)
        self._readers[session] = reader

        def unsubscribe() -> None:
            if self._readers.get(session) is reader:
                del self._readers[session]

        return unsubscribe

    def on_heartbeat(self, session: int) -> None:
        """A heartbeat: renew what the session holds, and tell it what that is, or why the engine
        has stopped."""
        self._sessions.renew(session)
        heartbeat = self._make_heartbeat(self._sessions.sequences_of(session))
        self._send_frame(session, self._failure or pack(TokenFrame(heartbeat=heartbeat)))

    def publish(self, updates: list[SequenceUpdate]) -> None:
        """What a step gave. Engine thread."""
        if updates:
            self._asyncio.call_soon_threadsafe(self._publish, updates)

    def fail(self, error: BaseException) -> None:
        """The engine has stopped."""
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
