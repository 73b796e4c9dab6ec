"""How a rank enters a life of its gang."""

from functools import partial

import torch

from core.membership import Meeting, RankSpec
from runtime.gang.collectives import CONNECT_S, connect
from runtime.gang.hub import Hub
from runtime.gang.member import Member
from runtime.watch import Watch
from wires.groups import store_client

DATA_FACTOR = 3
"""A rank waits this many times the watchdog's bound for the others: who is late is ended before."""


def join(
    spec: RankSpec, meeting: Meeting, hub: Hub | None, device: torch.device, watch: Watch
) -> Member:
    """Meet the other ranks; ``hub`` is rank 0's, ``watch`` that of this rank's engine thread.
    Blocks for as long as they take to come, at most twice CONNECT_S. Raises EpochEnded when they
    do not."""
    store = partial(store_client, meeting.host, meeting.store_port, CONNECT_S)
    collectives = connect(store, spec.rank, spec.num_ranks, device, spec.host)
    watch.place = lambda: collectives.place
    timeout_s = lambda: DATA_FACTOR * watch.bound_s  # noqa: E731
    return Member(spec, meeting, collectives, hub, timeout_s, watch.clock)
