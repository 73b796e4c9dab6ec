"""What the cluster consists of: one versioned snapshot that everybody reads (design.md, Processes).

The controller alone makes snapshots. Router, admission, readers of frames and warm-up keep no
list of nodes of their own.
"""

from dataclasses import dataclass, field

from tandem.core.identity import Identity
from tandem.core.info import ModelInfo
from tandem.core.placement import Placement
from tandem.core.progress import EngineProgress
from tandem.core.schema import Failure

STARTING, READY, LOST = "starting", "ready", "lost"
"""States of a gang; only a READY one gets requests. LOST is between two lives."""
DRAINING = "draining"
"""Its ranks end what they have and get nothing new."""
DOWN = "down"
"""No next life is tried until a gateway attaches anew."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank as it is started: everything that its process is told beside the config tree.

    ``kind`` is prefill, decode or colocated; ``host`` is the only address that it listens on.
    ``epoch`` is a number that no other life of a gang has; ``born`` the one that its process began
    with, ``room`` the one for which its gang's room was taken, 0 where they are the same.
    """

    gang: str
    kind: str
    epoch: int
    rank: int = 0
    num_ranks: int = 1
    host: str = "127.0.0.1"
    process_epoch: int = 0
    placement_group_epoch: int = 0

    @property
    def epoch_name(self) -> str:
        """The name of this life of it: unique among all lives of all ranks."""
        return f"{self.gang}.{self.epoch}.{self.rank}"

    @property
    def process_name(self) -> str:
        """Of its process, which may see several lives of its gang."""
        return f"{self.gang}.{self.process_epoch or self.epoch}.{self.rank}"

    @property
    def label(self) -> str:
        """What people call it."""
        return self.gang if self.num_ranks == 1 else self.rank_name

    @property
    def rank_name(self) -> str:
        """The same in all lives of the rank."""
        return f"{self.gang}.{self.rank}"


@dataclass(frozen=True, slots=True)
class PortAddress:
    """Where a rank listens, and the secret that opens it."""

    host: str
    port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a gang's life come together: address of the planner, which wants the
    ``token``, and port of the store in which they find each other's data connections."""

    host: str
    port: int
    store_port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank that is ready; fixed for its life. ``caches`` are what it has of a sequence, or wants,
    ``max_tokens`` the room of its cache, ``fallback_reason`` what keeps it from faster kernels,
    ``kernels`` what computes its steps, and the form of its programs if it decodes. ``tokenizer``
    is the digest of the tokenizer in its checkpoint folder, "" without one."""

    spec: RankSpec
    caches: tuple[str, ...]
    drafter: str
    model: ModelInfo
    max_tokens: int
    max_rows: int
    frames: PortAddress | None = None
    why_plain: str = ""
    tokenizer: str = ""
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """The requests of a step; ``is_isolated``: it is one, by itself because it is suspected."""

    identities: tuple[Identity, ...]
    is_isolated: bool


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """How a life of a gang ended: ``in_flight`` if a step was the cause, and then who was in it."""

    epoch: int
    in_flight: InFlightBatch | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """State of a rank as it reports it. A rank loads, joins its gang, and is ready once ``info`` is
    set. ``doing`` and ``progress`` describe its start (``on_start`` in core/progress.py). It holds
    ``num_sequences`` sequences; ``placement`` is the digest of where its gang's experts lie, if
    that is not the plain order.

    ``ended`` is why its gang's life is over: process and weights are well, and it may join the
    next. A ``failure`` is for good. ``seen`` is the largest (incarnation, epoch) it was told;
    ``log_path`` is where its stderr goes, ``crash_journal_path`` where its steps are noted, both on
    its machine.

    ``weights`` is the digest of the weights that it holds or loads, "" until they are checked.
    ``waits`` says why it does not load: its files hold other weights than its cluster's.
    """

    spec: RankSpec
    config_json: str
    pid: int
    log_path: str
    max_seen: tuple[int, int]
    progress: float = 0.0
    info: RankInfo | None = None
    failure: Failure | None = None
    engine_progress: EngineProgress | None = None
    crash_journal_path: str = ""
    is_loaded: bool = False
    is_joined: bool = False
    num_sequences: int = 0
    placement: str = ""
    epoch_end_cause: Failure | None = None
    activity: str = ""
    weights: str = ""
    wait_reason: str = ""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows that a rank has sent to each expert of each MoE layer (rows_LE) in all its lives, the
    MTP layer's last. ``placement`` is where the experts lie now, ``num_groups`` the checkpoint's
    n_group."""

    rows_LE: tuple[tuple[int, ...], ...]
    placement: Placement
    num_groups: int


@dataclass(frozen=True, slots=True)
class Gang:
    """Ranks that live and die together; ``members`` are those that are ready, ``starts`` what each
    of the others does or waits for. ``failure`` is why its last life ended, ``ended`` how;
    ``is_given_up``: who starts it waits for it no longer, though it may be tried again. This
    controller knows of ``num_deaths`` ends of its lives."""

    name: str
    kind: str
    epoch: int
    state: str
    members: tuple[RankInfo, ...] = ()
    startup_notes: tuple[str, ...] = ()
    failure: Failure | None = None
    epoch_end: EpochEnd | None = None
    is_given_up: bool = False
    num_deaths: int = 0

    @property
    def cause(self) -> str:
        """Why it is not ready, in a line."""
        last = "" if self.failure is None else self.failure.text.partition("\n")[0]
        return "; ".join(
            (self.state, *self.startup_notes, *([f"it ended: {last}"] if last else []))
        )


@dataclass(frozen=True, slots=True)
class Membership:
    """``version`` is (incarnation of the controller, counter); later snapshots have larger ones.
    ``config`` is the digest of the config that its gangs are started with, "" without a config.
    ``proof_key`` is the secret with which gateways sign proofs (cluster/gateway/proofs.py)."""

    version: tuple[int, int]
    gangs: tuple[Gang, ...] = ()
    config: str = ""
    proof_key: bytes = field(default=b"", repr=False)

    def ready(self) -> list[RankInfo]:
        """The ranks of gangs that are ready or drain."""
        gangs = [gang for gang in self.gangs if gang.state in (READY, DRAINING)]
        return [member for gang in gangs for member in gang.members]
