"""From the wire's ``Speculation`` to ours: which kind of acceptance goes with which request."""

from cluster.door.refusal import refuse, refuse_unknown
from cluster.info import ModelInfo
from cluster.proto import tandem_pb2 as pb
from cluster.proto.mapping import acceptance_from_proto
from core.request import RELAXED, RELAXED_LOG_PROBS, SamplingParams, Speculation

MAX_DELTA = {RELAXED: 1.0, RELAXED_LOG_PROBS: 100.0}


def to_speculation(
    message: pb.Speculation, sampling: SamplingParams, model: ModelInfo
) -> Speculation:
    """``message`` as this model and request can have it.

    Raises ``ValueError`` naming the field, its value and what would be right.
    """
    refuse_unknown(message, "speculation.")
    speculation = Speculation(
        max_drafts=_max_drafts(message, model.num_draft_tokens),
        acceptance=acceptance_from_proto(message.acceptance),
        relaxed_top_n=message.relaxed_top_n or 1,
        relaxed_delta=message.relaxed_delta,
    )
    if speculation.is_relaxed:
        _check_relaxed(message, sampling, model)
    else:
        _check_not_relaxed(message)
    return speculation


def _max_drafts(message: pb.Speculation, num_draft_tokens: int) -> int | None:
    if not message.HasField("max_drafts"):
        return None
    if not 0 <= message.max_drafts <= num_draft_tokens:
        remedy = f"use 0 to {num_draft_tokens}, this server's speculation.num_tokens"
        refuse("speculation.max_drafts", message.max_drafts, remedy)
    return int(message.max_drafts)


def _check_not_relaxed(message: pb.Speculation) -> None:
    for field in ("relaxed_top_n", "relaxed_delta"):
        value = getattr(message, field)
        if value != 0:
            name = pb.Acceptance.Name(message.acceptance)
            remedy = f"means nothing with {name}; leave it 0, or use ACCEPTANCE_RELAXED"
            refuse(f"speculation.{field}", value, remedy)


def _check_relaxed(message: pb.Speculation, sampling: SamplingParams, model: ModelInfo) -> None:
    kind, name = acceptance_from_proto(message.acceptance), pb.Acceptance.Name(message.acceptance)
    if not model.think_token_ids:
        remedy = f"{model.name} has no think tokens (model.think_tokens); use ACCEPTANCE_STRICT"
        refuse("speculation.acceptance", name, remedy)
    if sampling.temperature != 0:
        remedy = f"{name} is for greedy requests; use 0, or ACCEPTANCE_STRICT or _REJECTION"
        refuse("sampling.temperature", sampling.temperature, remedy)
    if not 0 <= message.relaxed_top_n <= model.vocab_size:
        remedy = f"use 1 to {model.vocab_size}, or 0 for 1"
        refuse("speculation.relaxed_top_n", message.relaxed_top_n, remedy)
    if not 0 <= message.relaxed_delta <= MAX_DELTA[kind]:
        remedy = f"use 0 to {MAX_DELTA[kind]:g} with {name}"
        refuse("speculation.relaxed_delta", message.relaxed_delta, remedy)
