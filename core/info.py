"""What a node tells the cluster about itself."""

from dataclasses import dataclass

PREFILL, DECODE, COLOCATED = "prefill", "decode", "colocated"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Fixed for one life of a node. ``fingerprint`` is that of its cache layout; ``think_ids``
    begin and end the thinking part of an answer, None if the model has none."""

    name: str
    kind: str
    epoch: int
    fingerprint: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    think_ids: tuple[int, int] | None
    has_mtp: bool
    num_mtp_layers: int
    num_drafts: int
    num_pages: int
    page_size: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as it is now; pages that only the prefix cache holds count as free. ``step_s`` is the
    time of all decode steps, ``program_s`` that of their tensor programs.
    """

    name: str
    kind: str
    epoch: int
    num_active_rows: int
    num_free_pages: int
    num_pages: int
    num_open_leases: int
    num_channels: int
    num_steps: int
    step_s: float = 0.0
    program_s: float = 0.0
    num_preempted: int = 0
