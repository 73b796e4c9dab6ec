"""What a client asks for: the options of ``generate``, and the message they make."""

import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.request import ACCEPTANCES, STRICT

_Message = TypeVar("_Message", bound=Message)


Prompt = str | Sequence[int]
"""Text, or token ids that are used as they are."""


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
    """Above 1 makes tokens of prompt and answer less likely, below 1 more; 0.01 to 10 [1]."""
    presence_penalty: float
    """Taken from the logits of tokens in the answer [0]."""
    frequency_penalty: float
    """The same, as often as they are there [0]."""
    logit_bias: Mapping[int, float]
    """Added to the logits, by token id [none]."""
    seed: int | None
    """0 to 2^63-1; None draws one here if temperature > 0, so that a resume keeps it [None]."""
    stop: str | Sequence[str]
    """Text, or texts, that end the answer and are not in it [none]."""
    stop_token_ids: Sequence[int]
    """Tokens that end the answer, besides the model's own [none]."""
    min_tokens: int
    """The answer does not end before so many tokens [0]."""
    ignore_eos: bool
    """Go on after the model's own end-of-sequence tokens [False]."""
    skip_special_tokens: bool
    """False gives special tokens a text, which stop strings then see [True]."""
    logprobs: int | None
    """Tell log probabilities of each token and of so many of the likeliest [None]."""
    n: int
    """Answers to this prompt, told apart by ``index``; several are not resumed if their stream
    breaks [1]."""
    max_drafts: int | None
    """Most drafts per step; None is the server's number [None]."""
    acceptance: str
    """relaxed, rejection, ...: tandem.proto says what each of ``Acceptance`` promises [strict]."""
    relaxed_top_n: int
    """Of the relaxed kinds: a draft passes among so many of the likeliest tokens [0 is 1]."""
    relaxed_delta: float
    """And only if at most this much less likely than the best [0]."""
    typical_epsilon: float
    """Of typical: a draft passes that is more probable than this [0 is 0.09]."""
    typical_alpha: float
    """Or than this times exp(-entropy) [0 is 0.3]."""
    request_id: str | None
    """Names the request in ``abort`` and logs; None makes one up [None]."""
    resume_token_ids: Sequence[int]
    """Tokens of the answer that are there already; they are not sent again [none]."""
    resume_model: str | None
    """Digest of the model that wrote them; a server of another model refuses [not checked]."""
    resume_proof: str | None
    """Proof from their stream, with which the answer goes ahead of new requests; it counts with the
    same request_id and seed only [none]."""
    timeout_s: float | None
    """Deadline of the whole answer, retries included; None waits for ever [None]."""


def build_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for ``prompt`` (text or token ids), with a seed if it is to be sampled.

    Raises ``ValueError`` if a value cannot be put into the message at all.
    """
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _refuse_bytes({"prompt": prompt} | fields)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if unknown := fields.keys() - GenerateOptions.__annotations__.keys():
        raise ValueError(f"{sorted(unknown)}: use {', '.join(GenerateOptions.__annotations__)}")
    if (max_tokens := fields.get("max_tokens", 1)) < 1:
        raise ValueError(f"max_tokens={max_tokens}: use 1 or more")
    if fields.get("temperature", 0) > 0:
        fields.setdefault("seed", secrets.randbits(63))
    if (kind := fields.get("acceptance", STRICT)) not in ACCEPTANCES:
        raise ValueError(f"acceptance={kind!r}: use one of {list(ACCEPTANCES)}")
    fields["acceptance"] = ACCEPTANCES.index(kind)
    try:
        return pb.GenerateRequest(
            request_id=fields.get("request_id") or uuid.uuid4().hex,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else pb.TokenIds(ids=prompt),
            sampling=_submessage(pb.Sampling, fields),
            speculation=_submessage(pb.Speculation, fields),
            resume_token_ids=fields.get("resume_token_ids", ()),
            resume_model=fields.get("resume_model", ""),
            resume_proof=fields.get("resume_proof", ""),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"the request cannot be encoded: {error}") from error


def _refuse_bytes(values: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for bytes, which protobuf would read as a list of token ids."""
    for name, value in values.items():
        if isinstance(value, bytes | bytearray | memoryview):
            kind = type(value).__name__
            raise ValueError(f"{name}: is of type {kind}; use a str, or a list of token ids")


def _submessage(cls: type[_Message], fields: Mapping[str, Any]) -> _Message:
    """The options that are fields of this message."""
    return cls(**{name: fields[name] for name in cls.DESCRIPTOR.fields_by_name if name in fields})
