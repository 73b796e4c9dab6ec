"""Interface of expert dispatch, and its implementation for a single rank.

A dispatch sends tokens to the ranks of their experts and returns one output for each expert. The
token's own rank sums these (model/network/moe.py). A sum therefore depends neither on the number of
ranks nor on replicas of experts.
Shape legend: T tokens of this rank, K experts per token, D hidden, R ranks.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tandem.core.placement import Placement
from tandem.model.network.experts import Experts


class CollectiveGroup(Protocol):
    """Collectives of a gang (runtime/gang/collectives.py). All ranks call them in the same
    order."""

    rank: int
    num_ranks: int

    def all_gather(self, x: Tensor) -> Tensor:
        """Return ``x`` of every rank: [R, *x.shape]. All ranks pass the same shape."""

    def all_to_all(
        self, x: Tensor, num_sent: Sequence[int] = (), num_received: Sequence[int] = ()
    ) -> Tensor:
        """Send rows of ``x`` to every rank and return the received rows, both in rank order.

        ``num_sent`` and ``num_received`` are rows per rank. Empty: the same number for all ranks.
        """


class Dispatch:
    """Expert dispatch of one rank, for all MoE layers.

    This class is for a single rank that holds all experts and sends nothing. Gangs use subclasses
    (expert_parallel.py).

    Attributes:
        pads_tokens: Whether all ranks must have the same number of tokens.
        eager_reason: Why functions that use this dispatch cannot be captured, "" if they can.
        is_counting: Whether rows count in the statistics. False for captures and profiling.
        placement: Experts of each rank, None if this rank holds all.
    """

    pads_tokens = True
    eager_reason = ""
    is_counting = True
    placement: Placement | None = None

    def __init__(self, num_experts: int) -> None:
        self._all = tuple(range(num_experts))

    def local_experts(self, layer: int) -> tuple[int, ...]:
        """Return the routed experts of a MoE layer that this rank holds, one per slot."""
        return self._all

    def set_group(self, group: CollectiveGroup | None) -> None:
        """Use the collectives of a new epoch of the gang, None in a gang of one rank."""
        assert group is None, "a gang of one rank has no collectives"

    def num_sent_rows(self) -> list[list[int]]:
        """Return the number of rows sent by this rank, by layer and expert, without padding. Waits
        for the device."""
        return []

    def num_computed_rows(self) -> list[int]:
        """Return the number of rows that this rank's experts computed, by layer. Waits for the
        device."""
        return []

    def run_experts(
        self, layer: int, experts: Experts, x_TD: Tensor, ids_TK: Tensor, real_T: Tensor | None
    ) -> Tensor:
        """Return the outputs [T, K, D] of each token's experts ``ids_TK``.

        Outputs of padding, where ``real_T`` is False, are finite. A single rank computes them too,
        because skipping padding would cost more.
        """
        return experts(x_TD, None, ids_TK.flatten()).view(*ids_TK.shape, x_TD.shape[1])
