"""Open streams of all entrypoints: admission, request ids, aborts and draining."""

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

if TYPE_CHECKING:  # commands that only use the client must not import torch
    from tandem.cluster.gateway.fan_out import AnswerGroup
    from tandem.cluster.gateway.gateway import ClusterGateway

STREAM_CLOSE_TIMEOUT_S = 5.0
"""Maximum seconds for ended streams to free their resources."""


class StreamWatcher:
    """Observer of one stream. This base class ignores everything."""

    def on_piece(self, piece: Piece) -> None:
        """Record a piece that is sent to the client."""

    def on_end(self, num_answers: int) -> None:
        """Record the end of the stream, which was to contain ``num_answers`` Finished pieces."""


@dataclass(eq=False, slots=True)
class _Stream:
    """An open stream.

    Attributes:
        nonce: Nonce of the client's stream, common to all its attempts; "" if the client sent none.
        answers: None until the request has been checked.
        end_reason: Message of the error that ends the stream; "" while it runs.
        closed: Done once the stream is closed.
    """

    nonce: str
    watcher: StreamWatcher
    writer: PieceWriter
    is_aborted: bool = False
    answers: "AnswerGroup | None" = None
    end_reason: str = ""
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    closed: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def abort(self) -> None:
        """Abort the answers of the stream, including those that have not started yet."""
        self.is_aborted = True
        if self.answers is not None:
            self.answers.abort()

    def end(self, reason: str) -> None:
        """End the stream early with ``Draining``."""
        if not self.scope.expired():
            self.end_reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())


class Admission:
    """Request interface of a server, shared by all entrypoints.

    Raises ``Draining`` for requests before a gateway is attached and after ``drain`` starts.

    Attributes:
        on_error: Called with the gRPC code of each failed call. Set by an entrypoint.
        on_stream: Creates the watcher of each stream. Set by an entrypoint.
    """

    def __init__(self, config: TandemConfig) -> None:
        self.config = config
        self.gateway: ClusterGateway | None = None
        self._is_leaving = self._is_draining = False
        self._streams: dict[str, _Stream] = {}
        self._threads = TokeniserThreads()
        self.on_error: Callable[[str], None] = lambda code: None
        self.on_stream: Callable[[], StreamWatcher] = StreamWatcher

    async def attach(self, gateway: "ClusterGateway") -> None:
        """Start serving requests through ``gateway``."""
        self.gateway = gateway

    def get_gateway(self) -> "ClusterGateway":
        """Return the gateway. Raises ``Draining`` if none is attached yet."""
        if self.gateway is None:
            raise Draining("the server is still starting; try again later")
        return self.gateway

    def is_serving(self) -> bool:
        """Whether new requests should be routed to this server."""
        return not self._is_leaving and self.gateway is not None and self.gateway.is_healthy()

    async def status(self) -> ServerStatus:
        """Return the server's status. Also works while starting and draining."""
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
        """Check a request and write every piece of its answers.

        Args:
            raw_request: Request as received.
            write: Called with each piece.
            nonce: Nonce of the client's stream. A later attempt with the same nonce ends an earlier
                one.
            on_proof: Called before the first piece, with the proof that the client needs to resume.

        Raises:
            Overloaded: The queue is full. Raised before anything is tokenised, if possible.
            Draining: The server drains, or the stream was ended; its client should resume.
            Exception: Errors of ``check_request``, ``ClusterGateway.start_answers`` and the
                answers.
        """
        gateway = self.get_gateway()
        name = request_id(raw_request.request_id)
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
                f"the client left more than {num_kb} kB of the answer unread; resume the answer"
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
        """Abort a request, even before its answers start.

        Returns False if no request has this id.
        """
        if not name:
            raise ValueError("request_id='': name the request to abort")
        self.get_gateway()
        if stream := self._streams.get(name):
            stream.abort()
        return stream is not None

    async def drain(self) -> None:
        """Shut down gracefully.

        Reports not serving for ``server.lame_duck_s`` and then refuses new requests. Running
        requests have ``server.drain_timeout_s`` to finish before they are ended.
        """
        self._is_leaving = True
        await asyncio.sleep(self.config.server.lame_duck_s)
        self._is_draining = True
        await self._wait_until_closed(self.config.server.drain_timeout_s)
        await self.end_streams()

    async def end_streams(self) -> None:
        """End every open stream with ``Draining``.

        Waits at most STREAM_CLOSE_TIMEOUT_S for their cleanup.
        """
        self._is_leaving = self._is_draining = True
        for stream in self._streams.values():
            stream.end("the server shut down before the answer ended")
        await self._wait_until_closed(STREAM_CLOSE_TIMEOUT_S)
        self._threads.close()

    def _check_capacity(self, gateway: "ClusterGateway", is_resumed: bool) -> None:
        """Raise ``Overloaded`` if the queue is full or too many streams are open.

        If too many streams are open and a client reads its stream too slowly, that stream is ended
        instead; its client can resume it. Resumed answers may use a reserve.
        """
        gateway.check_queue(1, is_resumed)
        num_reserved = self.config.decode.num_rows if is_resumed else 0
        if len(self._streams) > gateway.max_streams + num_reserved:
            open_streams = [stream for stream in self._streams.values() if not stream.end_reason]
            slowest = max(open_streams, key=lambda stream: stream.writer.lag_s)
            if slowest.writer.lag_s < STALLED_S:
                raise Overloaded(
                    f"{len(self._streams) - 1} streams are open, the maximum of this server"
                )
            slowest.end(
                "too many streams are open, and this one was read slowest; resume the answer"
            )

    async def _wait_until_closed(self, timeout_s: float) -> None:
        """Wait until the streams that are open on entry are closed."""
        if closed := [stream.closed for stream in self._streams.values()]:
            await asyncio.wait(closed, timeout=timeout_s)

    @asynccontextmanager
    async def _open_stream(self, name: str, nonce: str) -> AsyncIterator[_Stream]:
        """Register a stream under a request id until the block ends.

        An earlier attempt at the same stream, whose disconnect this server has not noticed, is
        ended first.

        Raises:
            ValueError: Another request with this id is running.
            Draining: The server refuses new requests, or the stream is ended.
        """
        while not self._is_draining and (earlier := self._streams.get(name)):
            if not nonce or earlier.nonce != nonce:
                raise ValueError(
                    f"request_id={name!r}: a request with this id is running; "
                    "use another id or leave it empty"
                )
            earlier.end("a newer call with the same request id replaced this stream")
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
    """Return the checked request, and the proof for its client.

    Raises:
        ValueError, ModelMismatch: See ``check_request``.
    """
    request = check_request(raw_request, gateway.model, gateway.tokenizer)
    return with_proof(
        request=request,
        sent_proof=raw_request.resume_proof,
        key=gateway.proof_key,
        model_digest=gateway.model.digest,
    )
