"""Messages between a rank and its gang's planner, each in a frame of one connection."""

import socket
from dataclasses import dataclass

from tandem.core.schema import pack
from tandem.net.framing import encode_frame

MAX_PLAN_MESSAGE_BYTES = 1 << 16
"""Maximum bytes of a message, which bounds the receiver's memory. Typical messages have 100 bytes.
"""


@dataclass(frozen=True, slots=True)
class ProposalMessage:
    """A rank's packed proposal for a step."""

    step: int
    proposal: bytes


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """The plan of a step, or a request for a rank's proposal for it.

    Attributes:
        key: Packed key of the step, None if no rank has work.
        is_poll: Whether this message is a request for a proposal. ``key`` is then None.
    """

    step: int
    key: bytes | None = None
    is_poll: bool = False


def send(connection: socket.socket, message: ProposalMessage | PlanMessage) -> None:
    connection.sendall(encode_frame(pack(message)))
