"""Who is being answered: the open streams of all entrypoints, their names, and how they end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tandem.cluster.gateway.checks import check_request, request_id
from tandem.cluster.gateway.piece_writer import (
    MAX_UNREAD_ANSWER_BYTES,
    STALLED_S,
    PieceWriter,
    WritePiece,
)
from tandem.cluster.gateway.proofs import with_proof
from tandem.cluster.gateway.tokenising import TokeniserThreads
from tandem.core.answer import Piece
from tandem.core.config import TandemConfig
from tandem.core.errors import Draining, Overloaded
from tandem.core.info import DRAINING, STARTING, ServerStatus
from tandem.core.request import RawRequest, Request

if TYPE_CHECKING:  # the client's commands need no torch
    from tandem.cluster.gateway.fan_out import AnswerGroup
    from tandem.cluster.gateway.gateway import ClusterGateway

STREAM_CLOSE_TIMEOUT_S = 5.0
"""How long evicted streams may take to free what they hold."""


class StreamWatcher:
    """Observes one stream; this one keeps nothing of it."""

    def on_piece(self, piece: Piece) -> None:
        """Take note of a piece that goes to the client."""

    def on_end(self, num_answers: int) -> None:
        """Take note that no piece follows; the stream was to have ``num_answers`` last ones."""


@dataclass(eq=False, slots=True)
class _Stream:
    """An open one. ``nonce`` is that of the client's stream, "" if it sent none; its ``answers``
    begin when the request is checked."""

    nonce: str
    watcher: StreamWatcher
    writer: PieceWriter
    is_aborted: bool = False
    answers: "AnswerGroup | None" = None
    end_reason: str = ""
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    closed: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def abort(self) -> None:
        """Its answers end here, also those that have not begun."""
        self.is_aborted = True
        if self.answers is not None:
            self.answers.abort()

    def end(self, reason: str) -> None:
        """Break it off with ``Draining``."""
        if not self.scope.expired():
            self.end_reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())


class Admission:
    """What a entrypoint needs. Refuses requests with ``Draining`` until it has a gateway, and from
    ``drain`` on."""

    def __init__(self, config: TandemConfig) -> None:
        self.config = config
        self.gateway: ClusterGateway | None = None
        self._is_leaving = self._is_draining = False
        self._streams: dict[str, _Stream] = {}
        self._threads = TokeniserThreads()
        self.on_error: Callable[[str], None] = lambda code: None
        self.on_stream: Callable[[], StreamWatcher] = StreamWatcher
        """A entrypoint's: hears of calls that fail, and makes the watcher of each stream."""

    async def attach(self, gateway: "ClusterGateway") -> None:
        """Serve requests through ``gateway`` from now on."""
        self.gateway = gateway

    def get_gateway(self) -> "ClusterGateway":
        """``Draining`` if there is none yet."""
        if self.gateway is None:
            raise Draining("the server is still starting; try again in a while")
        return self.gateway

    def is_serving(self) -> bool:
        """Whether requests belong here."""
        return not self._is_leaving and self.gateway is not None and self.gateway.is_healthy()

    async def status(self) -> ServerStatus:
        """Told while starting and draining too."""
        status = ServerStatus(STARTING, self.config.mode, len(self._streams))
        if self.gateway is not None:
            status = await self.gateway.status(len(self._streams))
        return replace(status, state=DRAINING) if self._is_leaving else status

    async def answer(
        self,
        raw_request: RawRequest,
        write: WritePiece,
        nonce: str = "",
        on_proof: Callable[[str], None] = lambda proof: None,
    ) -> None:
        """Check what is ``raw_request``, and ``write`` every piece of its answers. All attempts at
        one stream have the same ``nonce``: a later one ends an earlier. ``on_proof`` is called
        before the first piece, with the proof that the client needs to resume the answer.

        Raises what ``check_request``, ``ClusterGateway.start_answers`` and what it begins raise;
        ``Overloaded`` before anything is tokenised; ``Draining`` if it is ended or given up, so
        that its client resumes.
        """
        gateway, name = self.get_gateway(), request_id(raw_request.request_id)
        async with self._open_stream(name, nonce) as stream:
            is_resume = bool(raw_request.resume_proof and raw_request.resume_token_ids)
            self._check_capacity(gateway, is_resume)
            named = replace(raw_request, request_id=name)
            check = partial(_check_request, named, gateway)
            request, proof = await self._threads.run(len(raw_request.prompt or ""), check)
            if is_resume and not request.is_resumed:
                self._check_capacity(gateway, False)
            on_proof(proof)
            answers = stream.answers = gateway.start_answers(request)
            num_kb = MAX_UNREAD_ANSWER_BYTES >> 10
            answers.on_backlog_full = lambda: stream.end(
                f"more than {num_kb} kB of the answer were left unread; resume it"
            )
            if stream.is_aborted:
                answers.abort()
            try:
                async with aclosing(answers.pieces()) as pieces:
                    async for piece in pieces:
                        stream.watcher.on_piece(piece)
                        await stream.writer.write(piece, write)
            finally:
                stream.watcher.on_end(request.sampling.n)

    async def abort(self, name: str) -> bool:
        """End a request, also one that has not begun; False if there is none of this name."""
        if not name:
            raise ValueError("request_id='': name the request to abort")
        self.get_gateway()
        if stream := self._streams.get(name):
            stream.abort()
        return stream is not None

    async def drain(self) -> None:
        """Say for ``server.lame_duck_s`` that it leaves, then refuse new requests, let running ones
        finish for ``server.drain_timeout_s``, ``end`` the rest."""
        self._is_leaving = True
        await asyncio.sleep(self.config.server.lame_duck_s)
        self._is_draining = True
        await self._wait_until_closed(self.config.server.drain_timeout_s)
        await self.end_streams()

    async def end_streams(self) -> None:
        """Every open stream, with ``Draining``; it has STREAM_CLOSE_TIMEOUT_S to free things."""
        self._is_leaving = self._is_draining = True
        for stream in self._streams.values():
            stream.end("the server shut down before the answer ended")
        await self._wait_until_closed(STREAM_CLOSE_TIMEOUT_S)
        self._threads.close()

    def _check_capacity(self, gateway: "ClusterGateway", is_resumed: bool) -> None:
        """Raise ``Overloaded`` if another request cannot be queued, or if too many streams are
        open. Where one of them lags, that one is ended instead, so that its client resumes. Begun
        answers have a reserve."""
        gateway.check_queue(1, is_resumed)
        num_reserved = self.config.decode.num_rows if is_resumed else 0
        if len(self._streams) > gateway.max_streams + num_reserved:
            open_streams = [stream for stream in self._streams.values() if not stream.end_reason]
            slowest = max(open_streams, key=lambda stream: stream.writer.lag_s)
            if slowest.writer.lag_s < STALLED_S:
                raise Overloaded(f"{len(self._streams) - 1} streams are open already")
            slowest.end("it was read more slowly than others, and there is no room for all; resume")

    async def _wait_until_closed(self, timeout_s: float) -> None:
        """Wait for those that are open now; none may be added meanwhile."""
        if closed := [stream.closed for stream in self._streams.values()]:
            await asyncio.wait(closed, timeout=timeout_s)

    @asynccontextmanager
    async def _open_stream(self, name: str, nonce: str) -> AsyncIterator[_Stream]:
        """A stream that is open and has the name. An earlier attempt at it, whose break this server
        has not noticed, is ended first; ``ValueError`` if another request has the name,
        ``Draining`` if there is no entry, or when it is ended."""
        while not self._is_draining and (earlier := self._streams.get(name)):
            if not nonce or earlier.nonce != nonce:
                raise ValueError(
                    f"request_id={name!r}: a request of this name is running; "
                    "use another or leave it empty"
                )
            earlier.end("a later attempt at this stream took its place")
            await asyncio.wait([earlier.closed])
        if self._is_draining:
            raise Draining("the server is shutting down and takes no new requests")
        writer = PieceWriter(self.config.server.write_timeout_s)
        stream = self._streams[name] = _Stream(nonce, self.on_stream(), writer)
        try:
            async with stream.scope:
                yield stream
        except TimeoutError as error:
            if stream.scope.expired():
                raise Draining(stream.end_reason) from error
            raise
        finally:
            del self._streams[name]
            stream.closed.set_result(None)


def _check_request(raw_request: RawRequest, gateway: "ClusterGateway") -> tuple[Request, str]:
    """Return ``message`` as a request, and the proof for its client.

    Raises:
        ValueError, ModelMismatch: As ``check_request`` does.
    """
    request = check_request(raw_request, gateway.model, gateway.tokenizer)
    return with_proof(request, raw_request.resume_proof, gateway.proof_key, gateway.model.digest)
