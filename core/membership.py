"""What the cluster consists of: one versioned snapshot that everybody reads (design.md, Processes).

The controller alone makes snapshots. Router, admission, readers of frames and warm-up keep no
list of nodes of their own.
"""

from dataclasses import dataclass

from core.info import NodeInfo

STARTING, COMPILING, READY, DRAINING, LOST = "starting", "compiling", "ready", "draining", "lost"
"""States of a gang; only a READY one gets requests. LOST is between two lives, or for good."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank as it is started: everything that its process is told beside the config tree.

    ``kind`` is prefill, decode or colocated; ``host`` is the only address that it listens on.
    ``epoch`` is a number that no other life of a gang has.
    """

    gang: str
    kind: str
    epoch: int
    rank: int = 0
    num_ranks: int = 1
    host: str = "127.0.0.1"

    @property
    def name(self) -> str:
        """Unique among all ranks that are or ever were."""
        return f"{self.gang}.{self.epoch}.{self.rank}"


@dataclass(frozen=True, slots=True)
class Member:
    """A rank in a snapshot; ``info`` is None until it is ready."""

    spec: RankSpec
    info: NodeInfo | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """Ranks that live and die together. ``progress`` is the share of its weights that is loaded,
    ``note`` why it is lost or left down."""

    name: str
    kind: str
    epoch: int
    state: str
    members: tuple[Member, ...] = ()
    progress: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Membership:
    """``version`` is (incarnation of the controller, counter); later snapshots have larger ones."""

    version: tuple[int, int]
    gangs: tuple[Gang, ...] = ()

    def ready(self, *kinds: str) -> list[Member]:
        """The ranks of ready gangs of these kinds."""
        return [
            member
            for gang in self.gangs
            if gang.state == READY and gang.kind in kinds
            for member in gang.members
        ]
