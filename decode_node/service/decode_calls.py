"""Messages from a gateway to a decode rank: ``grant``, then ``start``; ``abort`` at any time.

``abort`` takes an Identity and drops the sequence in any phase. Calls for it that arrive later are
refused.
"""

from dataclasses import dataclass

from tandem.core.identity import Identity
from tandem.core.request import Request
from tandem.decode_node.planning.states import RequestSize
from tandem.kv_transfer.messages import Offer


@dataclass(frozen=True, slots=True)
class Grant:
    """Request for a row and pages. The reply is sent once they are granted, in turn.

    ``session`` is the nonce of the gateway session that renews them. Resumed requests go before new
    ones.
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
