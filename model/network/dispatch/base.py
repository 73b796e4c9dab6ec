"""Between gate and experts: tokens go to the ranks that hold the experts they chose, and come back
once for each.

How the outputs of a token's experts are summed is the token's own rank's business
(model/network/moe.py), so neither the number of ranks nor replicas of experts change a sum.
Shape legend: T tokens of this rank, K experts per token, D hidden, R ranks.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tandem.core.placement import Placement
from tandem.model.network.experts import Experts


class CollectiveGroup(Protocol):
    """What all ranks of a gang call in the same order (runtime/gang/collectives.py)."""

    rank: int
    num_ranks: int

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x``, of one shape everywhere: [R, *x.shape]."""

    def all_to_all(
        self, x: Tensor, num_sent: Sequence[int] = (), num_received: Sequence[int] = ()
    ) -> Tensor:
        """Rows of ``x`` to every rank, in the order of ranks, and those received; so many each, or
        as many to all if nothing is said."""


class Dispatch:
    """Of one rank, for all its MoE layers. Here every expert is its own and nothing travels; ranks
    of a gang override it (spread.py).

    ``pads_tokens``: every rank brings equally many tokens. ``counts``: whose rows are computed from
    now on belong to somebody. ``eager_reason`` says why a function that goes through it has to be
    called in Python each time, if so. ``placement`` is where the experts lie; None if all are here.
    """

    pads_tokens = True
    eager_reason = ""
    is_counting = True
    placement: Placement | None = None

    def __init__(self, num_experts: int) -> None:
        self._all = tuple(range(num_experts))

    def local_experts(self, layer: int) -> tuple[int, ...]:
        """The routed experts that this rank holds of a MoE layer, one per slot."""
        return self._all

    def set_group(self, group: CollectiveGroup | None) -> None:
        """A life of the gang has begun, whose collectives these are."""
        assert group is None, "there is nobody to join"

    def num_sent_rows(self) -> list[list[int]]:
        """Real rows that this rank has sent to each expert of each layer; waits for the device."""
        return []

    def num_computed_rows(self) -> list[int]:
        """Rows that the experts here have computed, by layer; waits for the device."""
        return []

    def run_experts(
        self, layer: int, experts: Experts, x_TD: Tensor, ids_TK: Tensor, real_T: Tensor | None
    ) -> Tensor:
        """What each token's experts make of it: [T, K, D], finite where ``real_T`` is False. Where
        nothing travels padding is computed like everything else: that costs less than to leave it
        out."""
        return experts(x_TD, None, ids_TK.flatten()).view(*ids_TK.shape, x_TD.shape[1])
