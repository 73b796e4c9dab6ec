"""Placement of the routed experts: the expert in each slot of each rank."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of routed experts to slots in each MoE layer; there is at least one layer.

    With S = ``slots_per_rank``, rank r of ``num_ranks`` has slots [r * S, (r + 1) * S). An expert
    may be in several slots (redundant experts).
    """

    num_ranks: int
    slot_experts: tuple[tuple[int, ...], ...]
    """[layer][slot] -> expert id"""

    @classmethod
    def in_order(
        cls, num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0
    ) -> "Placement":
        """Return the default placement: slot i has expert i, redundant slots have experts 0, 1, ...

        Raises ValueError if the slots cannot be divided evenly among the ranks.
        """
        assert num_layers > 0, num_layers
        check_sizes(num_experts, num_redundant, num_ranks)
        experts_S = tuple(slot % num_experts for slot in range(num_experts + num_redundant))
        return cls(num_ranks, (experts_S,) * num_layers)

    @property
    def digest(self) -> str:
        """Digest of the placement. Two placements have the same digest only if they are equal."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def num_slots(self) -> int:
        """Slots per layer on all ranks together."""
        return len(self.slot_experts[0])

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    def experts_of_rank(self, layer: int, rank: int) -> tuple[int, ...]:
        """Return the expert ids of a rank's slots in one layer, [S]."""
        first = rank * self.slots_per_rank
        return self.slot_experts[layer][first : first + self.slots_per_rank]

    def expert_slots(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Return the slots of each expert in one layer, ascending."""
        experts_S = self.slot_experts[layer]
        slots_E: list[list[int]] = [[] for _ in range(max(experts_S) + 1)]
        for slot, expert in enumerate(experts_S):
            slots_E[expert].append(slot)
        return tuple(map(tuple, slots_E))

    def check_integrity(self, num_experts: int) -> None:
        """Assert that the placement is complete.

        All ranks and all layers have the same number of slots, and every layer has all experts.
        """
        assert self.num_ranks > 0 and self.slot_experts, self
        assert self.num_slots % self.num_ranks == 0, (self.num_slots, self.num_ranks)
        for layer, experts_S in enumerate(self.slot_experts):
            assert len(experts_S) == self.num_slots, (layer, len(experts_S), self.num_slots)
            odd = set(experts_S) ^ set(range(num_experts))
            assert not odd, f"layer {layer}: experts {sorted(odd)} are missing or unknown"


def check_sizes(num_experts: int, num_redundant: int, num_ranks: int) -> None:
    """Raise ValueError if the slots of all experts cannot be divided evenly among the ranks."""
    assert num_experts > 0 and num_ranks > 0, (num_experts, num_ranks)
    if num_redundant < 0:
        raise ValueError(f"num_redundant_experts={num_redundant}: set it to 0 or more")
    missing = -(num_experts + num_redundant) % num_ranks
    if missing:
        raise ValueError(
            f"dp_size={num_ranks}: must divide n_routed_experts + num_redundant_experts = "
            f"{num_experts} + {num_redundant}; set num_redundant_experts={num_redundant + missing}"
            " or use another dp_size"
        )
