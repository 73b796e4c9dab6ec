"""What a gang's keeper needs of whatever runs ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.control.plan import GangPlan
from core.config import TandemConfig
from core.membership import ExpertRows, InStep, Meeting, RankSpec, RankState
from core.placement import Placement


class RankHandle(Protocol):
    """One rank's process, whatever runs it. Its calls raise NodeLost when it is dead, TimeoutError
    when that cannot be told now."""

    async def who(self, incarnation: int, epoch: int) -> RankState: ...

    async def host(self) -> Meeting:
        """Of rank 0: where the ranks of a new life meet."""

    async def join(self, spec: RankSpec, meeting: Meeting) -> None:
        """Begin a life; ``who`` tells when the rank is ready."""

    async def leave(self) -> None:
        """End this life of it, not its process. NodeLost also if it cannot."""

    async def expert_rows(self) -> ExpertRows: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a dead rank left: the end of its log, and who was in its step."""

    log: str = ""
    in_step: InStep | None = None


@dataclass(frozen=True, slots=True)
class Birth:
    """Processes to begin for the life ``epoch``: of the ranks ``missing``, in the room that was
    taken for the life ``room``, which is taken now if it is the same. ``placement`` is where their
    experts lie, None in plain order."""

    epoch: int
    room: int
    missing: Sequence[int]
    placement: Placement | None = None


class Machines(Protocol):
    """Where ranks are begun and ended."""

    async def begin(
        self, plan: GangPlan, birth: Birth, config: TandemConfig
    ) -> Mapping[int, RankHandle]:
        """Ranks that load from now on. Raises Overloaded when there is no room for them."""

    async def last_words(self, state: RankState) -> LastWords:
        """Of a rank that has been killed, from its machine; empty where that cannot be had."""

    async def clear(self, gang: str) -> None:
        """Give back the room of every life of a gang; its ranks have been killed."""


class Numbers(Protocol):
    """Where epochs come from; ``seen`` is the (incarnation, epoch) that ranks are to remember."""

    seen: tuple[int, int]

    def next_epoch(self) -> int: ...
