"""Messages from a gateway to a decode rank: ``grant``, then ``start``; ``abort`` at any time.

``abort`` takes an Identity and drops the sequence in any phase. Later calls for this sequence are
refused.
"""

from dataclasses import dataclass

from tandem.core.identity import Identity
from tandem.core.request import Request
from tandem.decode_node.planning.states import RequestSize
from tandem.kv_transfer.messages import Offer


@dataclass(frozen=True, slots=True)
class Grant:
    """Request for a row and pages. The reply is sent once the sequence holds them.

    ``session`` is the number of the gateway's session. If the session is not renewed, the row and
    pages are freed. Resumed requests have priority over new ones.
    """

    identity: Identity
    session: int
    size: RequestSize


@dataclass(frozen=True, slots=True)
class StartSequence:
    """Request to pull the KV cache of ``offer`` into the granted pages and start the sequence.

    The reply is TransferStats, sent once the sequence is active. A suspect sequence runs its first
    steps alone.
    """

    identity: Identity
    request: Request
    offer: Offer
    is_suspect: bool = False
