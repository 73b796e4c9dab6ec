"""What both clients share: building a request, following its stream, reading its errors."""

import random
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import grpc

from cluster import tandem_pb2 as pb
from cluster.messages import LastPiece, acceptance_to_proto, piece_from_proto
from cluster.status_codes import RETRY_AFTER_KEY
from core.request import STRICT, Delta, Finished, SamplingParams

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
MAX_PAUSE_S = 5.0
MAX_REQUEST_ID_LEN = 120
"""Eight less than the server's bound: room for the number of an attempt."""


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


class GenerateOptions(TypedDict, total=False):
    """What ``generate`` takes besides the prompt; all optional, defaults in brackets."""

    max_tokens: int
    """Most tokens of the answer, resumed ones included [128]."""
    temperature: float
    """0 is greedy [0]."""
    top_k: int
    """0 is all tokens [0]."""
    top_p: float
    """In (0, 1] [1]."""
    min_p: float
    """In [0, 1) [0]."""
    repetition_penalty: float
    """Above 1 makes tokens of prompt and answer less likely, below 1 more [1]."""
    presence_penalty: float
    """Taken from the logits of tokens in the answer [0]."""
    frequency_penalty: float
    """The same, as often as they are there [0]."""
    logit_bias: Mapping[int, float]
    """Added to the logits, by token id [none]."""
    seed: int | None
    """0 to 2^63-1; None draws one here if temperature > 0, so that a resume keeps it [None]."""
    stop: Sequence[str]
    """Texts that end the answer and are not in it [none]."""
    stop_token_ids: Sequence[int]
    """Tokens that end the answer, besides the model's own [none]."""
    min_tokens: int
    """The answer does not end before so many tokens [0]."""
    ignore_eos: bool
    """Go on after the model's own end-of-sequence tokens [False]."""
    logprobs: int | None
    """Tell log probabilities of each token and of so many of the likeliest [None]."""
    max_drafts: int | None
    """Most drafts per step; None is the server's number [None]."""
    acceptance: str
    """relaxed, rejection, ...: tandem.proto says what each of ``Acceptance`` promises [strict]."""
    relaxed_top_n: int
    """Of the relaxed kinds: a draft passes among so many of the likeliest tokens [0 is 1]."""
    relaxed_delta: float
    """And only if at most this much less likely than the best [0]."""
    request_id: str | None
    """Names the request in ``abort`` and logs; None makes one up [None]."""
    resume_token_ids: Sequence[int]
    """Tokens of the answer that are there already; they are not sent again [none]."""
    timeout_s: float | None
    """Deadline of the whole answer, retries included; None waits for ever [None]."""


def build_request(prompt: str | Sequence[int], options: GenerateOptions) -> pb.GenerateRequest:
    """The message for ``prompt`` (text or token ids), with a seed if it is to be sampled.

    Raises ``ValueError`` if a value cannot be put into the message at all.
    """
    request_id = options.get("request_id") or uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_LEN:
        raise ValueError(f"request_id={request_id!r}: use at most {MAX_REQUEST_ID_LEN} characters")
    try:
        return pb.GenerateRequest(
            request_id=request_id,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else pb.TokenIds(ids=prompt),
            sampling=_sampling(options),
            speculation=pb.Speculation(
                max_drafts=options.get("max_drafts"),
                acceptance=acceptance_to_proto(options.get("acceptance", STRICT)),
                relaxed_top_n=options.get("relaxed_top_n"),
                relaxed_delta=options.get("relaxed_delta"),
            ),
            resume_token_ids=options.get("resume_token_ids", ()),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"the request cannot be encoded: {error}") from error


def _sampling(options: GenerateOptions) -> pb.Sampling:
    temperature, seed = options.get("temperature", 0.0), options.get("seed")
    max_tokens = options.get("max_tokens", SamplingParams().max_tokens)
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: use 1 or more")
    return pb.Sampling(
        temperature=temperature,
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p"),
        min_p=options.get("min_p", 0.0),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        logit_bias=options.get("logit_bias"),
        seed=secrets.randbits(63) if seed is None and temperature > 0 else seed,
        stop=options.get("stop", ()),
        stop_token_ids=options.get("stop_token_ids", ()),
        min_tokens=options.get("min_tokens", 0),
        max_tokens=max_tokens,
        ignore_eos=options.get("ignore_eos", False),
        logprobs=options.get("logprobs"),
    )


class StreamPlan:
    """Follows one answer over as many streams as it takes."""

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
        return piece

    def pause_after(self, error: grpc.RpcError | None) -> float:
        """Seconds to wait before the next attempt; None is a stream that ended too early.

        Raises ``InferenceError`` if the error is not UNAVAILABLE or retries are used up.
        """
        if error is None:
            details = "the stream ended before the answer did"
            failure = InferenceError(grpc.StatusCode.UNAVAILABLE, details)
        else:
            failure = inference_error(error)
        failure.token_ids = tuple(self._token_ids)
        self._num_failures += 1
        exhausted = self._num_failures > self._retries.max_retries
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


def completion_of(pieces: Sequence[Delta | LastPiece]) -> Completion:
    """All pieces of one answer put together."""
    finished = pieces[-1]
    assert isinstance(finished, LastPiece), f"the last piece is {finished}"
    text = "".join(piece.text for piece in pieces)
    token_ids = tuple(token for piece in pieces for token in piece.token_ids)
    return Completion(text, token_ids, finished)
