"""Between gate and experts: tokens go to the ranks that hold the experts they chose, and come back
once for each.

How the outputs of a token's experts are summed is the token's own rank's business (model/moe.py),
so neither the number of ranks nor replicas of experts change a sum.
Shape legend: T tokens of this rank, K experts per token, D hidden, R ranks.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from core.placement import Placement
from model.experts import Experts


class Collectives(Protocol):
    """What all ranks of a gang call in the same order (runtime/collectives.py)."""

    rank: int
    num_ranks: int

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x``, of one shape everywhere: [R, *x.shape]."""
        ...

    def all_to_all(
        self, x: Tensor, num_sent: Sequence[int] = (), num_received: Sequence[int] = ()
    ) -> Tensor:
        """Rows of ``x`` to every rank, in the order of ranks, and those received; so many each, or
        as many to all if nothing is said."""
        ...


class Dispatch(Protocol):
    """Of one rank, for all its MoE layers. ``pads``: every rank brings equally many tokens.
    ``counts``: whose rows are computed from now on belong to somebody. ``why_eager`` says why a
    function that goes through it has to be called in Python each time, if so."""

    pads: bool
    why_eager: str
    counts: bool

    def held(self, layer: int) -> tuple[int, ...]:
        """The routed experts that this rank holds of a MoE layer, one per slot."""
        ...

    def join(self, group: Collectives | None) -> None:
        """A life of the gang has begun, whose collectives these are."""
        ...

    @property
    def placement(self) -> Placement | None:
        """Where the experts lie; None if all are here."""
        ...

    def sent(self) -> list[list[int]]:
        """Real rows that this rank has sent to each expert of each layer; waits for the device."""
        ...

    def computed(self) -> list[int]:
        """Rows that the experts here have computed, by layer; waits for the device."""
        ...

    def run(
        self, layer: int, experts: Experts, x_TD: Tensor, ids_TK: Tensor, real_T: Tensor | None
    ) -> Tensor:
        """What each token's experts make of it: [T, K, D], finite where ``real_T`` is False."""
        ...
