"""Gangs in real processes: they serve, show up in the status, rebalance experts, and are refused
where resources are missing."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import RayHead, Serving, actors, ray_head, serving, tandem
from tandem import Client
from tandem.core.config import TINY_MODEL
from tandem.core.info import RankStatus
from tests.integration.test_lost_prefill import prompts
from tests.waiting import wait_until

SETS = (
    "prefill.dp_size=2", "decode.dp_size=2", "decode.num_redundant_experts=2",
    "kv.num_pages=300", "kv.page_size=16", "speculation.profile_at_startup=false",
)  # fmt: skip
NUM_ALIKE = 50
"""Consecutive status reports with equal step counts after which no rank measures steps any more."""


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(with_token=False, num_cpus=6) as running:
        yield running


@pytest.fixture(scope="module")
def server(head: RayHead) -> Iterator[Serving]:
    with serving(*SETS, head=head) as running:
        yield running
    assert tandem("stop", "--ray-address", head.address, env=head.env).returncode == 0


def serve(server: Serving, num: int, seed: int) -> list[list[int]]:
    """Return the answers to prompts that are sent at the same time."""
    with Client(server.address) as client, ThreadPoolExecutor(num) as pool:

        def ask(ids: list[int]) -> list[int]:
            return list(client.complete(ids, max_tokens=40, ignore_eos=True).token_ids)

        return list(pool.map(ask, prompts(num, seed)))


def serve_exactly(server: Serving, num: int, seed: int) -> list[list[int]]:
    answers = serve(server, num, seed)
    for ids, answer in zip(prompts(num, seed), answers, strict=True):
        assert len(answer) == 40 and not near_ties(TINY_MODEL, ids, answer)
    return answers


def settled(server: Serving) -> dict[str, RankStatus]:
    """Return the status of all ranks, once all report and none measures steps any more."""
    seen: list[dict[str, RankStatus]] = []

    def stand_still() -> bool:
        seen.append(told(server))
        steps = [
            [node.counters["num_steps"] for node in nodes.values()] for nodes in seen[-NUM_ALIKE:]
        ]
        are_alike = steps == [steps[-1]] * NUM_ALIKE
        return are_alike and all(node.alive for node in seen[-1].values())

    wait_until(stand_still)
    return seen[-1]


def test_ranks_serve_are_shown_and_get_another_placement(head: RayHead, server: Serving) -> None:
    answers = serve_exactly(server, 6, seed=51)
    nodes = settled(server)
    assert sorted(nodes) == ["decode-0.0", "decode-0.1", "prefill-0.0", "prefill-0.1"]
    assert all(0.4 < node.balance_ratio <= 1.0 for node in nodes.values())
    assert (
        nodes["decode-0.0"].counters["num_steps"] == nodes["decode-0.1"].counters["num_steps"] > 0
    )
    table = tandem("status", "--address", server.address).stdout
    assert "decode-0.1" in table and "balance" in table

    before = actors(head.pid, "DecodeActor")
    wrong = tandem("rebalance", "--ray-address", head.address, "--gang", "decode-7", env=head.env)
    assert wrong.returncode == 1 and "decode-7" in wrong.stderr and "decode-0" in wrong.stderr
    args = ("--ray-address", head.address, "--gang", "decode-0", "--json")
    ran = tandem("rebalance", *args, env=head.env)
    assert ran.returncode == 0, ran.stderr
    [done] = json.loads(ran.stdout)["gangs"]
    assert done["gang"] == "decode-0" and done["num_rows"] > 1000
    if done["is_moved"]:
        assert done["after"] > done["before"]
        assert not set(before) & set(actors(head.pid, "DecodeActor"))
    assert serve(server, 6, seed=51) == answers
    expected = done["after"] if done["is_moved"] else done["before"]

    def is_told() -> bool:
        """Whether the status shows the same counts of rows; heartbeats delay it a little."""
        ratios = {one.balance_ratio for one in told(server).values() if one.kind == "decode"}
        return len(ratios) == 1 and ratios.pop() == pytest.approx(expected, abs=0.1)

    wait_until(is_told)


@pytest.mark.slow
def test_a_new_controller_adopts_a_gang_and_where_its_experts_lie(
    head: RayHead, server: Serving
) -> None:
    """The new controller then replaces a rank that dies, and that rank loads the experts of the
    dead one."""
    before, processes = told(server), actors(head.pid, "DecodeActor")
    [controller] = actors(head.pid, "Controller")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: actors(head.pid, "Controller") not in ([], [controller]))
    serve_exactly(server, 3, seed=54)
    after = told(server)
    assert {name: one.epoch for name, one in after.items()} == {
        name: one.epoch for name, one in before.items()
    }
    assert actors(head.pid, "DecodeActor") == processes
    os.kill(processes[1], signal.SIGKILL)
    old = before["decode-0.1"].epoch
    wait_until(
        lambda: any(n == "decode-0.1" and one.epoch > old for n, one in told(server).items())
    )
    serve_exactly(server, 6, seed=51)
    assert len(set(processes) & set(actors(head.pid, "DecodeActor"))) == 1


def told(server: Serving) -> dict[str, RankStatus]:
    with Client(server.address) as client:
        return {node.name: node for node in client.status().ranks}


@pytest.mark.slow
def test_a_layout_that_has_no_room_says_what_is_missing(head: RayHead, server: Serving) -> None:
    args = ("--ray-address", head.address, "--set", "server.address=127.0.0.1:0")
    assert tandem("stop", "--ray-address", head.address, env=head.env).returncode == 0
    ran = tandem("serve", *args, "--set", "decode.dp_size=8", env=head.env)
    assert ran.returncode == 1
    assert "1 CPU for each of 8 ranks, of 6 in this Ray cluster" in ran.stderr, ran.stderr
    assert tandem("stop", "--ray-address", head.address, env=head.env).returncode == 0
    with serving(*SETS, head=head) as again:
        serve_exactly(again, 2, seed=53)
