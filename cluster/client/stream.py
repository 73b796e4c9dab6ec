"""What both clients share: following the stream of a request, reading its errors."""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc

from cluster.client.options import GenerateOptions, build_request
from cluster.door.status_codes import RETRY_AFTER_KEY
from cluster.proto import tandem_pb2 as pb
from cluster.proto.mapping import LastPiece, piece_from_proto
from core.request import Delta, Finished

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
MAX_PAUSE_S = 5.0


class InferenceError(Exception):
    """A call that failed.

    ``code`` is the gRPC status. ``retry_after_s`` is the server's hint when it is overloaded.
    ``token_ids`` are the answer's tokens that had arrived: pass them as ``resume_token_ids``
    (with the same seed) to go on later.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        retry_after_s: float | None = None,
        token_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.retry_after_s = retry_after_s
        self.token_ids = token_ids


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; ``token_ids`` end with the end-of-sequence token if there was one."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


@dataclass(frozen=True, slots=True)
class Retries:
    """How often in a row a stream may break without a new token, and the first pause."""

    max_retries: int = 5
    backoff_s: float = 0.2

    def pause_s(self, num_failures: int) -> float:
        """Doubles with each failure, up to 5 s, with jitter of half."""
        pause = min(self.backoff_s * 2 ** (num_failures - 1), MAX_PAUSE_S)
        return pause * random.uniform(0.5, 1.0)


class StreamPlan:
    """Follows one answer over as many streams as it takes, or n answers over one."""

    def __init__(
        self, prompt: str | Sequence[int], retries: Retries, options: GenerateOptions
    ) -> None:
        timeout_s = options.get("timeout_s")
        self._message = build_request(prompt, options)
        self._retries = retries
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._token_ids = list(self._message.resume_token_ids)
        self._num_attempts = 0
        self._num_failures = 0
        self._num_running = self._message.sampling.n
        self.request_id = self._message.request_id

    def next_message(self) -> pb.GenerateRequest:
        """The request for the rest of the answer.

        Later attempts have a name of their own (``ID~1``, ``ID~2``): what is left of an
        earlier one may not be gone from the cluster yet.
        """
        message = pb.GenerateRequest()
        message.CopyFrom(self._message)
        message.resume_token_ids[:] = self._token_ids
        if self._num_attempts:
            message.request_id += f"~{self._num_attempts}"
        self._num_attempts += 1
        return message

    def remaining_s(self) -> float | None:
        """Seconds to the deadline, for the next attempt."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def receive(self, response: pb.GenerateResponse) -> Delta | LastPiece:
        """The piece in ``response``, noted as arrived."""
        piece = piece_from_proto(response)
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

    def pause_after(self, error: grpc.RpcError | None) -> float:
        """Seconds to wait before the next attempt; None is a stream that ended too early.

        Raises ``InferenceError`` if the error is not UNAVAILABLE, retries are used up, or several
        answers had begun.
        """
        if error is None:
            details = "the stream ended before the answer did"
            failure = InferenceError(grpc.StatusCode.UNAVAILABLE, details)
        else:
            failure = inference_error(error)
        self._num_failures += 1
        exhausted = self._num_failures > self._retries.max_retries
        if self._message.sampling.n == 1:
            failure.token_ids = tuple(self._token_ids)
        elif self._token_ids:
            exhausted = True
        if failure.code != grpc.StatusCode.UNAVAILABLE or exhausted:
            raise failure from error
        return self._retries.pause_s(self._num_failures)


def inference_error(error: grpc.RpcError) -> InferenceError:
    """``error`` of either kind of channel, with the server's hint."""
    hints = dict(tuple(error.trailing_metadata() or ()))
    retry_after = hints.get(RETRY_AFTER_KEY)
    return InferenceError(
        error.code(), error.details() or "", None if retry_after is None else float(retry_after)
    )


def completions_of(pieces: Iterable[Delta | LastPiece]) -> list[Completion]:
    """All pieces of all answers put together, by index."""
    by_index: dict[int, list[Delta | LastPiece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [_completion(by_index[index]) for index in sorted(by_index)]


def _completion(pieces: Sequence[Delta | LastPiece]) -> Completion:
    finished = pieces[-1]
    assert isinstance(finished, LastPiece), f"the last piece is {finished}"
    text = "".join(piece.text for piece in pieces)
    token_ids = tuple(token for piece in pieces for token in piece.token_ids)
    return Completion(text, token_ids, finished)
