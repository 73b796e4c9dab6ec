"""What a rank and its gang's planner tell each other, each in a frame of one connection."""

import socket
from dataclasses import dataclass

from tandem.core.schema import pack
from tandem.net.framing import encode_frame

MAX_PLAN_MESSAGE_BYTES = 1 << 16
"""What one message can ask the other end to hold; those of a step have some 100 bytes."""


@dataclass(frozen=True, slots=True)
class ProposalMessage:
    """A rank's packed proposal for a step."""

    step: int
    proposal: bytes


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """Of a step: its packed key, None if no rank has work. Where ``is_poll`` a proposal is wanted
    instead, and there is no key yet."""

    step: int
    key: bytes | None = None
    is_poll: bool = False


def send(connection: socket.socket, message: ProposalMessage | PlanMessage) -> None:
    connection.sendall(encode_frame(pack(message)))
