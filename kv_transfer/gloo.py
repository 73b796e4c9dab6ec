"""Gloo transport between two CPUs. Its sockets listen on the configured address only."""

from datetime import timedelta
from typing import Any

from torch import Tensor

from tandem.kv_transfer.base import Direction, Transport
from tandem.net.groups import Store, gloo_group


class GlooBackend:
    """Creates gloo transports. Their sockets listen on the address ``host`` only."""

    name = "gloo"
    device = "cpu"

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s

    def join(self, store: Store, rank: int) -> Transport:
        """Connect to the other end. This end is rank 0 or 1 of the group.

        Raises RuntimeError if the other end does not connect in time.
        """
        return GlooTransport(
            gloo_group(
                store=store, rank=rank, num_ranks=2, host=self._host, timeout_s=self._timeout_s
            ),
            rank,
        )


class GlooTransport:
    def __init__(self, group: Any, rank: int) -> None:
        self._group: Any = group
        self._peer_rank = 1 - rank

    def post(self, direction: Direction, tensor: Tensor, transfer_id: int) -> Any:
        operation = self._group.send if direction == "send" else self._group.recv
        return operation([tensor], self._peer_rank, transfer_id)

    def wait(self, posted: Any, timeout_s: float) -> None:
        posted.wait(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Do nothing. Gloo cannot abort a wait: it ends by timeout or when the peer closes."""

    def destroy(self) -> None:
        self._group = None
