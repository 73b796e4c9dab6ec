"""Two gateways of one cluster: one is killed, the nodes forget it, the other serves on exactly."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from core.config import TINY_MODEL
from tandem import Client, InferenceError
from tests.exact import near_ties
from tests.procs import RayHead, Serving, actors, ray_head, serving

LEASE_S = 2.0
FREED_S = LEASE_S * 1.25 + 1.5
"""A lease, the pause between two sweeps, and what a loaded machine takes to do it."""
SETS = ("kv.num_pages=300", "kv.page_size=16", f"kv_transfer.lease_s={LEASE_S:g}")
PROMPT = [0, *range(50, 90)]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(with_token=False) as running:
        yield running


@pytest.fixture(scope="module")
def survivor(head: RayHead) -> Iterator[Serving]:
    with serving(*SETS, head=head) as server:
        yield server


class Follower(threading.Thread):
    """Reads one long answer until it ends or its server is gone."""

    def __init__(self, address: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.token_ids: list[int] = []
        self._address, self._num_tokens = address, num_tokens
        self.start()

    def run(self) -> None:
        with Client(self._address, max_retries=0) as client:
            try:
                for piece in client.generate(
                    PROMPT, max_tokens=self._num_tokens, ignore_eos=True, timeout_s=60
                ):
                    self.token_ids += piece.token_ids
            except InferenceError:
                return


def until(condition: Callable[[], object], timeout_s: float) -> float:
    """Seconds until ``condition`` held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it took too long"
        time.sleep(0.02)
    return time.monotonic() - began


def num_rows(server: Serving) -> int:
    with Client(server.address) as client:
        nodes = client.status().nodes
    return sum(node.num_active_rows for node in nodes if node.kind == "decode")


def is_empty(server: Serving) -> bool:
    with Client(server.address) as client:
        nodes = client.status().nodes
    assert len(nodes) == 2
    return all(
        node.alive
        and not node.num_active_rows
        and not node.num_open_leases
        and node.num_free_pages == node.num_pages - 1
        for node in nodes
    )


def granted(victim: Follower, survivor: Serving, prefill: int) -> None:
    """The prefill node is frozen: the row is granted, and nothing follows."""
    os.kill(prefill, signal.SIGSTOP)
    try:
        until(lambda: num_rows(survivor) == 1, 20)
        time.sleep(0.2)
        assert not victim.token_ids
    finally:
        threading.Timer(0.5, os.kill, (prefill, signal.SIGCONT)).start()


def first_token(victim: Follower, survivor: Serving, prefill: int) -> None:
    until(lambda: victim.token_ids, 20)


def mid_stream(victim: Follower, survivor: Serving, prefill: int) -> None:
    until(lambda: len(victim.token_ids) > 30, 20)


@pytest.mark.parametrize("phase", [granted, first_token, mid_stream], ids=lambda p: p.__name__)
def test_what_a_killed_gateway_held_is_free_after_a_lease(
    head: RayHead, survivor: Serving, phase: Callable[[Follower, Serving, int], None]
) -> None:
    [prefill] = actors(head.pid, "PrefillActor")
    with serving(*SETS, head=head) as doomed:
        until(lambda: is_empty(survivor), 10)
        victim = Follower(doomed.address, 1500)
        phase(victim, survivor, prefill)
        doomed.process.kill()
        began = time.monotonic()
        doomed.process.wait()
    other = Follower(survivor.address, 40)
    until(lambda: len(other.token_ids) == 40 and is_empty(survivor), FREED_S + 1)
    assert time.monotonic() - began < FREED_S + 1
    assert not near_ties(TINY_MODEL, PROMPT, other.token_ids)
    assert victim.token_ids == [] or not near_ties(TINY_MODEL, PROMPT, victim.token_ids)


def test_large_requests_dropped_at_once_leave_nothing(survivor: Serving) -> None:
    """Their payloads of over 100 KB travel slower than the aborts, which overtake them."""
    until(lambda: is_empty(survivor), FREED_S + 5)
    with Client(survivor.address, max_retries=0) as client:
        for i in range(20):
            options = {"stop": ["\x00" * 150_000], "request_id": f"large-{i}"}
            stream = client.generate(PROMPT[: 5 + i], max_tokens=1500, **options)
            reader = threading.Thread(target=list, args=(stream,), daemon=True)
            reader.start()
            time.sleep(0.004 * i)
            while reader.is_alive() and not client.abort(f"large-{i}"):
                time.sleep(0.001)
            reader.join(20)
            assert not reader.is_alive()
    assert until(lambda: is_empty(survivor), 10) < LEASE_S, "freed by the lease, not by the abort"
