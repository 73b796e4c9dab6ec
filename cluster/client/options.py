"""Options of ``generate``, and the GenerateRequest message that is built from them."""

import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.request import ACCEPTANCES, STRICT

_Message = TypeVar("_Message", bound=Message)


Prompt = str | Sequence[int]
"""Prompt as text, or as token ids that are used unchanged."""


class GenerateOptions(TypedDict, total=False):
    """Options of ``generate`` besides the prompt. All are optional; defaults in brackets."""

    max_tokens: int
    """Maximum number of output tokens, including resumed ones [128]."""
    temperature: float
    """Sampling temperature; 0 is greedy [0]."""
    top_k: int
    """Number of most likely tokens to sample from; 0 is all tokens [0]."""
    top_p: float
    """Cumulative probability of the tokens to sample from, in (0, 1] [1]."""
    min_p: float
    """Minimum probability relative to the most likely token, in [0, 1) [0]."""
    repetition_penalty: float
    """Factor on tokens of prompt and answer, 0.01 to 10. Above 1 makes them less likely [1]."""
    presence_penalty: float
    """Amount subtracted from the logits of tokens that the answer contains [0]."""
    frequency_penalty: float
    """Amount subtracted from the logits of tokens per occurrence in the answer [0]."""
    logit_bias: Mapping[int, float]
    """Amounts added to the logits, by token id [none]."""
    seed: int | None
    """Sampling seed, 0 to 2^63-1.

    None: the client draws one if temperature > 0, so that a resumed answer keeps its seed [None].
    """
    stop: str | Sequence[str]
    """Stop string or strings: they end the answer and are not part of its text [none]."""
    stop_token_ids: Sequence[int]
    """Tokens that end the answer, besides the model's end-of-sequence tokens [none]."""
    min_tokens: int
    """Minimum number of output tokens before the answer may end [0]."""
    ignore_eos: bool
    """Continue after the model's end-of-sequence tokens [False]."""
    skip_special_tokens: bool
    """Omit special tokens from the text.

    False: special tokens appear in the text, and stop strings match them [True].
    """
    logprobs: int | None
    """Number of most likely tokens returned per position, with their log probabilities.

    The log probability of the chosen token is returned too. None: no log probabilities [None].
    """
    n: int
    """Number of answers, distinguished by ``index``. A broken stream is resumed if n is 1 [1]."""
    max_drafts: int | None
    """Maximum drafts per step. None: the server's speculation.max_depth [None]."""
    acceptance: str
    """Acceptance rule for drafts, such as relaxed or rejection [strict].

    ``Acceptance`` in cluster/proto/tandem.proto describes all rules.
    """
    relaxed_top_n: int
    """Relaxed acceptance: number of most likely tokens that a draft must be among.

    0 means 1 [0].
    """
    relaxed_delta: float
    """Relaxed acceptance: maximum difference from the most likely token's probability [0]."""
    typical_epsilon: float
    """Typical acceptance: probability above which a draft is accepted. 0 means 0.09 [0]."""
    typical_alpha: float
    """Typical acceptance: factor of exp(-entropy) above which drafts are also accepted.

    0 means 0.3 [0].
    """
    request_id: str | None
    """Name of the request in ``abort`` and in logs. None: the client generates one [None]."""
    resume_token_ids: Sequence[int]
    """Output tokens that the caller already has; they are not sent again [none]."""
    resume_model: str | None
    """Digest of the model that generated ``resume_token_ids``.

    A server of another model refuses the request [not checked].
    """
    resume_proof: str | None
    """Proof from the broken stream, which gives the resumed answer priority over new requests.

    Valid only with the same request_id and seed [none].
    """
    timeout_s: float | None
    """Deadline of the whole answer in seconds, including retries. None: no deadline [None]."""


def build_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Build the GenerateRequest for ``prompt``. Draws a seed if the request is to be sampled.

    Raises:
        ValueError: A value cannot be encoded in the message.
    """
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _refuse_bytes({"prompt": prompt} | fields)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if unknown := fields.keys() - GenerateOptions.__annotations__.keys():
        raise ValueError(
            f"unknown options {sorted(unknown)}; use {', '.join(GenerateOptions.__annotations__)}"
        )
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
    """Build a message of type ``cls`` from the options in ``fields`` that it has."""
    return cls(**{name: fields[name] for name in cls.DESCRIPTOR.fields_by_name if name in fields})
