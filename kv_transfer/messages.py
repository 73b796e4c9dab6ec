"""Messages of the KV hand-over, in which a decode rank calls a prefill rank.

=============  ============  ============  ====================================================
method         message       reply         effect on the prefill rank
=============  ============  ============  ====================================================
connect        Connect       ConnectReply  start to build the prefill rank's end of a channel
pull           Pull          PullReply     wait for tokens that are not pulled yet, or the seal
send           Send          SendReply     copy a chunk into staging and start to send it
checksums      Identity      Checksums     checksum the pages of a sequence
renew          Identity      Empty         restart the lease; no effect before the offer opens
release        Release       Empty         end the offer and its lease; may be repeated
close_channel  CloseChannel  Empty         drop the prefill rank's end of the channel
=============  ============  ============  ====================================================

``Source`` implements these methods and ``Sink`` calls them. A call that fails is answered with a
``Failure`` (core/schema.py). The call's envelope names the prefill rank's epoch (core/control.py).
"""

from dataclasses import dataclass

from tandem.core.identity import Identity


@dataclass(frozen=True, slots=True)
class Offer:
    """Location of a prompt's future KV, sent by the gateway to the decode rank after routing.

    Attributes:
        protocol: The prefill rank's ``layout.PROTOCOL``.
        owner: Name of the prefill rank's process, for error messages.
        rank_name: Name of the prefill rank, the same in all epochs.
        epoch: Epoch of the prefill rank; the offer is void in any other.
        identity: The attempt that the KV is computed for.
        caches: ``Layout.compatibility_facts`` of the prefill rank.
        num_tokens: Number of prompt tokens whose KV is handed over.
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
    """Request to open a channel, which replaces the decode rank's previous channel.

    Attributes:
        peer: Name of the decode rank, the same in all epochs.
        epoch: Epoch of the decode rank.
        nonce: Random name of the channel, by which its two ends find each other.
        backend: Transport of the decode rank, "gloo" or "nccl"; both ends must use the same.
        caches: ``Layout.compatibility_facts`` of the decode rank.
    """

    peer: str
    epoch: int
    nonce: str
    backend: str
    caches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConnectReply:
    """Reply to Connect: HOST:PORT of the prefill rank's store, and its lease time in seconds."""

    address: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Long poll for more than ``num_pulled`` computed tokens, or for the seal.

    The prefill rank replies after at most ``wait_s`` seconds.
    """

    identity: Identity
    num_pulled: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Seal:
    """End of a hand-over: the KV is complete.

    Attributes:
        first_token: The first output token.
        features: Raw bytes of main-model features of the last prompt tokens, for the drafter. None
            if it needs none, or if ``speculation.handover_hidden`` is false.
        features_dtype: Element type of ``features``, such as "bfloat16"; "" without them.
        generations: Generations of the prefill rank's pages, added by its ``OfferBook``.
    """

    first_token: int
    features: bytes | None = None
    features_dtype: str = ""
    generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PullReply:
    """Progress of a prefill.

    Attributes:
        is_open: False as long as the prefill rank does not know the prompt.
        num_tokens: Tokens computed so far, the same number in all groups.
        seal: None until the KV is complete.
    """

    is_open: bool
    num_tokens: int
    seal: Seal | None

    @property
    def is_queued(self) -> bool:
        """Whether the prefill rank has the prompt and has not started to compute it."""
        return self.is_open and not self.num_tokens


@dataclass(frozen=True, slots=True)
class Send:
    """Request for one chunk: tokens ``[lo, hi)`` of a cache group.

    Attributes:
        nonce: The channel to send the chunk over.
        number: Sequence number of this request on its channel, by which the prefill rank
            recognizes a repeated one.
    """

    identity: Identity
    group: str
    lo: int
    hi: int
    nonce: str
    number: int


@dataclass(frozen=True, slots=True)
class SendReply:
    """Reply to Send, returned when the chunk has been read and its transfer is queued.

    Attributes:
        transfer_id: Sequence number of the transfer on its channel.
        num_bytes: Size of the chunk.
        first_page: Index of the first page read, counted from the start of the sequence.
        generations: Generations of the prefill rank's pages from ``first_page`` on, at the time
            when the chunk was read.
    """

    transfer_id: int
    num_bytes: int
    first_page: int
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums (checksums.py) of the prefill rank's KV of one sequence.

    Attributes:
        num_tokens: Tokens covered by one checksum: the prefill rank's page size.
        groups: Checksums by group name, in token order. The decode rank may have fewer groups.
    """

    num_tokens: int
    groups: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Release:
    identity: Identity
    reason: str


@dataclass(frozen=True, slots=True)
class CloseChannel:
    nonce: str
