"""The hand-over's messages. D (decode) calls P (prefill); every request has one reply.

=========  ========  =====================================================================
method     reply     meaning
=========  ========  =====================================================================
connect    Accepted  P starts its end of a channel; both ends meet under the nonce
pull       Ready     wait for KV beyond what D has; the seal comes with it once there is one
send       Sent      P has read a chunk into staging and begins to send it
sums       Sums      what P's pages hold, for D to compare
renew      Done      the lease lives on (or will, if prefill has not opened it yet)
release    Done      D needs nothing more of it; saying so twice is fine
close_channel    Done      D's end of the channel is gone, P shall drop its own
=========  ========  =====================================================================

What is summed up or renewed is told by its Identity alone. A request that fails is answered by a
Failure (core/schema.py). The epoch of P that is meant is in the call's envelope (core/control.py).
"""

from dataclasses import dataclass

from tandem.core.identity import Identity


@dataclass(frozen=True, slots=True)
class Offer:
    """Flow to D, at routing time: where the KV will be, of ``num_tokens``.

    ``owner`` and ``epoch`` say which life of which rank will have it, ``seat`` which rank that is
    in all its lives, ``caches`` what that has (Layout.facts).
    """

    protocol: int
    owner: str
    rank_name: str
    epoch: int
    identity: Identity
    caches: tuple[str, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Connect:
    """``peer`` is D's rank, the same in all its lives, ``epoch`` its life; a new channel of a
    peer replaces its old one. ``caches`` are what D wants (Layout.facts)."""

    peer: str
    epoch: int
    nonce: str
    backend: str
    caches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConnectReply:
    """Where P's rendezvous listens, and how long its leases are."""

    address: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Answer within ``wait_s``, earlier once there are more than ``num_pulled`` tokens."""

    identity: Identity
    num_pulled: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Seal:
    """The KV is complete; ``generations`` are those of P's pages, which its Source adds.

    ``features`` of the last prompt token are what the drafter wants of the main model, as raw
    bytes; None for zero_hidden, and if it wants nothing.
    """

    first_token: int
    features: bytes | None = None
    features_dtype: str = ""
    generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PullReply:
    """Tokens computed so far, of all groups alike. ``opened`` is False while prefill is unknown."""

    is_open: bool
    num_tokens: int
    seal: Seal | None

    @property
    def is_queued(self) -> bool:
        """The prompt is there, its turn has not come: P is alive and says so."""
        return self.is_open and not self.num_tokens


@dataclass(frozen=True, slots=True)
class Send:
    """Send tokens ``[lo, hi)`` of a group over channel ``nonce``, of which D asks by ``number``."""

    identity: Identity
    group: str
    lo: int
    hi: int
    nonce: str
    number: int


@dataclass(frozen=True, slots=True)
class SendReply:
    """Which transfer of its channel it is, in whose order answers come; ``generations`` of P's
    pages ``first_page ...`` (counted within the request) as read."""

    transfer_id: int
    num_bytes: int
    first_page: int
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums (checksums.py) of each ``num_tokens`` of what P has of a sequence, by the name of
    the group; D may have fewer of those."""

    num_tokens: int
    groups: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Release:
    identity: Identity
    reason: str


@dataclass(frozen=True, slots=True)
class CloseChannel:
    nonce: str
