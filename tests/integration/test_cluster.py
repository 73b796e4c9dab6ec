"""One cluster in an existing Ray.

Gateways come and go, and nodes release what killed gateways held. The controller dies and comes
back.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import PLAINLY, RayHead, Serving, actors, ray_head, serving, tandem
from tandem import Client, InferenceError
from tandem.cluster.client.options import build_request
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.core.config import TINY_MODEL
from tandem.core.info import RankStatus
from tandem.core.request import Request, SamplingParams, TokenBias
from tandem.core.schema import pack
from tests.drivers import MEMBERS, ROOMS, TROUBLE, left_in, script
from tests.often import often
from tests.waiting import PATIENCE_S, wait_until

SETS = (
    *("kv.num_pages=300", "kv.page_size=16", "kv_transfer.lease_s=2"),
    f"server.recovery_timeout_s={PATIENCE_S}",
)
SMALL = ("mode=colocated", "kv.num_pages=60", "kv.page_size=8")
MISTAKEN = ("--set", "mode=colocated", "--set", "model.max_model_len=99999")
PROMPT = [0, 50, 51]
LONG_PROMPT = [0, *range(50, 90)]
NUM_TOKENS = 4000
MOST_PER_STEP = 4
MAX_INLINE_BYTES = 16 << 10
"""Argument size above which Ray sends arguments separately from their call. Ray's default, 100 KiB,
exceeds the largest legal request of this checkpoint."""


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_max_direct_call_object_size", str(MAX_INLINE_BYTES))
        with ray_head(with_token=True) as running:
            yield running


@pytest.fixture(scope="module")
def servers(head: RayHead) -> Iterator[list[Serving]]:
    """Two gateways, started at the same moment on an empty Ray."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        both = [serving(*SETS, head=head) for _ in range(2)]
        starts = [pool.submit(one.__enter__) for one in both]
        for one, start in zip(both, starts, strict=True):
            start.result()
            stack.push(one)
        yield [start.result() for start in starts]


def nodes_of(server: Serving) -> list[RankStatus]:
    with Client(server.address) as client:
        return list(client.status().ranks)


def lives(server: Serving) -> set[tuple[str, int]]:
    nodes = nodes_of(server)
    assert all(node.alive for node in nodes), nodes
    return {(node.kind, node.epoch) for node in nodes}


def rank_pids(head: RayHead) -> list[int]:
    return actors(head.pid, "PrefillActor") + actors(head.pid, "DecodeActor")


def check_answer(server: Serving, num_tokens: int = 12) -> None:
    with Client(server.address, retry_s=0) as client:
        answer = client.complete(PROMPT, max_tokens=num_tokens, ignore_eos=True)
    assert len(answer.token_ids) == num_tokens
    assert not near_ties(TINY_MODEL, PROMPT, list(answer.token_ids))


def first_message(server: Serving, **resumed: Any) -> pb.GenerateResponse:
    """Return the first message of a stream, which is then cancelled. A valid proof of the request
    comes back in it."""
    options: Any = {"request_id": "proven", "max_tokens": 150, "ignore_eos": True}
    with grpc.insecure_channel(server.address) as channel:
        call = rpc.InferenceStub(channel).Generate(build_request(PROMPT, options | resumed))
        message: pb.GenerateResponse = next(call)
        call.cancel()
        return message


class Follower(threading.Thread):
    """Reads one long answer until it ends or its server is gone."""

    def __init__(self, address: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.token_ids: list[int] = []
        self._address, self._num_tokens = address, num_tokens
        self.start()

    def run(self) -> None:
        with Client(self._address, retry_s=0) as client:
            try:
                for piece in client.generate(
                    LONG_PROMPT, max_tokens=self._num_tokens, ignore_eos=True, timeout_s=PATIENCE_S
                ):
                    self.token_ids += piece.token_ids
            except InferenceError:
                return


def num_rows(server: Serving) -> int:
    with Client(server.address) as client:
        nodes = client.status().ranks
    return sum(node.num_active_rows for node in nodes if node.kind == "decode")


def num_steps(server: Serving) -> int:
    with Client(server.address) as client:
        return sum(
            node.counters["num_steps"] for node in client.status().ranks if node.kind == "decode"
        )


def is_empty(server: Serving) -> bool:
    with Client(server.address) as client:
        nodes = client.status().ranks
    assert len(nodes) == 2
    return all(
        node.alive
        and not node.num_active_rows
        and not node.num_open_leases
        and node.num_free_tokens == node.max_tokens
        for node in nodes
    )


def granted(victim: Follower, survivor: Serving, prefill: int) -> None:
    """Bring the victim to a granted row. The prefill node is frozen, so nothing follows."""
    os.kill(prefill, signal.SIGSTOP)
    wait_until(lambda: num_rows(survivor) == 1)
    assert not victim.token_ids


def first_token(victim: Follower, survivor: Serving, prefill: int) -> None:
    wait_until(lambda: victim.token_ids)


def mid_stream(victim: Follower, survivor: Serving, prefill: int) -> None:
    wait_until(lambda: len(victim.token_ids) > 30)


def test_two_serves_at_once_make_one_cluster(head: RayHead, servers: list[Serving]) -> None:
    assert len(actors(head.pid, "Controller")) == 1 and len(rank_pids(head)) == 2
    assert lives(servers[0]) == lives(servers[1])
    for server in servers:
        check_answer(server)


def test_a_differing_config_is_refused_by_name(head: RayHead, servers: list[Serving]) -> None:
    args = ("--ray-address", head.address, "--set", "server.address=127.0.0.1:0")
    sets = (
        "--set",
        "kv.num_pages=300",
        "--set",
        "decode.max_num_seqs=3",
        "--set",
        "kv.page_size=32",
    )
    ran = tandem("serve", *args, *sets, env=head.env)
    assert ran.returncode == 1
    assert "error: INVALID_ARGUMENT: config: " in ran.stderr
    assert "decode.max_num_seqs is 3, but 16 in the cluster" in ran.stderr
    assert "kv.page_size is 32, but 16 in the cluster" in ran.stderr
    assert "lease_s is 30.0, but 2.0 in the cluster" in ran.stderr
    assert "num_pages" not in ran.stderr and "server." not in ran.stderr
    check_answer(servers[0])


def test_what_ray_says_goes_to_the_log(head: RayHead, servers: list[Serving]) -> None:
    """Ray's output must not go to stdout, which is for answers. This holds in every driver."""
    assert script(head, TROUBLE) == ["done"]
    wait_until(lambda: all("trouble of Ray's own" in "".join(server.log) for server in servers))


def test_the_room_of_a_gang_in_its_second_life_is_kept(head: RayHead) -> None:
    """The placement group of the first epoch is kept, as a returning controller finds it. A gang
    that ends releases only its own group, not that of a gang whose name starts with the same
    characters."""
    kept, tenth = "tandem:other-0.4 tandem:other-1.9", "tandem:other-10.7"
    assert script(head, ROOMS) == [f"{kept} {tenth}", f"tandem:other-0.4 {tenth}", ""]


def test_a_gateway_that_leaves_takes_nothing_along(head: RayHead, servers: list[Serving]) -> None:
    pids, before = rank_pids(head), lives(servers[0])
    with serving(*SETS, head=head) as third:
        assert lives(third) == before
        check_answer(third)
        assert third.stop() == 0
    assert rank_pids(head) == pids
    check_answer(servers[0])


@pytest.mark.parametrize(
    "phase",
    often([granted, first_token, mid_stream], [first_token, mid_stream]),
    ids=lambda p: p.__name__,
)
def test_what_a_killed_gateway_held_is_free_after_a_lease(
    head: RayHead, servers: list[Serving], phase: Callable[[Follower, Serving, int], None]
) -> None:
    survivor = servers[0]
    pids, before = rank_pids(head), lives(survivor)
    [prefill] = actors(head.pid, "PrefillActor")
    with serving(*SETS, "server.max_queued=7", head=head) as doomed:
        wait_until(lambda: is_empty(survivor))
        num_before = num_steps(survivor)
        victim = Follower(doomed.address, NUM_TOKENS)
        try:
            phase(victim, survivor, prefill)
            doomed.process.kill()
            doomed.process.wait()
        finally:
            os.kill(prefill, signal.SIGCONT)
    other = Follower(survivor.address, 40)
    wait_until(lambda: len(other.token_ids) == 40 and is_empty(survivor))
    made = num_steps(survivor) - num_before
    assert made < NUM_TOKENS / MOST_PER_STEP, "freed because the answer had ended"
    assert not near_ties(TINY_MODEL, LONG_PROMPT, other.token_ids)
    assert victim.token_ids == [] or not near_ties(TINY_MODEL, LONG_PROMPT, victim.token_ids)
    assert rank_pids(head) == pids and lives(survivor) == before


def test_large_requests_dropped_at_once_leave_nothing(servers: list[Serving]) -> None:
    """Large payloads travel separately from their calls, so aborts overtake them."""
    survivor = servers[0]
    biases = dict.fromkeys(range(1024), 1e-09)
    sampling = SamplingParams(logit_bias=tuple(TokenBias(*item) for item in biases.items()))
    assert len(pack(Request("large", tuple(LONG_PROMPT), sampling=sampling))) > MAX_INLINE_BYTES
    wait_until(lambda: is_empty(survivor))
    with Client(survivor.address, retry_s=0) as client:
        for i in range(20):
            options = {"logit_bias": biases, "request_id": f"large-{i}"}
            stream = client.generate(LONG_PROMPT[: 5 + i], max_tokens=NUM_TOKENS, **options)
            reader = threading.Thread(target=list, args=(stream,), daemon=True)
            reader.start()
            # time: so that some aborts come early and some late; all have to be right
            time.sleep(0.004 * i)
            wait_until(lambda r=reader, i=i: not r.is_alive() or client.abort(f"large-{i}"))
            reader.join(PATIENCE_S)
            assert not reader.is_alive()
    num_before = num_steps(survivor)
    wait_until(lambda: is_empty(survivor))
    made = num_steps(survivor) - num_before
    assert made < NUM_TOKENS / MOST_PER_STEP / 2, "freed because the answer had ended"


def test_a_killed_controller_comes_back_and_adopts(head: RayHead, servers: list[Serving]) -> None:
    pids, before = rank_pids(head), lives(servers[0])
    proof = first_message(servers[0]).proof
    resume = {"resume_token_ids": [5], "resume_proof": proof}
    assert proof and first_message(servers[1], **resume).proof == proof, "the other one checks it"
    [controller] = actors(head.pid, "Controller")
    with Client(servers[0].address, retry_s=0) as client:
        stream = client.generate(PROMPT, max_tokens=150, ignore_eos=True)
        next(stream)
        os.kill(controller, signal.SIGKILL)
        assert sum(len(piece.token_ids) for piece in stream if hasattr(piece, "text")) > 140
    wait_until(lambda: actors(head.pid, "Controller") not in ([], [controller]))
    check_answer(servers[1])
    assert rank_pids(head) == pids and lives(servers[0]) == before
    ran = tandem("status", "--address", servers[1].address, "--json")
    assert {(n["kind"], n["epoch"]) for n in json.loads(ran.stdout)["ranks"]} == before
    with serving(*SETS, head=head) as late:
        assert lives(late) == before, "nothing was loaded again"
        assert first_message(late, **resume).proof == proof, "the key is another one"
        assert late.stop() == 0


def test_the_controller_begins_a_new_life_after_a_death(
    head: RayHead, servers: list[Serving]
) -> None:
    """Answers that have started continue."""
    before = dict(lives(servers[0]))
    [victim] = actors(head.pid, "PrefillActor")
    followers = [Follower(server.address, 60 + i) for i, server in enumerate(servers)]
    wait_until(lambda: all(follower.token_ids for follower in followers))
    os.kill(victim, signal.SIGKILL)
    for i, follower in enumerate(followers):
        follower.join(PATIENCE_S)
        assert len(follower.token_ids) == 60 + i
        assert not near_ties(TINY_MODEL, LONG_PROMPT, follower.token_ids)
    wait_until(lambda: actors(head.pid, "PrefillActor") not in ([], [victim]))
    with serving(*SETS, head=head) as late:
        after = dict(lives(late))
        assert after["decode"] == before["decode"] and after["prefill"] > before["prefill"]
        check_answer(late)
    assert dict(lives(servers[0])) == after, "who was there before follows"
    check_answer(servers[0])


@pytest.mark.slow
def test_a_frozen_rank_that_is_reported_gets_a_new_life(
    head: RayHead, servers: list[Serving]
) -> None:
    [victim] = actors(head.pid, "DecodeActor")
    said = script(head, MEMBERS, str(victim), *PLAINLY, *SETS)
    assert said[-1].startswith("lost: decode-0.")
    assert victim not in actors(head.pid, "DecodeActor")
    check_answer(servers[1])


def test_stop_ends_everything_once(head: RayHead, servers: list[Serving]) -> None:
    """The Ray is empty after this test."""
    ran = tandem("stop", "--ray-address", head.address, "--json", env=head.env)
    assert ran.returncode == 0, ran.stderr
    assert [name.partition(".")[0] for name in sorted(json.loads(ran.stdout)["stopped"])] == [
        "decode-0", "prefill-0",
    ]  # fmt: skip
    wait_until(lambda: not rank_pids(head) and not actors(head.pid, "Controller"))
    assert left_in(head) == {"actors": [], "groups": []}
    again = tandem("stop", "--ray-address", head.address, env=head.env)
    assert again.returncode == 1 and "NOT_FOUND" in again.stderr


def test_a_mistake_that_only_ranks_can_see_is_told_and_may_be_mended(head: RayHead) -> None:
    args = ("--ray-address", head.address, "--set", "server.address=127.0.0.1:0")
    ran = tandem("serve", *args, *MISTAKEN, env=head.env)
    assert ran.returncode == 1
    assert "error: INVALID_ARGUMENT: model.max_model_len=99999" in ran.stderr
    with serving(*SMALL, head=head) as server:
        assert {kind for kind, _ in lives(server)} == {"colocated"}
        check_answer(server)
        assert server.stop() == 0
    assert tandem("stop", "--ray-address", head.address, env=head.env).returncode == 0


def near_half_of_the_pool(server: Serving) -> None:
    """Send three answers that grow to over 40 % of the pool each. They are preempted, and all
    finish."""

    def ask(first: int) -> tuple[list[int], list[int]]:
        prompt = [0, *range(first, first + 180)]
        with Client(server.address, retry_s=0) as client:
            answer = client.complete(prompt, max_tokens=200, ignore_eos=True, timeout_s=120)
        return prompt, list(answer.token_ids)

    with ThreadPoolExecutor() as pool:
        for prompt, tokens in pool.map(ask, (30, 300, 600)):
            assert len(tokens) == 200 and not near_ties(TINY_MODEL, prompt, tokens)
    [node] = nodes_of(server)
    assert node.counters["num_preempted"] > 0 and node.num_free_tokens == node.max_tokens


@pytest.mark.slow
def test_a_ray_without_a_token_is_joined_and_its_cluster_outlives_who_began_it() -> None:
    with ray_head(with_token=False) as head:
        with serving(*SMALL, head=head) as first:
            near_half_of_the_pool(first)
            before = lives(first)
            assert first.stop() == 0
        [victim] = actors(head.pid, "ColocatedActor")
        [controller] = actors(head.pid, "Controller")
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: actors(head.pid, "ColocatedActor") not in ([], [victim]))
        os.kill(controller, signal.SIGKILL)
        wait_until(lambda: actors(head.pid, "Controller") not in ([], [controller]))
        [second_life] = actors(head.pid, "ColocatedActor")
        with serving(*SMALL, head=head) as second:
            check_answer(second)
            assert not lives(second) & before
        assert actors(head.pid, "ColocatedActor") == [second_life]
