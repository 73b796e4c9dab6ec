"""What a gateway asks of a decode node, in this order: grant, start; abort at any time.

``abort`` takes an Identity: drop the sequence in whatever phase it is; what comes later of it finds
nothing.
"""

from dataclasses import dataclass

from tandem.core.identity import Identity
from tandem.core.request import Request
from tandem.decode_node.planning.states import RequestSize
from tandem.kv_transfer.messages import Offer


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer once a row and pages are held for a request of this size; it may wait its turn.

    ``session`` is the nonce of the gateway that will renew them. What has begun goes
    ahead of what has not.
    """

    identity: Identity
    session: int
    size: RequestSize


@dataclass(frozen=True, slots=True)
class Start:
    """Pull what ``offer`` promises into the granted pages; answered by TransferStats once the
    sequence steps. One that ``is_suspect`` begins in steps of its own."""

    identity: Identity
    request: Request
    offer: Offer
    is_suspect: bool = False
