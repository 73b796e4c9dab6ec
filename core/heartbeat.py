"""What a rank answers to a gateway's heartbeat, whatever its kind."""

from dataclasses import dataclass, field

from tandem.core.identity import Identity
from tandem.core.progress import EngineProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What a rank holds now; and, by name, the ``counters`` of what it has done in this life.

    What only the prefix cache holds counts as free. Of its staging ``num_quarantined`` buffers
    wait for a channel to end (kv_transfer/staging.py). ``kernels`` names what computes its steps
    (model/kernels), and for decode steps in which form. ``rows_by_layer`` are the rows that the
    experts of a rank of a gang have computed in each MoE layer, as of a second or two ago.
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
    """How far a rank is, what it holds, and what waits there: ``num_waiting`` sequences for a row,
    ``num_tokens_left`` of prompts to be computed. ``alive`` are the sequences of the asking session
    that a decode rank still holds."""

    engine_progress: EngineProgress
    load: RankLoad
    num_waiting: int = 0
    num_tokens_left: int = 0
    alive: tuple[Identity, ...] = ()
