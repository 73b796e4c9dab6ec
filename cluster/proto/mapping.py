"""The nouns of ``core`` and ``cluster.info`` to and from their protobuf messages."""

from dataclasses import asdict
from typing import Any

from cluster.info import ModelInfo, NodeStatus, ServerStatus
from cluster.proto import tandem_pb2 as pb
from core.request import (
    Delta,
    Finished,
    SpeculationCounts,
    Timings,
    TokenLogprobs,
    TransferStats,
)

_PREFIX = "ACCEPTANCE_"


class LastPiece(Finished):
    """A ``Finished`` with the text and tokens of an empty ``Delta``.

    So a loop may read ``piece.text`` of every piece of a stream.
    """

    __slots__ = ()
    text = ""
    token_ids: tuple[int, ...] = ()


def finished_fields(finished: Finished) -> dict[str, Any]:
    """``finished`` as nested builtins, with the field names of the proto."""
    transfer = finished.kv_transfer
    fields: dict[str, Any] = {
        "index": finished.index,
        "finish_reason": finished.finish_reason,
        "usage": {
            "prompt": finished.num_prompt_tokens,
            "cached": finished.num_cached_tokens,
            "completion": finished.num_completion_tokens,
        },
        "speculation": {
            **asdict(finished.counts),
            "accepted_per_position": list(finished.counts.accepted_per_position),
            "drafted_per_position": list(finished.counts.drafted_per_position),
        },
        "timings_ms": asdict(finished.timings_ms),
        "kv_transfer": {
            "bytes": transfer.num_bytes,
            "tokens": transfer.num_tokens,
            "backend": transfer.backend,
            "seconds": transfer.seconds,
        },
        "seed": finished.seed,
    }
    if finished.error is not None:
        fields["error"] = finished.error
    return fields


def piece_to_proto(piece: Delta | Finished) -> pb.GenerateResponse:
    """One message of a stream."""
    if isinstance(piece, Finished):
        return pb.GenerateResponse(finished=pb.Finished(**finished_fields(piece)))
    logprobs = [
        pb.TokenLogprobs(
            logprob=token.logprob,
            top=dict(zip(token.top_ids, token.top_logprobs, strict=True)),
        )
        for token in piece.logprobs
    ]
    return pb.GenerateResponse(
        delta=pb.Delta(
            index=piece.index, token_ids=piece.token_ids, text=piece.text, logprobs=logprobs
        )
    )


def piece_from_proto(response: pb.GenerateResponse) -> Delta | LastPiece:
    """The inverse. Raises ``ValueError`` on a message that is neither."""
    kind = response.WhichOneof("piece")
    if kind == "delta":
        delta = response.delta
        logprobs = tuple(_token_logprobs(token) for token in delta.logprobs)
        return Delta(delta.index, tuple(delta.token_ids), delta.text, logprobs)
    if kind == "finished":
        return _finished(response.finished)
    raise ValueError("GenerateResponse holds no piece this client knows; update the client")


def _token_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Best first: the map on the wire has no order."""
    top = sorted(message.top.items(), key=lambda item: -item[1])
    return TokenLogprobs(
        message.logprob, tuple(token for token, _ in top), tuple(value for _, value in top)
    )


def _finished(message: pb.Finished) -> LastPiece:
    stats, transfer, times = message.speculation, message.kv_transfer, message.timings_ms
    return LastPiece(
        index=message.index,
        finish_reason=message.finish_reason,
        num_prompt_tokens=message.usage.prompt,
        num_cached_tokens=message.usage.cached,
        num_completion_tokens=message.usage.completion,
        counts=SpeculationCounts(
            num_steps=stats.num_steps,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            accepted_per_position=tuple(stats.accepted_per_position),
            first_step_accepted=stats.first_step_accepted,
            drafted_per_position=tuple(stats.drafted_per_position),
        ),
        timings_ms=Timings(
            queue=times.queue,
            prefill=times.prefill,
            transfer=times.transfer,
            first_token=times.first_token,
            total=times.total,
        ),
        kv_transfer=TransferStats(
            num_bytes=transfer.bytes,
            num_tokens=transfer.tokens,
            backend=transfer.backend,
            seconds=transfer.seconds,
        ),
        seed=message.seed,
        error=message.error if message.HasField("error") else None,
    )


def acceptance_to_proto(name: str) -> str:
    """Of a kind of acceptance, its name in the proto.

    Raises ``ValueError`` naming the kinds there are.
    """
    if _PREFIX + name.upper() not in dict(pb.Acceptance.items()):
        kinds = [key.removeprefix(_PREFIX).lower() for key, _ in pb.Acceptance.items()]
        raise ValueError(f"acceptance={name!r}: use one of {kinds}")
    return _PREFIX + name.upper()


def acceptance_from_proto(number: int) -> str:
    """The kind; raises ``ValueError`` for a number that this server does not know."""
    if number not in pb.Acceptance.values():
        kinds = ", ".join(f"{value} ({key})" for key, value in pb.Acceptance.items())
        raise ValueError(f"speculation.acceptance={number}: is unknown to this server; use {kinds}")
    return pb.Acceptance.Name(number).removeprefix(_PREFIX).lower()


def model_info_to_proto(info: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(**asdict(info))


def model_info_from_proto(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        num_draft_tokens=message.num_draft_tokens,
        has_mtp=message.has_mtp,
        dtype=message.dtype,
        think_token_ids=tuple(message.think_token_ids),
    )


def status_to_proto(status: ServerStatus) -> pb.Status:
    return pb.Status(
        state=status.state,
        mode=status.mode,
        num_running=status.num_running,
        nodes=[pb.NodeStatus(**asdict(node)) for node in status.nodes],
    )


def status_from_proto(message: pb.Status) -> ServerStatus:
    return ServerStatus(
        state=pb.Status.State.Name(message.state),
        mode=message.mode,
        num_running=message.num_running,
        nodes=tuple(_node_status(node) for node in message.nodes),
    )


def _node_status(message: pb.NodeStatus) -> NodeStatus:
    return NodeStatus(
        name=message.name,
        kind=message.kind,
        epoch=message.epoch,
        alive=message.alive,
        num_active_rows=message.num_active_rows,
        num_free_pages=message.num_free_pages,
        num_pages=message.num_pages,
        num_open_leases=message.num_open_leases,
        num_channels=message.num_channels,
        num_steps=message.num_steps,
        step_s=message.step_s,
        program_s=message.program_s,
        num_preempted=message.num_preempted,
    )
