"""Membership of the cluster: the versioned snapshot of gangs and ranks.

Only the controller makes snapshots. Gateways keep no other list of nodes.
"""

from dataclasses import dataclass, field

from tandem.core.identity import Identity
from tandem.core.info import ModelInfo
from tandem.core.placement import Placement
from tandem.core.progress import EngineProgress
from tandem.core.schema import Failure

STARTING, READY, LOST = "starting", "ready", "lost"
"""States of a gang. Only a READY gang gets requests. LOST: between two epochs."""
DRAINING = "draining"
"""State of a gang whose ranks finish their sequences and get no new ones."""
DOWN = "down"
"""State of a gang that is not restarted until a gateway attaches again."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Startup parameters of one rank, besides the configuration.

    Attributes:
        kind: prefill, decode or colocated.
        epoch: Number of the gang's epoch, unique among all epochs of all gangs.
        host: The only address that the rank listens on.
        process_epoch: Epoch in which the process started; 0: the same as ``epoch``.
        placement_group_epoch: Epoch for which the placement group was created; 0: the same as
            ``epoch``.
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
        """Name of this rank in this epoch, unique in the cluster."""
        return f"{self.gang}.{self.epoch}.{self.rank}"

    @property
    def process_name(self) -> str:
        """Name of the rank's process, which may outlive an epoch."""
        return f"{self.gang}.{self.process_epoch or self.epoch}.{self.rank}"

    @property
    def label(self) -> str:
        """Name of the rank in messages to users."""
        return self.gang if self.num_ranks == 1 else self.rank_name

    @property
    def rank_name(self) -> str:
        """Name of the rank, the same in all epochs."""
        return f"{self.gang}.{self.rank}"


@dataclass(frozen=True, slots=True)
class PortAddress:
    """Address that a rank listens on, and the secret ``token`` that clients must send to it."""

    host: str
    port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Addresses at which the ranks of an epoch meet.

    ``host``, ``port`` and ``token`` are those of the planner on rank 0, which decides the gang's
    steps. ``store_port`` is the port of the store in which ranks publish the addresses of their
    data connections.
    """

    host: str
    port: int
    store_port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Description of a ready rank, fixed for its epoch.

    Attributes:
        caches: Facts about its caches. Ranks can hand over to each other only if these match.
        max_tokens: Capacity of its cache in tokens.
        frames: Address at which it serves token frames; None for ranks that do not decode.
        fallback_reason: Reason why it uses slower kernels than it could, "" if it does not.
        tokenizer: Digest of the tokenizer in its checkpoint folder, "" without one.
        kernels: Name of its kernels and, if it decodes, the execution mode of its programs.
    """

    spec: RankSpec
    caches: tuple[str, ...]
    drafter: str
    model: ModelInfo
    max_tokens: int
    max_rows: int
    frames: PortAddress | None = None
    fallback_reason: str = ""
    tokenizer: str = ""
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """Sequences of a step that is running, or that was running when its rank died.

    ``is_isolated`` means that the step has one sequence only, which is suspected of crashing a
    rank.
    """

    identities: tuple[Identity, ...]
    is_isolated: bool


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """End of a gang's epoch.

    ``in_flight`` holds the sequences of the step that ended the epoch; None if no step did.
    """

    epoch: int
    in_flight: InFlightBatch | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """State of a rank as it reports it to the controller.

    A rank loads its weights, joins its gang, and is ready once ``info`` is set.

    Attributes:
        log_path: File on its machine that its stderr goes to.
        max_seen: Largest (controller incarnation, epoch) that it has received.
        progress: Progress of ``activity`` (``on_startup_progress`` in core/progress.py).
        failure: Permanent failure of the rank; None if it has not failed.
        crash_journal_path: File on its machine that records the sequences of its current step.
        num_sequences: Number of sequences that it holds.
        placement: Digest of its gang's expert placement, "" for the default placement.
        epoch_end_cause: Reason why the epoch ended; None while it lasts. Process and weights are
            intact, so the rank may join the next epoch.
        activity: Current activity of its startup.
        weights: Digest of the weights that it holds or loads, "" until they are checked.
        wait_reason: Reason why it waits before loading, "" if it does not. It waits if its files
            hold other weights than those of the cluster.
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
    """Number of rows that a rank has sent to each expert of each MoE layer, in all its epochs.

    The MTP layers come last. ``placement`` is the current placement, ``num_groups`` the
    checkpoint's n_group.
    """

    rows_LE: tuple[tuple[int, ...], ...]
    placement: Placement
    num_groups: int


@dataclass(frozen=True, slots=True)
class Gang:
    """A group of ranks that share the experts and an epoch.

    Attributes:
        members: The ready ranks.
        startup_notes: Current activity of each rank that is not ready.
        failure: Error that ended its last epoch.
        epoch_end: Record of the end of its last epoch; None if no epoch has ended.
        is_given_up: ``tandem serve`` no longer waits for it, although it may be restarted.
        num_deaths: Number of epochs that ended, as far as this controller knows.
    """

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
        """Reason why the gang is not ready, in one line."""
        last = "" if self.failure is None else self.failure.text.partition("\n")[0]
        return "; ".join(
            (self.state, *self.startup_notes, *([f"last epoch ended: {last}"] if last else []))
        )


@dataclass(frozen=True, slots=True)
class Membership:
    """Snapshot of all gangs.

    Attributes:
        version: (incarnation of the controller, counter). Later snapshots have larger versions.
        config: Digest of the configuration of its gangs, "" without a configuration.
        proof_key: Secret with which gateways sign proofs (cluster/gateway/proofs.py).
    """

    version: tuple[int, int]
    gangs: tuple[Gang, ...] = ()
    config: str = ""
    proof_key: bytes = field(default=b"", repr=False)

    def ready(self) -> list[RankInfo]:
        """Return the ranks of gangs that are READY or DRAINING."""
        gangs = [gang for gang in self.gangs if gang.state in (READY, DRAINING)]
        return [member for gang in gangs for member in gang.members]
