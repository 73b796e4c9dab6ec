"""The collectives of a gang's life over torch.distributed, and which of them a rank is in.

The group is constructed directly, on a store of this epoch; no default group exists. Any error is
the end of the epoch.
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
    """Used by the engine thread; ``abort`` and ``place`` by any. ``close`` frees the peers that
    wait for this rank: closed connections are seen at once, a missing rank by a deadline."""

    def __init__(self, group: Any, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.is_aborted = False
        self._group = group
        self._options = dist.AllToAllOptions()
        self.start_step(0, CONNECT_S)

    def start_step(self, step: int, timeout_s: float) -> None:
        """A step begins, whose collectives are counted from 1 on; on a CPU each waits so long."""
        self.position = LockstepPosition(step)
        self._options.timeout = timedelta(seconds=timeout_s)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x``: [R, *x.shape]. Gloo's own is a ring of R - 1 rounds, in which each
        rank waits for its neighbour alone."""
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
        """Rows of ``x`` to every rank, and those received; ``what`` is told of who is late."""
        num_rows = sum(num_received) if num_received else len(x)
        x, out = x.contiguous(), x.new_empty(num_rows, *x.shape[1:])
        given = out, x, [*num_received], [*num_sent], self._options
        self._call(operation, lambda group: group.alltoall_base(*given))
        return out

    def abort(self) -> None:
        """What runs on a GPU ends; gloo's waits end when the first peer closes."""
        group = self._group
        if group is not None and group.name() == "nccl":
            self.is_aborted = True
            group.abort()

    def close(self) -> None:
        """On the thread that calls collectives, or when it has ended."""
        self.abort()
        self._group = None

    def _call(self, operation: str, start: Callable[[Any], Any]) -> None:
        """On a GPU the stream waits, not the host."""
        self.position = LockstepPosition(self.position.step, self.position.number + 1, operation)
        if self._group is None:
            raise EpochEnded(f"rank {self.rank}, {self.position}: the group is closed")
        try:
            start(self._group).wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise EpochEnded(f"rank {self.rank}, {self.position}: {reason}") from error


def connect(
    store: Callable[[], Store], rank: int, num_ranks: int, device: torch.device, host: str
) -> Collectives:
    """Meet the other ranks in the ``store`` that is opened now and belongs to one epoch. Blocks for
    CONNECT_S at most for each of both.

    Raises EpochEnded when they do not come.
    """
    try:
        if device.type == "cpu":
            group = gloo_group(store(), rank, num_ranks, host, CONNECT_S)
        else:
            configure_nccl(host)
            group = nccl_group(store(), rank, num_ranks)
        collectives = Collectives(group, rank, num_ranks)
        collectives.all_to_all(torch.zeros(num_ranks, device=device))
    except (RuntimeError, OSError) as error:
        raise EpochEnded(f"rank {rank}: the gang does not come together: {error}") from None
    return collectives
