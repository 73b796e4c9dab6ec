"""Processes that begin as forks of one that has imported PyTorch and the hand-over."""

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["torch", "tests.integration.handover_peer", "tests.faulty"]


def forks() -> ForkServerContext:
    """Return a context of multiprocessing. The process that it forks has no threads and nothing of
    this one's: it was started apart, when first needed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
