"""Collective operations of a gang in one epoch (torch.distributed), and a rank's position in them.

The process group is constructed directly, on a store that belongs to this epoch. There is no
default group. Any error ends the epoch.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.core.errors import EpochEnded
from tandem.core.progress import LockstepPosition
from tandem.net.groups import Store, gloo_group
from tandem.net.nccl import configure_nccl, nccl_group

CONNECT_S = 30.0


class Collectives:
    """One rank's end of the gang's collectives.

    The engine thread calls the collectives. ``abort`` and ``position`` may be used by any thread.
    ``close`` also unblocks the ranks that wait for this one. They notice a closed connection at
    once, but a missing rank only after a timeout.
    """

    def __init__(self, group: Any, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.is_aborted = False
        self._group = group
        self._options = dist.AllToAllOptions()
        self.start_step(0, CONNECT_S)

    def start_step(self, step: int, timeout_s: float) -> None:
        """Start step number ``step`` and count its collectives from 1.

        On a CPU, each collective of the step times out after ``timeout_s``.
        """
        self.position = LockstepPosition(step)
        self._options.timeout = timedelta(seconds=timeout_s)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x``: [R, *x.shape].

        On a CPU, this uses ``all_to_all``, in which every rank exchanges data with every other
        rank. Gloo's all-gather is a ring of R - 1 rounds, in which a rank waits only for its
        neighbour.
        """
        if x.device.type == "cpu":
            return self.all_to_all(x.expand(self.num_ranks, *x.shape), operation="all_gather")
        out = x.new_empty(self.num_ranks, *x.shape)
        self._call("all_gather", lambda group: group._allgather_base(out, x))
        return out

    def all_to_all(
        self,
        x: Tensor,
        num_sent: Sequence[int] = (),
        num_received: Sequence[int] = (),
        operation: str = "all_to_all",
    ) -> Tensor:
        """Send rows of ``x`` to every rank and return the received rows.

        Args:
            x: Rows to send, in the order of the receiving ranks.
            num_sent: Number of rows for each rank; empty: the same number for all.
            num_received: Number of rows from each rank; empty: the same number from all.
            operation: Name of the operation in ``position``.
        """
        num_rows = sum(num_received) if num_received else len(x)
        x, out = x.contiguous(), x.new_empty(num_rows, *x.shape[1:])
        arguments = out, x, [*num_received], [*num_sent], self._options
        self._call(operation, lambda group: group.alltoall_base(*arguments))
        return out

    def abort(self) -> None:
        """Abort collectives that run on a GPU. On a CPU, they end when the first peer closes."""
        group = self._group
        if group is not None and group.name() == "nccl":
            self.is_aborted = True
            group.abort()

    def close(self) -> None:
        """Release the group. Called on the thread that calls collectives, or after it has ended."""
        self.abort()
        self._group = None

    def _call(self, operation: str, start: Callable[[Any], Any]) -> None:
        """Start a collective and wait for it. On a GPU the stream waits for it, not the host."""
        self.position = LockstepPosition(self.position.step, self.position.number + 1, operation)
        if self._group is None:
            raise EpochEnded(
                f"rank {self.rank}, {self.position}: the process group of the gang is closed"
            )
        try:
            start(self._group).wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise EpochEnded(f"rank {self.rank}, {self.position}: {reason}") from error


def connect(
    store: Callable[[], Store], rank: int, num_ranks: int, device: torch.device, host: str
) -> Collectives:
    """Connect to the other ranks of the gang, which meet in the epoch's store.

    ``store`` is a function that opens a client of the store. Blocks for at most CONNECT_S seconds
    for the store and CONNECT_S seconds for the ranks. Raises EpochEnded if these are not there in
    time.
    """
    try:
        if device.type == "cpu":
            group = gloo_group(
                store=store(), rank=rank, num_ranks=num_ranks, host=host, timeout_s=CONNECT_S
            )
        else:
            configure_nccl(host)
            group = nccl_group(store(), rank, num_ranks)
        collectives = Collectives(group, rank, num_ranks)
        collectives.all_to_all(torch.zeros(num_ranks, device=device))
    except (RuntimeError, OSError) as error:
        raise EpochEnded(
            f"rank {rank}: the process group of the gang cannot be created: {error}"
        ) from None
    return collectives
