"""From a GenerateRequest to a ``core.Request``: everything is checked, nothing is ignored."""

import uuid
from collections.abc import Iterable
from typing import Protocol

from cluster.door.refusal import refuse, refuse_unknown
from cluster.door.speculation_mapping import to_speculation
from cluster.info import ModelInfo
from cluster.proto import tandem_pb2 as pb
from core.request import LENGTH, STOP, Request, SamplingParams, TokenBias
from core.stopping import num_budget, stop_ids

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 100.0
DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
MAX_REPETITION, MAX_PENALTY, MAX_BIAS = 10.0, 2.0, 100.0
MAX_LOGPROBS, MAX_ANSWERS = 20, 16
MAX_REQUEST_ID_LEN = 128


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, the beginning-of-sequence token in front."""


def to_request(message: pb.GenerateRequest, model: ModelInfo, tokenizer: Tokenizer) -> Request:
    """``message`` as a request that ``model`` can serve.

    Raises ``ValueError`` naming the field, its value and what would be right.
    """
    refuse_unknown(message, "")
    sampling = _sampling(message.sampling, model.vocab_size)
    request = Request(
        request_id=_request_id(message.request_id),
        prompt_ids=_prompt_ids(message, model, tokenizer),
        output_ids=_token_ids("resume_token_ids", message.resume_token_ids, model.vocab_size),
        sampling=sampling,
        speculation=to_speculation(message.speculation, sampling, model),
    )
    _check_resumed(request, model)
    return request


def ended_already(request: Request, model: ModelInfo) -> str | None:
    """The finish reason if the resumed tokens are a whole answer, else None."""
    output = request.output_ids
    if output and output[-1] in stop_ids(request.sampling, model.eos_token_ids):
        return STOP
    max_tokens = request.sampling.max_tokens
    budget = num_budget(len(request.prompt_ids), len(output), max_tokens, model.max_model_len)
    return LENGTH if budget == 0 else None


def _request_id(request_id: str) -> str:
    if not request_id:
        return uuid.uuid4().hex
    readable = request_id.isprintable() and not any(map(str.isspace, request_id))
    if not readable or len(request_id) > MAX_REQUEST_ID_LEN:
        remedy = f"use 1 to {MAX_REQUEST_ID_LEN} printable characters without spaces, or none"
        refuse("request_id", request_id[: MAX_REQUEST_ID_LEN + 1], remedy)
    return request_id


def _prompt_ids(
    message: pb.GenerateRequest, model: ModelInfo, tokenizer: Tokenizer
) -> tuple[int, ...]:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        if not message.text:
            refuse("text", "", "the prompt is empty; give some text")
        ids = tuple(tokenizer.encode(message.text))
    elif kind == "token_ids":
        refuse_unknown(message.token_ids, "token_ids.")
        ids = _token_ids("token_ids", message.token_ids.ids, model.vocab_size)
    else:
        raise ValueError("the request has no prompt; give text or token_ids")
    if not ids:
        raise ValueError(f"{kind}: the prompt has no tokens; give at least one")
    if len(ids) >= model.max_model_len:
        raise ValueError(
            f"{kind}: the prompt has {len(ids)} tokens; at most {model.max_model_len - 1} leave "
            f"room for an answer in model.max_model_len={model.max_model_len}"
        )
    return ids


def _token_ids(field: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    ids = tuple(ids)
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            refuse(f"{field}[{i}]", token, f"token ids are 0 to {vocab_size - 1}")
    return ids


def _sampling(message: pb.Sampling, vocab_size: int) -> SamplingParams:
    refuse_unknown(message, "sampling.")
    _check_filters(message)
    seed = message.seed if message.HasField("seed") else None
    if seed is not None and seed < 0:
        refuse("sampling.seed", seed, "use 0 to 2^63-1")
    if "" in message.stop:
        refuse("sampling.stop", list(message.stop), "use texts of at least one character")
    if not 0 <= message.n <= MAX_ANSWERS:
        refuse("sampling.n", message.n, f"use 1 to {MAX_ANSWERS}, or 0 for 1")
    max_tokens = _max_tokens(message)
    stops = _token_ids("sampling.stop_token_ids", message.stop_token_ids, vocab_size)
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=_repetition_penalty(message),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=_logit_bias(message, vocab_size),
        seed=seed,
        stop=tuple(message.stop),
        stop_token_ids=stops,
        min_tokens=message.min_tokens,
        max_tokens=max_tokens,
        ignore_eos=message.ignore_eos,
        logprobs=_num_logprobs(message, vocab_size),
        n=message.n or 1,
    )


def _num_logprobs(message: pb.Sampling, vocab_size: int) -> int | None:
    if not message.HasField("logprobs"):
        return None
    most = min(MAX_LOGPROBS, vocab_size)
    if not 0 <= message.logprobs <= most:
        refuse("sampling.logprobs", message.logprobs, f"use 0 to {most}, or leave it unset")
    return int(message.logprobs)


def _max_tokens(message: pb.Sampling) -> int:
    max_tokens = message.max_tokens or DEFAULT_MAX_TOKENS
    if max_tokens < 0:
        remedy = f"use 1 or more, or 0 for {DEFAULT_MAX_TOKENS}"
        refuse("sampling.max_tokens", max_tokens, remedy)
    if not 0 <= message.min_tokens <= max_tokens:
        remedy = f"use 0 to {max_tokens}, which is max_tokens"
        refuse("sampling.min_tokens", message.min_tokens, remedy)
    return max_tokens


def _repetition_penalty(message: pb.Sampling) -> float:
    return message.repetition_penalty if message.HasField("repetition_penalty") else 1.0


def _logit_bias(message: pb.Sampling, vocab_size: int) -> tuple[TokenBias, ...]:
    """In order of token id: a map has none of its own."""
    ids = _token_ids("sampling.logit_bias", sorted(message.logit_bias), vocab_size)
    biases = tuple(TokenBias(token, message.logit_bias[token]) for token in ids)
    for item in biases:
        if not abs(item.bias) <= MAX_BIAS:
            remedy = f"use -{MAX_BIAS:g} to {MAX_BIAS:g}"
            refuse(f"sampling.logit_bias[{item.token_id}]", item.bias, remedy)
    return biases


def _check_filters(message: pb.Sampling) -> None:
    heat = message.temperature
    if not (heat == 0 or MIN_TEMPERATURE <= heat <= MAX_TEMPERATURE):
        remedy = f"use 0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        refuse("sampling.temperature", heat, remedy)
    if message.top_k < 0:
        refuse("sampling.top_k", message.top_k, "use 1 or more, or 0 for all tokens")
    if message.HasField("top_p") and not 0 < message.top_p <= 1:
        refuse("sampling.top_p", message.top_p, "use a number above 0 and up to 1")
    if not 0 <= message.min_p < 1:
        refuse("sampling.min_p", message.min_p, "use a number from 0 to below 1")
    repetition = _repetition_penalty(message)
    if not 0 < repetition <= MAX_REPETITION:
        remedy = f"use a number above 0 and up to {MAX_REPETITION:g}; 1 is none"
        refuse("sampling.repetition_penalty", repetition, remedy)
    for field in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(message, field)) <= MAX_PENALTY:
            remedy = f"use -{MAX_PENALTY:g} to {MAX_PENALTY:g}"
            refuse(f"sampling.{field}", getattr(message, field), remedy)


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
