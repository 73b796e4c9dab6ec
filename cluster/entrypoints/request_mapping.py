"""Conversion of GenerateRequest to RawRequest.

Unknown fields are refused; values are not checked.
"""

from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tandem.cluster.gateway.checks import check_count
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.request import ACCEPTANCES, RawRequest, SamplingParams, Speculation, TokenBias


def to_raw_request(message: pb.GenerateRequest) -> RawRequest:
    """Convert ``message`` to a RawRequest.

    Raises:
        ValueError: The message has fields that this server does not know, or lists that are too
            long.
    """
    fields = _set_fields(message, "")
    _set_fields(message.token_ids, "token_ids.")
    acceptance = acceptance_from_proto(message.speculation.acceptance)
    speculation = _set_fields(message.speculation, "speculation.") | {"acceptance": acceptance}
    return RawRequest(
        prompt=message.token_ids.ids if "token_ids" in fields else fields.get("text"),
        request_id=message.request_id,
        resume_token_ids=message.resume_token_ids,
        resume_model=message.resume_model,
        resume_proof=message.resume_proof,
        sampling=_sampling(message.sampling),
        speculation=Speculation(**speculation),
    )


def acceptance_from_proto(number: int) -> str:
    """Return the name of an acceptance rule. Raises ``ValueError`` that lists the known ones."""
    if number not in pb.Acceptance.values():
        kinds = ", ".join(f"{known} ({name})" for name, known in pb.Acceptance.items())
        raise ValueError(f"speculation.acceptance={number}: is unknown to this server; use {kinds}")
    return ACCEPTANCES[number]


def _sampling(message: pb.Sampling) -> SamplingParams:
    biases = check_count("sampling.logit_bias", message.logit_bias).items()
    return SamplingParams(
        **_set_fields(message, "sampling."),
        stop=tuple(check_count("sampling.stop", message.stop)),
        stop_token_ids=tuple(check_count("sampling.stop_token_ids", message.stop_token_ids)),
        # Sort by token id, because maps have no order.
        logit_bias=tuple(TokenBias(*item) for item in sorted(biases)),
    )


def _set_fields(message: Message, prefix: str) -> dict[str, Any]:
    """Return the fields of ``message`` that are set, except lists, by name.

    Fields without presence count as unset if they are 0. Raises ``ValueError`` for a field that
    this server does not know.
    """
    if unknown := UnknownFieldSet(message):
        name = f"{prefix}field number {unknown[0].field_number}"
        raise ValueError(f"{name} is unknown to this server; leave it out or update the server")
    return {
        field.name: value
        for field, value in message.ListFields()
        if not field.is_repeated and (field.has_presence or value)
    }
