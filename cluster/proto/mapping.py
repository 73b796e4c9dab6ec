"""Conversion between dataclasses of ``core`` and protobuf messages.

Their fields have the same names.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from pydantic import TypeAdapter

from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.answer import Delta, Finished, Piece, TokenLogprobs

_Noun = TypeVar("_Noun")
_Message = TypeVar("_Message", bound=Message)
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def to_proto(cls: type[_Message], noun: Any) -> _Message:
    """Convert the dataclass instance ``noun`` to a message of type ``cls``."""
    return cls(**asdict(noun))


def from_proto(cls: type[_Noun], message: Message) -> _Noun:
    """Convert ``message`` to the dataclass ``cls``. 64-bit integers stay exact."""
    fields = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    noun: _Noun = _adapter(cls).validate_python(fields)
    return noun


def piece_to_proto(piece: Piece, digest: str = "", proof: str = "") -> pb.GenerateResponse:
    """Return one message of a stream.

    The first message of a stream carries the ``digest`` of the model and the ``proof`` that the
    client sends to resume the answer.
    """
    if isinstance(piece, Finished):
        finished = to_proto(pb.Finished, piece)
        return pb.GenerateResponse(finished=finished, model=digest, proof=proof)
    delta = pb.Delta(index=piece.index, token_ids=piece.token_ids, text=piece.text)
    for token in piece.logprobs:
        top = dict(zip(token.top_ids, token.top_logprobs, strict=True))
        delta.logprobs.add(logprob=token.logprob, top=top)
    return pb.GenerateResponse(delta=delta, model=digest, proof=proof)


def piece_from_proto(response: pb.GenerateResponse) -> Piece:
    """Convert a message of a stream to a piece.

    Raises ``ValueError`` if it holds no known piece.
    """
    kind = response.WhichOneof("piece")
    if kind == "delta":
        delta = response.delta
        logprobs = tuple(_token_logprobs(token) for token in delta.logprobs)
        return Delta(
            index=delta.index, token_ids=tuple(delta.token_ids), text=delta.text, logprobs=logprobs
        )
    if kind == "finished":
        return from_proto(Finished, response.finished)
    raise ValueError("GenerateResponse holds no piece this client knows; update the client")


def _token_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Convert log probabilities, best first: the map in the message has no order."""
    top_ids = tuple(sorted(message.top, key=lambda token: -message.top[token]))
    return TokenLogprobs(message.logprob, top_ids, tuple(message.top[token] for token in top_ids))
