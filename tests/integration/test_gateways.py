"""Two gateways of one cluster: one is killed, the nodes forget it, the other serves on exactly."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from core.config import TINY_MODEL
from core.request import Request, SamplingParams, TokenBias
from core.schema import pack
from tandem import Client, InferenceError
from tests.exact import near_ties
from tests.procs import RayHead, Serving, actors, ray_head, serving

SETS = ("kv.num_pages=300", "kv.page_size=16", "kv_transfer.lease_s=2")
PATIENCE_S = 60
"""Only a hang takes this long, on the slowest machine."""
NUM_TOKENS = 4000
MOST_PER_STEP = 4
PROMPT = [0, *range(50, 90)]


MAX_INLINE_BYTES = 16 << 10
"""Ray sends larger arguments apart from their call. Its own bound, 100 KiB, is more than the
largest legal request of this checkpoint has."""


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_max_direct_call_object_size", str(MAX_INLINE_BYTES))
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


def until(condition: Callable[[], object]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE_S, "it took too long"
        time.sleep(0.02)


def num_rows(server: Serving) -> int:
    with Client(server.address) as client:
        nodes = client.status().nodes
    return sum(node.num_active_rows for node in nodes if node.kind == "decode")


def num_steps(server: Serving) -> int:
    with Client(server.address) as client:
        return sum(node.num_steps for node in client.status().nodes if node.kind == "decode")


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
        until(lambda: num_rows(survivor) == 1)
        time.sleep(0.2)
        assert not victim.token_ids
    finally:
        threading.Timer(0.5, os.kill, (prefill, signal.SIGCONT)).start()


def first_token(victim: Follower, survivor: Serving, prefill: int) -> None:
    until(lambda: victim.token_ids)


def mid_stream(victim: Follower, survivor: Serving, prefill: int) -> None:
    until(lambda: len(victim.token_ids) > 30)


@pytest.mark.parametrize("phase", [granted, first_token, mid_stream], ids=lambda p: p.__name__)
def test_what_a_killed_gateway_held_is_free_after_a_lease(
    head: RayHead, survivor: Serving, phase: Callable[[Follower, Serving, int], None]
) -> None:
    [prefill] = actors(head.pid, "PrefillActor")
    with serving(*SETS, head=head) as doomed:
        until(lambda: is_empty(survivor))
        num_before = num_steps(survivor)
        victim = Follower(doomed.address, NUM_TOKENS)
        phase(victim, survivor, prefill)
        doomed.process.kill()
        doomed.process.wait()
    other = Follower(survivor.address, 40)
    until(lambda: len(other.token_ids) == 40 and is_empty(survivor))
    made = num_steps(survivor) - num_before
    assert made < NUM_TOKENS / MOST_PER_STEP, "freed because the answer had ended"
    assert not near_ties(TINY_MODEL, PROMPT, other.token_ids)
    assert victim.token_ids == [] or not near_ties(TINY_MODEL, PROMPT, victim.token_ids)


def test_large_requests_dropped_at_once_leave_nothing(survivor: Serving) -> None:
    """Their payloads travel apart from their calls: slower than the aborts, which overtake them."""
    biases = dict.fromkeys(range(1024), 1e-09)
    sampling = SamplingParams(logit_bias=tuple(TokenBias(*item) for item in biases.items()))
    assert len(pack(Request("large", tuple(PROMPT), sampling=sampling))) > MAX_INLINE_BYTES
    until(lambda: is_empty(survivor))
    with Client(survivor.address, max_retries=0) as client:
        for i in range(20):
            options = {"logit_bias": biases, "request_id": f"large-{i}"}
            stream = client.generate(PROMPT[: 5 + i], max_tokens=NUM_TOKENS, **options)
            reader = threading.Thread(target=list, args=(stream,), daemon=True)
            reader.start()
            time.sleep(0.004 * i)
            while reader.is_alive() and not client.abort(f"large-{i}"):
                time.sleep(0.001)
            reader.join(PATIENCE_S)
            assert not reader.is_alive()
    num_before = num_steps(survivor)
    until(lambda: is_empty(survivor))
    made = num_steps(survivor) - num_before
    assert made < NUM_TOKENS / MOST_PER_STEP / 2, "freed because the answer had ended"
