"""One answer over as many streams as it takes, and what a client makes of them."""

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
"""How long a server is looked for where none has ever answered."""
MAX_PAUSE_S = 5.0
"""Pauses between attempts double up to this, with jitter of half."""


@dataclass(eq=False)
class InferenceError(Exception):
    """A call that failed.

    ``code`` is the gRPC status. ``retry_after_s`` is the server's hint when it is overloaded.
    ``token_ids`` are the answer's tokens that had arrived: pass them as ``resume_token_ids``
    (with the same seed) to go on later, and ``model``, the digest of the model that wrote them, as
    ``resume_model``. ``proof`` is the ``resume_proof`` with which the answer then goes ahead of new
    requests, if ``request_id`` is the same too. FAILED_PRECONDITION: the server has another model
    and cannot go on.
    """

    code: grpc.StatusCode
    details: str
    retry_after_s: float | None = None
    token_ids: tuple[int, ...] = ()
    model: str = ""
    proof: str = field(default="", repr=False)

    @classmethod
    def of(cls, error: grpc.RpcError) -> Self:
        """``error`` of either kind of channel, with the server's hint."""
        hint = dict(tuple(error.trailing_metadata() or ())).get(RETRY_AFTER_KEY)
        return cls(error.code(), error.details() or "", hint and float(hint))

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; ``token_ids`` end with the end-of-sequence token if there was one."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


class StreamPlan:
    """Follows one answer over as many streams as it takes, or n answers over one.

    Every attempt has the same request id and nonce, so that the server can tell what is left of an
    earlier one from another request of that name.
    """

    def __init__(
        self, prompt: Prompt, options: GenerateOptions, retry_s: float, backoff_s: float
    ) -> None:
        timeout_s = options.get("timeout_s")
        self._metadata = ((STREAM_KEY, secrets.token_hex(8)),)
        self._message = build_request(prompt, options)
        self._retry_s, self._backoff_s = retry_s, backoff_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._token_ids = list(self._message.resume_token_ids)
        self._num_failures, self._failing_since = 0, 0.0
        self._num_answers = self._num_running = self._message.sampling.n or 1

    def start_call(self, stub: rpc.InferenceStub) -> Any:
        """The next attempt: a call for the rest of the answer, which ends at the deadline."""
        self._message.resume_token_ids[:] = self._token_ids
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return stub.Generate(self._message, timeout=left_s, metadata=self._metadata)

    def receive(self, response: pb.GenerateResponse) -> Piece:
        """The piece in ``response``, noted as arrived."""
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
        """Whether every answer has its last piece."""
        return self._num_running == 0

    def pause_after(self, failure: InferenceError | None, is_known: bool = True) -> float:
        """Return the seconds to wait before the next attempt.

        Args:
            failure: Error that ended the latest attempt, None if it ended too early without one.
            has_features: Whether a server has ever answered; if not, ``retry_s`` is at most
            UNREACHABLE_TIMEOUT_S.

        Raises:
            InferenceError: ``failure``, which another attempt does not mend. That is any but
                UNAVAILABLE, and RESOURCE_EXHAUSTED with a hint once there are tokens. It is raised
                after ``retry_s``, and if several answers had begun, in any case.
        """
        if failure is None:
            details = "the stream ended before the answer did"
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
    """All pieces of all answers put together, by index."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [_completion(by_index[index]) for index in sorted(by_index)]


def _completion(pieces: Sequence[Piece]) -> Completion:
    finished = pieces[-1]
    assert isinstance(finished, Finished), f"the last piece is {finished}"
    text = "".join(piece.text for piece in pieces)
    return Completion(text, tuple(one for piece in pieces for one in piece.token_ids), finished)
