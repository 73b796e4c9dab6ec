"""Processes forked from a server process that has imported PyTorch and the KV hand-over."""

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["torch", "tests.integration.handover_peer", "tests.faulty"]


def forks() -> ForkServerContext:
    """Return a multiprocessing context. Its fork server is started when first needed, as a process
    without threads that shares no state with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
