"""Use of the decode nodes during a run, from the counters of their ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from tandem.core.info import PREFILL, ServerStatus


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Sums over the decode ranks.

    Attributes:
        num_steps: Decode steps.
        step_s: Seconds in these steps.
        program_s: Part of ``step_s`` in tensor programs. The rest is host time: choosing sequences,
            building the batch, reading and sending tokens.
        num_preempted: Preempted sequences.
    """

    num_steps: float = 0
    step_s: float = 0.0
    program_s: float = 0.0
    num_preempted: float = 0

    @classmethod
    def of(cls, status: ServerStatus) -> "NodeUsage":
        """Return the sums of the counters in ``status``.

        Each rank counts from the start of its epoch.
        """
        ranks = [rank for rank in status.ranks if rank.kind != PREFILL]
        sums = {f.name: sum(rank.counters.get(f.name, 0) for rank in ranks) for f in fields(cls)}
        return cls(**sums)

    def since(self, before: "NodeUsage") -> "NodeUsage":
        """Return the increase since ``before``.

        Returns zeros if a counter fell, which happens when a rank restarts.
        """
        parts = [getattr(self, f.name) - getattr(before, f.name) for f in fields(self)]
        return NodeUsage(*parts) if min(parts) >= 0 else NodeUsage()

    @classmethod
    def total(cls, uses: Iterable["NodeUsage"]) -> "NodeUsage":
        """Return the sums over several runs."""
        uses = list(uses)
        return cls(*(sum(getattr(use, f.name) for use in uses) for f in fields(cls)))

    @property
    def host_share(self) -> float | None:
        """Share of step time outside tensor programs; None without steps."""
        return 1 - self.program_s / self.step_s if self.step_s else None

    @property
    def step_ms(self) -> float | None:
        """Mean milliseconds per decode step; None without steps."""
        return self.step_s / self.num_steps * 1e3 if self.num_steps else None
