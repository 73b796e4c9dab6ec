"""Streams of one request across retries, and the completions that a client assembles from them."""

import random
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from tandem.cluster.client.options import GenerateOptions, Prompt, build_request
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import RETRY_AFTER_KEY, STREAM_KEY
from tandem.cluster.proto.mapping import piece_from_proto
from tandem.core.answer import Delta, Finished, Piece

UNREACHABLE_TIMEOUT_S = 5.0
"""Maximum seconds of retries at an address where no server has ever answered."""
MAX_PAUSE_S = 5.0
"""Maximum pause between attempts, in seconds. Pauses double up to it, with up to 50 % of jitter."""


@dataclass(eq=False)
class InferenceError(Exception):
    """A call that failed.

    To resume an answer later, send the same request and seed with ``token_ids``, ``model`` and
    ``proof``. A server of another model refuses that with FAILED_PRECONDITION.

    Attributes:
        code: gRPC status.
        details: Message of the server.
        retry_after_s: Seconds to wait, as an overloaded server requests; None without such a hint.
        token_ids: Output tokens received so far, for ``resume_token_ids``.
        model: Digest of the model that generated them, for ``resume_model``.
        proof: Value for ``resume_proof``, which gives the resumed answer priority over new
            requests. Valid only with the same ``request_id``.
    """

    code: grpc.StatusCode
    details: str
    retry_after_s: float | None = None
    token_ids: tuple[int, ...] = ()
    model: str = ""
    proof: str = field(default="", repr=False)

    @classmethod
    def of(cls, error: grpc.RpcError) -> Self:
        """Convert an error of an asyncio or blocking channel, including the server's retry hint."""
        hint = dict(tuple(error.trailing_metadata() or ())).get(RETRY_AFTER_KEY)
        return cls(error.code(), error.details() or "", hint and float(hint))

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. ``token_ids`` includes the end-of-sequence token, if there was one."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


class StreamPlan:
    """State of one request across retries.

    A request for one answer may take several streams. A request for n answers takes one. Every
    attempt carries the same request id and nonce. The nonce distinguishes a retry from another
    request with the same id.
    """

    def __init__(
        self, prompt: Prompt, options: GenerateOptions, retry_s: float, backoff_s: float
    ) -> None:
        timeout_s = options.get("timeout_s")
        self._metadata = ((STREAM_KEY, secrets.token_hex(8)),)
        self._message = build_request(prompt, options)
        self._retry_s = retry_s
        self._backoff_s = backoff_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._token_ids = list(self._message.resume_token_ids)
        self._num_failures = 0
        self._failing_since = 0.0
        self._num_answers = self._num_running = self._message.sampling.n or 1

    def start_call(self, stub: rpc.InferenceStub) -> Any:
        """Start the next attempt: a call for the rest of the answer, which ends at the deadline."""
        self._message.resume_token_ids[:] = self._token_ids
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return stub.Generate(self._message, timeout=left_s, metadata=self._metadata)

    def receive(self, response: pb.GenerateResponse) -> Piece:
        """Return the piece in ``response``, and record the state for resuming after it."""
        piece = piece_from_proto(response)
        self._message.resume_model = response.model or self._message.resume_model
        self._message.resume_proof = response.proof or self._message.resume_proof
        if isinstance(piece, Delta):
            self._token_ids += piece.token_ids
            self._num_failures = 0
        else:
            self._num_running -= 1
        return piece

    @property
    def is_done(self) -> bool:
        """Whether the last piece of every answer has arrived."""
        return self._num_running == 0

    def pause_after(self, failure: InferenceError | None, is_known: bool = True) -> float:
        """Return the seconds to wait before the next attempt.

        Two kinds of failure are retried: UNAVAILABLE, and an overloaded server's refusal with a
        retry hint if some tokens have arrived.

        Args:
            failure: Error that ended the latest attempt; None if the stream ended early without
                one.
            is_known: Whether a server has ever answered at this address. If not, retries end after
                UNREACHABLE_TIMEOUT_S at the latest.

        Raises:
            InferenceError: ``failure``, if it is of another kind or ``retry_s`` has passed. Also if
                the request is for several answers and some tokens have arrived.
        """
        if failure is None:
            details = "the stream ended before the answer was complete"
            failure = InferenceError(grpc.StatusCode.UNAVAILABLE, details)
        now = time.monotonic()
        if self._num_failures == 0:
            self._failing_since = now
        self._num_failures += 1
        retry_s = self._retry_s if is_known else min(self._retry_s, UNREACHABLE_TIMEOUT_S)
        left_s = self._failing_since + retry_s - now
        exhausted = left_s <= 0
        if self._num_answers == 1:
            failure.token_ids = tuple(self._token_ids)
            failure.model = self._message.resume_model
            failure.proof = self._message.resume_proof
        elif self._token_ids:
            exhausted = True
        has_no_room = bool(self._token_ids) and failure.retry_after_s is not None
        if exhausted or not (has_no_room or failure.code == grpc.StatusCode.UNAVAILABLE):
            raise failure
        pause_s = min(self._backoff_s * 2 ** min(self._num_failures - 1, 10), MAX_PAUSE_S)
        return min(left_s, (failure.retry_after_s or 0.0) + pause_s * random.uniform(0.5, 1.0))


def completions_of(pieces: Iterable[Piece]) -> list[Completion]:
    """Assemble the pieces of all answers into completions, ordered by index."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [_completion(by_index[index]) for index in sorted(by_index)]


def _completion(pieces: Sequence[Piece]) -> Completion:
    finished = pieces[-1]
    assert isinstance(finished, Finished), f"the last piece must be Finished, got {finished}"
    text = "".join(piece.text for piece in pieces)
    return Completion(
        text, tuple(token_id for piece in pieces for token_id in piece.token_ids), finished
    )
