"""How a rank enters a life of its gang."""

import torch
import torch.distributed as dist

from core.membership import Meeting, RankSpec
from kv_transfer.channel import store_client
from runtime.gang.collectives import CONNECT_S, connect
from runtime.gang.hub import Hub
from runtime.gang.member import Member
from runtime.watch import Watch

DATA_FACTOR = 3
"""A rank waits this many times the watchdog's bound for the others: who is late is ended before."""


def join(
    spec: RankSpec, meeting: Meeting, hub: Hub | None, device: torch.device, watch: Watch
) -> Member:
    """Meet the other ranks; ``hub`` is rank 0's, ``watch`` that of this rank's engine thread.
    Blocks for as long as they take to come, at most twice CONNECT_S. Raises EpochEnded when they
    do not."""

    def store() -> dist.Store:
        if hub is not None:
            return hub.store
        return store_client(meeting.host, meeting.store_port, CONNECT_S)

    collectives = connect(store, spec.rank, spec.num_ranks, device, spec.host)
    watch.place = lambda: collectives.place
    timeout_s = lambda: DATA_FACTOR * watch.bound_s  # noqa: E731
    return Member(spec, meeting, collectives, hub, timeout_s, watch.clock)
