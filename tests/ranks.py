"""Several ranks in one process: one thread for each, with real gloo between them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from tandem.runtime.gang.collectives import Collectives, connect

Result = TypeVar("Result")
CPU = torch.device("cpu")


def on_ranks(num_ranks: int, work: Callable[[Collectives], Result]) -> list[Result]:
    """Run ``work`` on each rank and return the results; raise the first error. A rank that has
    finished waits for the others before it leaves."""
    store, done = dist.HashStore(), threading.Barrier(num_ranks)

    def run(rank: int) -> Result:
        group = connect(lambda: store, rank, num_ranks, CPU, "127.0.0.1")
        group.start_step(1, 20.0)
        try:
            result = work(group)
            done.wait(30)
            return result
        finally:
            group.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
