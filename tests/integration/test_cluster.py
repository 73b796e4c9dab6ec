"""One cluster in a Ray begun apart: gateways come and go, the controller dies and comes back."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from cluster.client.client import Client
from core.config import TINY_MODEL
from core.info import NodeStatus
from tests.drivers import MEMBERS, TROUBLE, left_in, script
from tests.exact import near_ties
from tests.procs import RayHead, Serving, actors, ray_head, serving, tandem

SETS = ("kv.num_pages=200", "kv.page_size=16")
SMALL = ("mode=colocated", "kv.num_pages=60", "kv.page_size=8")
PROMPT = [0, 50, 51]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
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


def nodes_of(server: Serving) -> list[NodeStatus]:
    with Client(server.address) as client:
        return list(client.status().nodes)


def lives(server: Serving) -> set[tuple[str, int]]:
    nodes = nodes_of(server)
    assert all(node.alive for node in nodes), nodes
    return {(node.kind, node.epoch) for node in nodes}


def rank_pids(head: RayHead) -> list[int]:
    return actors(head.pid, "PrefillActor") + actors(head.pid, "DecodeActor")


def check_answer(server: Serving, num_tokens: int = 12) -> None:
    with Client(server.address, max_retries=0) as client:
        answer = client.complete(PROMPT, max_tokens=num_tokens, ignore_eos=True)
    assert len(answer.token_ids) == num_tokens
    assert not near_ties(TINY_MODEL, PROMPT, list(answer.token_ids))


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def test_two_serves_at_once_make_one_cluster(head: RayHead, servers: list[Serving]) -> None:
    assert len(actors(head.pid, "Controller")) == 1 and len(rank_pids(head)) == 2
    assert lives(servers[0]) == lives(servers[1])
    for server in servers:
        check_answer(server)


def test_a_differing_config_is_refused_by_name(head: RayHead, servers: list[Serving]) -> None:
    args = ("--ray-address", head.address, "--set", "server.address=127.0.0.1:0")
    sets = ("--set", "kv.num_pages=200", "--set", "decode.max_rows=3", "--set", "kv.page_size=32")
    ran = tandem("serve", *args, *sets, env=head.env)
    assert ran.returncode == 1
    assert "error: INVALID_ARGUMENT: config: " in ran.stderr
    assert "decode.max_rows is 16 there, 3 here" in ran.stderr
    assert "kv.page_size is 16 there, 32 here" in ran.stderr
    assert "num_pages" not in ran.stderr and "server." not in ran.stderr
    check_answer(servers[0])


def test_what_ray_says_goes_to_the_log(head: RayHead, servers: list[Serving]) -> None:
    """Not to stdout, which is for answers: of this driver as of all others."""
    assert script(head, TROUBLE) == ["done"]
    until(lambda: all("trouble of Ray's own" in "".join(server.log) for server in servers))


def test_a_gateway_that_is_killed_or_leaves_takes_nothing_along(
    head: RayHead, servers: list[Serving]
) -> None:
    pids, before = rank_pids(head), lives(servers[0])
    with serving(*SETS, "server.max_queued=7", head=head) as third:
        check_answer(third)
        third.process.kill()
        third.process.wait()
    with serving(*SETS, head=head) as fourth:
        assert lives(fourth) == before
        check_answer(fourth)
        assert fourth.stop() == 0
    assert rank_pids(head) == pids
    check_answer(servers[0])


def test_a_killed_controller_comes_back_and_adopts(head: RayHead, servers: list[Serving]) -> None:
    pids, before = rank_pids(head), lives(servers[0])
    [controller] = actors(head.pid, "Controller")
    with Client(servers[0].address, max_retries=0) as client:
        stream = client.generate(PROMPT, max_tokens=150, ignore_eos=True)
        next(stream)
        os.kill(controller, signal.SIGKILL)
        assert sum(len(piece.token_ids) for piece in stream if hasattr(piece, "text")) > 140
    until(lambda: actors(head.pid, "Controller") not in ([], [controller]))
    check_answer(servers[1])
    assert rank_pids(head) == pids and lives(servers[0]) == before
    ran = tandem("status", "--address", servers[1].address, "--json")
    assert {(n["kind"], n["epoch"]) for n in json.loads(ran.stdout)["nodes"]} == before
    with serving(*SETS, head=head) as late:
        assert lives(late) == before, "nothing was loaded again"
        assert late.stop() == 0


def test_the_controller_begins_a_new_life_after_a_death(
    head: RayHead, servers: list[Serving]
) -> None:
    before = dict(lives(servers[0]))
    [victim] = actors(head.pid, "PrefillActor")
    os.kill(victim, signal.SIGKILL)
    until(lambda: actors(head.pid, "PrefillActor") not in ([], [victim]))
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
    said = script(head, MEMBERS, str(victim), *SETS)
    assert said[-1].startswith("lost: decode-0.")
    assert victim not in actors(head.pid, "DecodeActor")
    check_answer(servers[1])


def test_stop_ends_everything_once(head: RayHead, servers: list[Serving]) -> None:
    """From here on the Ray is empty."""
    ran = tandem("stop", "--ray-address", head.address, "--json", env=head.env)
    assert ran.returncode == 0, ran.stderr
    assert [name.partition(".")[0] for name in sorted(json.loads(ran.stdout)["stopped"])] == [
        "decode-0", "prefill-0",
    ]  # fmt: skip
    until(lambda: not rank_pids(head) and not actors(head.pid, "Controller"))
    assert left_in(head) == {"actors": [], "groups": []}
    again = tandem("stop", "--ray-address", head.address, env=head.env)
    assert again.returncode == 1 and "NOT_FOUND" in again.stderr


def test_a_mistake_that_only_ranks_can_see_is_told_and_may_be_mended(head: RayHead) -> None:
    args = ("--ray-address", head.address, "--set", "server.address=127.0.0.1:0")
    ran = tandem("serve", *args, "--set", "model.max_model_len=99999", env=head.env)
    assert ran.returncode == 1
    assert "error: INVALID_ARGUMENT: model.max_model_len: 99999" in ran.stderr
    with serving(*SMALL, head=head) as server:
        assert {kind for kind, _ in lives(server)} == {"colocated"}
        check_answer(server)
        assert server.stop() == 0
    assert tandem("stop", "--ray-address", head.address, env=head.env).returncode == 0


def near_half_of_the_pool(server: Serving) -> None:
    """Three answers that grow to over 40 % of it each: they are preempted and go on together."""

    def ask(first: int) -> tuple[list[int], list[int]]:
        prompt = [0, *range(first, first + 180)]
        with Client(server.address, max_retries=0) as client:
            answer = client.complete(prompt, max_tokens=200, ignore_eos=True, timeout_s=120)
        return prompt, list(answer.token_ids)

    with ThreadPoolExecutor() as pool:
        for prompt, tokens in pool.map(ask, (30, 300, 600)):
            assert len(tokens) == 200 and not near_ties(TINY_MODEL, prompt, tokens)
    [node] = nodes_of(server)
    assert node.num_preempted > 0 and node.num_free_pages == node.num_pages - 1


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
        until(lambda: actors(head.pid, "ColocatedActor") not in ([], [victim]), 40.0)
        os.kill(controller, signal.SIGKILL)
        until(lambda: actors(head.pid, "Controller") not in ([], [controller]), 40.0)
        [second_life] = actors(head.pid, "ColocatedActor")
        with serving(*SMALL, head=head) as second:
            check_answer(second)
            assert not lives(second) & before
        assert actors(head.pid, "ColocatedActor") == [second_life]
