"""What a gateway asks of a decode node."""

from dataclasses import dataclass

from core.request import Request
from kv_transfer.messages import Offer


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take a row and pages for ``request``, and start to pull what ``offer`` promises."""

    request: Request
    offer: Offer


@dataclass(frozen=True, slots=True)
class Await:
    """Answer once the sequence's KV has arrived and it steps."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """What crossed; ``seconds`` is the time the wire was in use."""

    num_bytes: int
    num_tokens: int
    backend: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop the sequence in whatever phase it is."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Done:
    pass
