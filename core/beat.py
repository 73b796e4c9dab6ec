"""What a rank answers to a gateway's heartbeat, whatever its kind."""

from dataclasses import dataclass

from core.identity import Identity
from core.pace import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a rank holds now, and what it has done in this life.

    Pages that only the prefix cache holds count as free. Of its staging ``num_quarantined`` buffers
    wait for a channel to end (kv_transfer/staging.py). ``step_s`` is the time of all decode steps,
    ``program_s`` that of their tensor programs.
    """

    num_active_rows: int = 0
    num_free_pages: int = 0
    num_open_leases: int = 0
    num_channels: int = 0
    num_quarantined: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    program_s: float = 0.0
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """How far a rank is, what it holds, and what waits there: ``num_waiting`` sequences for a row,
    ``num_tokens_left`` of prompts to be computed. ``alive`` are the sequences of the asking session
    that a decode rank still holds."""

    pace: Pace
    counters: Counters
    num_waiting: int = 0
    num_tokens_left: int = 0
    alive: tuple[Identity, ...] = ()
