"""What the decode nodes did during a run, by the counters they keep."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from tandem.core.info import PREFILL, ServerStatus


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Decode steps, their seconds, those of their tensor programs, and preempted sequences.

    Everything of a step outside its tensor program is the host's share: choosing who runs,
    building the batch, reading tokens, telling them.
    """

    num_steps: float = 0
    step_s: float = 0.0
    program_s: float = 0.0
    num_preempted: float = 0

    @classmethod
    def of(cls, status: ServerStatus) -> "NodeUsage":
        """Since the ranks were born."""
        ranks = [rank for rank in status.ranks if rank.kind != PREFILL]
        sums = {f.name: sum(rank.counters.get(f.name, 0) for rank in ranks) for f in fields(cls)}
        return cls(**sums)

    def since(self, before: "NodeUsage") -> "NodeUsage":
        """Nothing if a rank's counters went back, as at its rebirth."""
        parts = [getattr(self, f.name) - getattr(before, f.name) for f in fields(self)]
        return NodeUsage(*parts) if min(parts) >= 0 else NodeUsage()

    @classmethod
    def total(cls, uses: Iterable["NodeUsage"]) -> "NodeUsage":
        uses = list(uses)
        return cls(*(sum(getattr(use, f.name) for use in uses) for f in fields(cls)))

    @property
    def host_share(self) -> float | None:
        return 1 - self.program_s / self.step_s if self.step_s else None

    @property
    def step_ms(self) -> float | None:
        return self.step_s / self.num_steps * 1e3 if self.num_steps else None
