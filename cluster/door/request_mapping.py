"""From a GenerateRequest to a ``core.Request``: everything is checked, nothing is ignored."""

import math
import uuid
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster.proto import tandem_pb2 as pb
from cluster.proto.mapping import acceptance_from_proto
from core.info import ModelInfo
from core.request import Request, SamplingParams, Speculation, TokenBias
from core.stopping import stop_ids

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
MAX_REQUEST_ID_LEN = 128
MAX_STOPS, MAX_STOP_CHARS = 32, 4096
MAX_STOP_TOKEN_IDS = MAX_LOGIT_BIASES = 1024
MAX_DELTA = {pb.ACCEPTANCE_RELAXED: 1, pb.ACCEPTANCE_RELAXED_LOG_PROBS: 100}
_KINDS = {number: f"{number} ({name})" for name, number in pb.Acceptance.items()}
_ONLY_RELAXED = "means something with ACCEPTANCE_RELAXED alone; leave it 0, or use that"
_ONLY_GREEDY = (
    "ACCEPTANCE_RELAXED is for greedy requests; use 0, or ACCEPTANCE_STRICT or _REJECTION"
)
ABOVE_0, BELOW_1, MAX_INT32 = math.nextafter(0, 1), math.nextafter(1, 0), (1 << 31) - 1


class Bounds(NamedTuple):
    """The lowest and the highest value of a field, and what to say to any other."""

    low: float
    high: float
    remedy: str = "use {low} to {high}"

    def check(self, field: str, value: float) -> None:
        if not self.low <= value <= self.high:
            refuse(field, value, self.remedy.format(low=self.low, high=self.high))


FIXED = {
    "sampling.temperature": Bounds(1e-5, 100, "use 0 (greedy) or {low} to {high}"),
    "sampling.top_k": Bounds(1, MAX_INT32, "use 1 or more, or 0 for all tokens"),
    "sampling.top_p": Bounds(ABOVE_0, 1, "use a number above 0 and up to {high}"),
    "sampling.min_p": Bounds(0, BELOW_1, "use a number from 0 to below 1"),
    "sampling.repetition_penalty": Bounds(
        ABOVE_0, 10, "use a number above 0 and up to {high}; 1 is none"
    ),
    "sampling.presence_penalty": Bounds(-2, 2),
    "sampling.frequency_penalty": Bounds(-2, 2),
    "sampling.logit_bias": Bounds(-100, 100),
    "sampling.seed": Bounds(0, (1 << 63) - 1, "use 0 to 2^63-1"),
    "sampling.max_tokens": Bounds(1, MAX_INT32, f"use 1 or more, or 0 for {DEFAULT_MAX_TOKENS}"),
    "sampling.n": Bounds(1, 16, "use {low} to {high}, or 0 for 1"),
    "speculation.acceptance": Bounds(
        0, max(_KINDS), f"is unknown to this server; use {', '.join(_KINDS.values())}"
    ),
    "speculation.relaxed_top_n": Bounds(0, 0, _ONLY_RELAXED),
    "speculation.relaxed_delta": Bounds(0, 0, _ONLY_RELAXED),
}
"""Bounds that neither the model nor another field moves."""


def bounds(message: pb.GenerateRequest, model: ModelInfo) -> dict[str, Bounds]:
    """Of every number that can be set. A 0 that counts as unset is not looked up."""
    most_tokens = max(0, message.sampling.max_tokens) or DEFAULT_MAX_TOKENS
    table = FIXED | {
        "token_ids": Bounds(0, model.vocab_size - 1, "token ids are {low} to {high}"),
        "sampling.min_tokens": Bounds(0, most_tokens, "use 0 to {high}, which is max_tokens"),
        "sampling.logprobs": Bounds(
            0, min(20, model.vocab_size), "use {low} to {high}, or leave it unset"
        ),
        "speculation.max_drafts": Bounds(
            0, model.num_draft_tokens, "use {low} to {high}, this server's speculation.num_tokens"
        ),
    }
    if (most_delta := MAX_DELTA.get(message.speculation.acceptance)) is None:
        return table
    return table | {
        "sampling.temperature": Bounds(0, 0, _ONLY_GREEDY),
        "speculation.relaxed_top_n": Bounds(1, model.vocab_size, "use {low} to {high}, or 0 for 1"),
        "speculation.relaxed_delta": Bounds(0, most_delta),
    }


def to_request(message: pb.GenerateRequest, model: ModelInfo, tokenizer: "Tokenizer") -> Request:
    """``message`` as a request that ``model`` can serve.

    Raises ``ValueError`` naming the field, its value and what would be right.
    """
    _refuse_unknown(message, "")
    table = bounds(message, model)
    request = Request(
        request_id=request_id(message.request_id),
        prompt_ids=_prompt_ids(message, model, tokenizer, table["token_ids"]),
        output_ids=_token_ids(
            "resume_token_ids",
            message.resume_token_ids,
            table["token_ids"],
            model.max_model_len - 1,
        ),
        sampling=_sampling(message.sampling, table),
        speculation=_speculation(message.speculation, table, model),
    )
    _check_resumed(request, model)
    return request


def refuse(field: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"{field}={value!r}: {remedy}")


def _refuse_unknown(message: Message, prefix: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name = f"{prefix}field number {unknown[0].field_number}"
        raise ValueError(f"{name} is unknown to this server; leave it out or update the server")


def request_id(given: str) -> str:
    """The name that was given, one made up if it is "". ``ValueError`` if it cannot be one."""
    if not given:
        return uuid.uuid4().hex
    readable = len(given) <= MAX_REQUEST_ID_LEN and given.isprintable()
    if not readable or any(map(str.isspace, given)):
        remedy = f"use 1 to {MAX_REQUEST_ID_LEN} printable characters without spaces, or none"
        refuse("request_id", given[: MAX_REQUEST_ID_LEN + 1], remedy)
    return given


def _prompt_ids(
    message: pb.GenerateRequest, model: ModelInfo, tokenizer: "Tokenizer", token: Bounds
) -> tuple[int, ...]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise ValueError("the request has no prompt; give text or token_ids")
    if kind == "text" and not message.text:
        refuse("text", "", "the prompt is empty; give some text")
    _refuse_unknown(message.token_ids, "token_ids.")
    if kind == "text":
        _check_bytes(message.text, model, tokenizer)
        ids: Sequence[int] = tokenizer.encode(message.text)
    else:
        ids = message.token_ids.ids
    if not ids:
        raise ValueError(f"{kind}: the prompt has no tokens; give at least one")
    if len(ids) >= model.max_model_len:
        raise ValueError(
            f"{kind}: the prompt has {len(ids)} tokens; at most {model.max_model_len - 1} leave "
            f"room for an answer in model.max_model_len={model.max_model_len}"
        )
    return tuple(ids) if kind == "text" else _token_ids(kind, ids, token, len(ids))


def _check_bytes(text: str, model: ModelInfo, tokenizer: "Tokenizer") -> None:
    """Refuse untokenised what has too many tokens however it is tokenised."""
    num_bytes, longest = len(text.encode()), tokenizer.longest_token_bytes
    if longest is not None and num_bytes > (most := (model.max_model_len - 1) * longest):
        raise ValueError(
            f"text: the prompt has {num_bytes} bytes; all the tokens that leave room for an answer "
            f"in model.max_model_len={model.max_model_len} hold {most} at the very most"
        )


def _token_ids(field: str, ids: Collection[int], token: Bounds, most: int) -> tuple[int, ...]:
    """In the order given; counted before they are looked at."""
    _check_count(field, ids, most)
    for i, value in enumerate(ids):
        token.check(f"{field}[{i}]", value)
    return tuple(ids)


def _check_count(field: str, values: Sized, most: int) -> None:
    if len(values) > most:
        refuse(f"len({field})", len(values), f"use at most {most}")


def _scalars(message: Message, prefix: str, table: Mapping[str, Bounds]) -> dict[str, Any]:
    """The scalar fields that are set, within their bounds; where a field has no presence a 0
    stands for its default and is left out."""
    _refuse_unknown(message, prefix)
    found = {
        field.name: value
        for field, value in message.ListFields()
        if not field.is_repeated and (field.has_presence or value != 0)
    }
    for name, value in found.items():
        if not isinstance(value, bool):
            table[prefix + name].check(prefix + name, value)
    return found


def _sampling(message: pb.Sampling, table: Mapping[str, Bounds]) -> SamplingParams:
    found = _scalars(message, "sampling.", table)
    _check_count("sampling.stop", message.stop, MAX_STOPS)
    if (num_chars := sum(map(len, message.stop))) > MAX_STOP_CHARS:
        raise ValueError(f"sampling.stop: {num_chars} characters; use at most {MAX_STOP_CHARS}")
    if "" in message.stop:
        refuse("sampling.stop", list(message.stop), "use texts of at least one character")
    token = table["token_ids"]
    biased = _token_ids("sampling.logit_bias", message.logit_bias, token, MAX_LOGIT_BIASES)
    # In order of token id: a map has none of its own.
    biases = tuple(TokenBias(token_id, message.logit_bias[token_id]) for token_id in sorted(biased))
    for item in biases:
        table["sampling.logit_bias"].check(f"sampling.logit_bias[{item.token_id}]", item.bias)
    stops = _token_ids("sampling.stop_token_ids", message.stop_token_ids, token, MAX_STOP_TOKEN_IDS)
    return SamplingParams(
        **found, stop=tuple(message.stop), stop_token_ids=stops, logit_bias=biases
    )


def _speculation(
    message: pb.Speculation, table: Mapping[str, Bounds], model: ModelInfo
) -> Speculation:
    found = _scalars(message, "speculation.", table)
    if message.acceptance in MAX_DELTA and not model.think_token_ids:
        remedy = f"{model.name} has no think tokens (model.think_tokens); use ACCEPTANCE_STRICT"
        refuse("speculation.acceptance", pb.Acceptance.Name(message.acceptance), remedy)
    return Speculation(**(found | {"acceptance": acceptance_from_proto(message.acceptance)}))


def _check_resumed(request: Request, model: ModelInfo) -> None:
    num_output = len(request.output_ids)
    if num_output and request.sampling.n > 1:
        remedy = "answers are resumed one by one; ask for n=1 with the seed of that answer"
        refuse("sampling.n", request.sampling.n, remedy)
    room = min(request.sampling.max_tokens, model.max_model_len - len(request.prompt_ids))
    if num_output > room:
        remedy = f"an answer to this request has at most {room} tokens"
        refuse("len(resume_token_ids)", num_output, remedy)
    stops = stop_ids(request.sampling, model.eos_token_ids)
    for i, token in enumerate(request.output_ids[:-1]):
        if token in stops:
            refuse(f"resume_token_ids[{i}]", token, "ends the answer, but more tokens follow")
