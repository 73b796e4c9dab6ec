"""A local cluster ends with its ``serve``, even if that is killed, and listens on loopback only."""

import os
import signal
import time

import pytest

from benchmarks.harness.procs import Serving, actors, descendants, listening, serving, wait_gone
from tests.waiting import PATIENCE_S

SETS = ("mode=colocated", "kv.num_pages=200")


def frozen_rank(server: Serving) -> int:
    [rank] = actors(server.process.pid, "ColocatedActor")
    os.kill(rank, signal.SIGSTOP)
    return rank


def test_only_the_loopback_interface_is_listened_on_and_a_kill_leaves_nothing() -> None:
    with serving(*SETS) as server:
        tree = {server.process.pid, *descendants(server.process.pid)}
        addresses = listening(tree)
        assert len(addresses) > 4 and all(one.is_loopback for one in addresses), addresses
        frozen_rank(server)
        server.process.kill()
        wait_gone(tree, timeout_s=PATIENCE_S)


@pytest.mark.slow
def test_two_signals_end_it_in_time_while_a_rank_is_frozen() -> None:
    with serving(*SETS, "control.stop_timeout_s=3") as server:
        tree = descendants(server.process.pid)
        frozen_rank(server)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # time: signals in a burst are one
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE_S)
        assert (
            time.monotonic() - began < 20
        )  # time: control.stop_timeout_s and what a SIGKILL takes
        wait_gone(tree, timeout_s=PATIENCE_S)


@pytest.mark.slow
def test_one_signal_is_enough_when_a_rank_is_frozen() -> None:
    with serving(*SETS, "control.stop_timeout_s=2") as server:
        frozen_rank(server)
        assert server.stop(timeout_s=30) == 0
