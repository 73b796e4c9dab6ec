"""Validation of requests: from ``RawRequest`` to ``Request``, for all entrypoints.

Error messages name fields as in ``RawRequest``, which are also the names on the wire.
"""

import math
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from tandem.core import request as kinds
from tandem.core.errors import ModelMismatch, TextTooLong
from tandem.core.info import ModelInfo
from tandem.core.request import RawRequest, Request, SamplingParams
from tandem.core.stopping import stop_ids

if TYPE_CHECKING:
    from tandem.text.tokenizer import Tokenizer

MAX_REQUEST_ID_LEN = 128
MAX_STOP_CHARS = 4096
MAX_ITEMS = {"sampling.stop": 32, "sampling.stop_token_ids": 1024, "sampling.logit_bias": 1024}
"""Maximum length of each list, for every model."""
MAX_DELTA = {kinds.RELAXED: 1, kinds.RELAXED_LOG_PROBS: 100}
ABOVE_0, BELOW_1, MAX_INT32 = math.nextafter(0, 1), math.nextafter(1, 0), (1 << 31) - 1
_DEFAULT = RawRequest()
_RANGE = "{low} to {high}"
_ABOVE_0 = "use a number above 0 and up to {high}"
_ONLY_RELAXED = "has an effect with ACCEPTANCE_RELAXED only; use 0, or that acceptance"
_ONLY_TYPICAL = "has an effect with ACCEPTANCE_TYPICAL only; use 0, or that acceptance"
_ONLY_SAMPLED = "ACCEPTANCE_TYPICAL needs a temperature above 0; raise it, or use ACCEPTANCE_STRICT"
_ONLY_GREEDY = "ACCEPTANCE_RELAXED needs temperature 0; use 0, or ACCEPTANCE_STRICT or _REJECTION"
_Items = TypeVar("_Items", bound=Collection[Any])


class Bounds(NamedTuple):
    """Minimum and maximum of a numeric field.

    ``remedy`` is the part of the error message that says which values are valid.
    """

    low: float
    high: float
    remedy: str = f"use {_RANGE}"

    def check(self, field: str, value: float) -> None:
        """Raise ``ValueError`` if ``value`` is out of bounds."""
        if not self.low <= value <= self.high:
            refuse(field, value, self.remedy.format(low=self.low, high=self.high))


def field_bounds(raw_request: RawRequest, model: ModelInfo) -> dict[str, Bounds]:
    """Return the bounds of every numeric field.

    They do not apply to fields left at their default.
    """
    max_tokens = raw_request.sampling.max_tokens
    default = _DEFAULT.sampling.max_tokens
    table = {
        "sampling.temperature": Bounds(1e-5, 100, f"use 0 (greedy) or {_RANGE}"),
        "sampling.top_k": Bounds(1, MAX_INT32, "use 1 or more, or 0 for all tokens"),
        "sampling.top_p": Bounds(ABOVE_0, 1, _ABOVE_0),
        "sampling.min_p": Bounds(0, BELOW_1, "use a number from 0 to below 1"),
        # Logits are divided by the penalty in fp32: near 0 they would become infinite.
        "sampling.repetition_penalty": Bounds(0.01, 10, f"use {_RANGE}; 1 means no penalty"),
        "sampling.presence_penalty": Bounds(-2, 2),
        "sampling.frequency_penalty": Bounds(-2, 2),
        "sampling.seed": Bounds(0, (1 << 63) - 1, "use 0 to 2^63-1"),
        "sampling.max_tokens": Bounds(
            1, MAX_INT32, f"use 1 or more, or 0 for the default {default}"
        ),
        "sampling.min_tokens": Bounds(0, max_tokens, f"use {_RANGE} (max_tokens)"),
        "sampling.logprobs": Bounds(
            0, min(20, model.vocab_size), f"use {_RANGE}, or leave it unset"
        ),
        "sampling.n": Bounds(1, 16, f"use {_RANGE}, or 0 for the default 1"),
        "speculation.max_drafts": Bounds(
            0, model.num_draft_tokens, f"use {_RANGE} (this server's speculation.max_depth)"
        ),
        "speculation.relaxed_top_n": Bounds(0, 0, _ONLY_RELAXED),
        "speculation.relaxed_delta": Bounds(0, 0, _ONLY_RELAXED),
        "speculation.typical_epsilon": Bounds(0, 0, _ONLY_TYPICAL),
        "speculation.typical_alpha": Bounds(0, 0, _ONLY_TYPICAL),
    }
    if raw_request.speculation.acceptance == kinds.TYPICAL:
        names = "speculation.typical_epsilon", "speculation.typical_alpha"
        return table | dict.fromkeys(names, Bounds(ABOVE_0, 1, _ABOVE_0))
    if (max_delta := MAX_DELTA.get(raw_request.speculation.acceptance)) is None:
        return table
    return table | {
        "sampling.temperature": Bounds(0, 0, _ONLY_GREEDY),
        "speculation.relaxed_top_n": Bounds(
            1, model.vocab_size, f"use {_RANGE}, or 0 for the default 1"
        ),
        "speculation.relaxed_delta": Bounds(0, max_delta),
    }


def check_request(raw_request: RawRequest, model: ModelInfo, tokenizer: "Tokenizer") -> Request:
    """Return ``raw_request`` as a request that ``model`` can serve.

    Raises:
        ValueError: Names the field, its value and what would be valid.
        ModelMismatch: The answer to resume was started by another model.
    """
    if raw_request.resume_model not in ("", model.digest):
        raise ModelMismatch(
            f"resume_model={raw_request.resume_model:.64}: another model started this answer, but "
            f"this server has {model.name} with digest {model.digest}; resume it at a server of "
            "the first model, or send the request again without resume_token_ids"
        )
    token = Bounds(0, model.vocab_size - 1, f"token ids are {_RANGE}")
    max_items = model.max_model_len - 1
    request = Request(
        request_id=request_id(raw_request.request_id),
        prompt_ids=_prompt_ids(
            prompt=raw_request.prompt, model=model, tokenizer=tokenizer, token=token
        ),
        output_ids=_token_ids(
            field="resume_token_ids",
            ids=raw_request.resume_token_ids,
            token=token,
            max_items=max_items,
        ),
        sampling=raw_request.sampling,
        speculation=raw_request.speculation,
    )
    for field, bound in field_bounds(raw_request, model).items():
        if (value := attrgetter(field)(raw_request)) != attrgetter(field)(_DEFAULT):
            bound.check(field, value)
    _check_lists(raw_request, token)
    _check_acceptance(raw_request.speculation.acceptance, model)
    if (
        raw_request.speculation.acceptance == kinds.TYPICAL
        and raw_request.sampling.temperature == 0
    ):
        refuse("sampling.temperature", 0, _ONLY_SAMPLED)
    if request.output_ids and request.sampling.n > 1:
        remedy = "a request can resume only one answer; use n=1 and the seed of that answer"
        refuse("sampling.n", request.sampling.n, remedy)
    request = replace(request, sampling=_with_stop_ids(raw_request.sampling, model, tokenizer))
    _check_min_tokens(request, model)
    return request


def refuse(field: str, value: Any, remedy: str) -> NoReturn:
    """Raise ``ValueError`` for an invalid field."""
    raise ValueError(f"{field}={value!r}: {remedy}")


def check_count(field: str, values: _Items, max_items: int = 0) -> _Items:
    """Return ``values`` without iterating over them.

    Raises:
        ValueError: There are more values than MAX_ITEMS allows for the field, or than ``max_items``
            if MAX_ITEMS has no entry for it.
    """
    if len(values) > (max_items := MAX_ITEMS.get(field, max_items)):
        refuse(f"len({field})", len(values), f"use at most {max_items}")
    return values


def request_id(client_id: str) -> str:
    """Return the client's request id, or a generated one if it is "".

    Raises:
        ValueError: The id is too long, or has spaces or unprintable characters.
    """
    if len(client_id) > MAX_REQUEST_ID_LEN or not client_id.isprintable() or " " in client_id:
        remedy = f"use 1 to {MAX_REQUEST_ID_LEN} printable characters without spaces, or ''"
        refuse("request_id", client_id[: MAX_REQUEST_ID_LEN + 1], remedy)
    return client_id or uuid.uuid4().hex


def _prompt_ids(
    prompt: str | Sequence[int] | None, model: ModelInfo, tokenizer: "Tokenizer", token: Bounds
) -> tuple[int, ...]:
    if prompt is None:
        raise ValueError("the request has no prompt; give text or token_ids")
    kind = "text" if isinstance(prompt, str) else "token_ids"
    ids = _encode(prompt, model, tokenizer) if isinstance(prompt, str) else prompt
    if not ids:
        raise ValueError(f"{kind}: the prompt has no tokens; give at least one")
    if len(ids) >= model.max_model_len:
        _refuse_length(kind, len(ids), model)
    return _token_ids(field=kind, ids=ids, token=token, max_items=len(ids))


def _refuse_length(kind: str, num_tokens: int, model: ModelInfo) -> NoReturn:
    raise ValueError(
        f"{kind}: the prompt has {num_tokens} tokens; use at most {model.max_model_len - 1}, so "
        f"that an answer fits into model.max_model_len={model.max_model_len}"
    )


def _encode(text: str, model: ModelInfo, tokenizer: "Tokenizer") -> list[int]:
    """Tokenise a prompt.

    A text with too many bytes for any tokenisation is refused without tokenising it.
    """
    if not text:
        refuse("text", "", "the prompt is empty; give some text")
    num_bytes = len(text.encode())
    longest = tokenizer.max_token_bytes
    if longest is not None and num_bytes > (max_bytes := (model.max_model_len - 1) * longest):
        raise ValueError(
            f"text: the prompt has {num_bytes} bytes, but prompts that fit model.max_model_len="
            f"{model.max_model_len} have at most {max_bytes}; shorten it"
        )
    try:
        return tokenizer.encode(text, model.max_model_len - 1)
    except TextTooLong as error:
        _refuse_length("text", error.num_tokens, model)


def _token_ids(
    field: str, ids: Collection[int], token: Bounds, max_items: int = 0
) -> tuple[int, ...]:
    """Return ``ids`` as a tuple. Checks their number before their values."""
    check_count(field, ids, max_items)
    if ids and not token.low <= min(ids) <= max(ids) <= token.high:
        for i, value in enumerate(ids):
            token.check(f"{field}[{i}]", value)
    return tuple(ids)


def _check_lists(raw_request: RawRequest, token: Bounds) -> None:
    sampling = raw_request.sampling
    check_count("sampling.stop", sampling.stop)
    if (num_chars := sum(map(len, sampling.stop))) > MAX_STOP_CHARS:
        raise ValueError(f"sampling.stop: has {num_chars} characters; use at most {MAX_STOP_CHARS}")
    if "" in sampling.stop:
        refuse("sampling.stop", list(sampling.stop), "use texts of at least one character")
    _token_ids("sampling.stop_token_ids", sampling.stop_token_ids, token)
    _token_ids("sampling.logit_bias", [item.token_id for item in sampling.logit_bias], token)
    for item in sampling.logit_bias:
        Bounds(-100, 100).check(f"sampling.logit_bias[{item.token_id}]", item.bias)


def _with_stop_ids(
    sampling: SamplingParams, model: ModelInfo, tokenizer: "Tokenizer"
) -> SamplingParams:
    """Return ``sampling`` with more stop tokens: the stop strings that are special tokens.

    Special tokens have no text, so text could not match these stop strings.

    Raises:
        ValueError: A stop string contains a special token and other text, so the text could never
            match it.
    """
    if not (sampling.stop and sampling.skip_special_tokens):
        return sampling
    special = tokenizer.special_tokens
    for i, stop in enumerate(sampling.stop):
        contained = next((name for name in special if name in stop), None)
        if contained is not None and stop not in special:
            remedy = f"contains the special token {contained!r}, which answers omit; use "
            remedy += f"stop_token_ids=[{special[contained]}], or set skip_special_tokens to false"
            refuse(f"sampling.stop[{i}]", stop, remedy)
    size = model.vocab_size
    known = tuple(special[stop] for stop in sampling.stop if special.get(stop, size) < size)
    return replace(sampling, stop_token_ids=sampling.stop_token_ids + known)


def _check_min_tokens(request: Request, model: ModelInfo) -> None:
    """Raise ``ValueError`` if ``min_tokens`` would forbid every token.

    It forbids tokens that end the answer, which may be the whole vocabulary.
    """
    num_left = request.sampling.min_tokens - len(request.output_ids)
    stops = stop_ids(request.sampling, model.eos_token_ids)
    if num_left > 0 and len(stops) >= model.vocab_size:
        remedy = "stop_token_ids and EOS cover the vocabulary, so every token would end the answer"
        refuse("sampling.min_tokens", request.sampling.min_tokens, f"{remedy}; use 0")


def _check_acceptance(kind: str, model: ModelInfo) -> None:
    if kind not in kinds.ACCEPTANCES:
        refuse("speculation.acceptance", kind, f"use one of {', '.join(kinds.ACCEPTANCES)}")
    if kind in MAX_DELTA and not model.think_token_ids:
        remedy = f"{model.name} has no think tokens (model.think_tokens); use ACCEPTANCE_STRICT"
        refuse("speculation.acceptance", f"ACCEPTANCE_{kind.upper()}", remedy)
