"""Replies of ranks of all kinds to a gateway's heartbeats."""

from dataclasses import dataclass, field

from tandem.core.identity import Identity
from tandem.core.progress import EngineProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """Resources in use on a rank, and its counters.

    Attributes:
        num_free_tokens: Free cache capacity in tokens. Pages that only the prefix cache holds count
            as free.
        num_quarantined: Staging buffers that wait for a channel to end (kv_transfer/staging.py).
        counters: Event counts of this epoch, by name.
        kernels: Name of the kernels (model/kernels), and the execution mode of decode steps.
        rows_by_layer: Number of rows that the rank's experts have computed in each MoE layer, as of
            one or two seconds ago. Empty if the gang has one rank.
    """

    num_active_rows: int = 0
    num_free_tokens: int = 0
    num_open_leases: int = 0
    num_channels: int = 0
    num_quarantined: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    kernels: str = ""
    rows_by_layer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's progress, load and queue.

    Attributes:
        num_waiting: Sequences that wait for a row of the batch.
        num_tokens_left: Prompt tokens still to be computed.
        alive: Sequences of the polling gateway's session that a decode rank still holds.
    """

    engine_progress: EngineProgress
    load: RankLoad
    num_waiting: int = 0
    num_tokens_left: int = 0
    alive: tuple[Identity, ...] = ()
