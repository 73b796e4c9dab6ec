"""The whole system as a user runs it: ``tandem serve``, real Ray, real gRPC, real gloo."""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.held_out import held_out
from benchmarks.harness.procs import Serving, actors, descendants, serving, tandem, wait_gone
from tandem import AsyncClient, Client, Completion, InferenceError
from tandem.core.config import TINY_MODEL
from tests.waiting import until, wait_until

MAX_TOKENS = 32
IN_FLIGHT = 12


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("kv.num_pages=700") as running:
        yield running


@pytest.fixture
async def client(server: Serving) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as connected:
        yield connected


def assert_idle(server: Serving) -> None:
    """Check that no row, page or lease is held once no request runs."""
    with Client(server.address) as client:

        def is_idle() -> bool:
            nodes = client.status().ranks
            assert all(node.alive for node in nodes)
            return all(
                n.num_free_tokens == n.max_tokens
                and not n.num_open_leases
                and not n.num_active_rows
                for n in nodes
            )

        wait_until(is_idle, "something is held")


def prompts(num: int, min_len: int, max_len: int, seed: int) -> list[list[int]]:
    return held_out(num, min_len, max_len, seed)


@pytest.mark.parametrize("num_prompts", [8, pytest.param(100, marks=pytest.mark.slow)])
async def test_held_out_prompts_are_answered_exactly(
    server: Serving, client: AsyncClient, num_prompts: int
) -> None:
    """Each prompt runs with n = 0..3 drafts and gives transformers' greedy tokens, except near
    ties."""
    asked = prompts(num_prompts, 2, 200, seed=21)
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def ask(ids: list[int], num_drafts: int) -> Completion:
        async with gate:
            return await client.complete(
                ids, max_tokens=MAX_TOKENS, max_drafts=num_drafts, ignore_eos=True
            )

    jobs = [(ids, n) for n in range(4) for ids in asked]
    answers = await asyncio.gather(*(ask(ids, n) for ids, n in jobs))
    checked: dict[tuple[int, ...], list[str]] = {}
    for (ids, n), answer in zip(jobs, answers, strict=True):
        key = (*ids, -1, *answer.token_ids)
        if key not in checked:
            checked[key] = near_ties(TINY_MODEL, ids, list(answer.token_ids))
        counts = answer.finished.speculation
        assert len(answer.token_ids) == MAX_TOKENS
        assert counts.num_drafted == sum(counts.drafted_per_position) <= n * counts.num_steps
        assert answer.finished.kv_transfer.backend == "gloo"
        assert answer.finished.kv_transfer.tokens == len(ids)
    most = [
        counts
        for (_, n), answer in zip(jobs, answers, strict=True)
        if n == 3 and (counts := answer.finished.speculation).num_drafted
    ]
    assert len(most) > num_prompts / 2, "drafts were to pay at this load"
    places = [place for found in checked.values() for place in found]
    print("near ties:", places)
    assert len(places) <= math.ceil(2 * len(jobs) / 1000)
    assert_idle(server)


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ([], {}, "prompt"),
        ([0, 999_999], {}, "999999"),
        ([0] * 9000, {}, "max_model_len"),
        ([0, 5], {"temperature": -1.0}, "temperature"),
        ([0, 5], {"top_p": 1.5}, "top_p"),
    ],
)
async def test_bad_input_is_refused_and_the_server_goes_on(
    server: Serving, client: AsyncClient, prompt: list[int], options: dict, expected: str
) -> None:
    with pytest.raises(InferenceError) as error:
        await client.complete(prompt, **options)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in error.value.details or "token_ids" in error.value.details
    answer = await client.complete([0, 5, 6], max_tokens=3, ignore_eos=True)
    assert len(answer.token_ids) == 3
    assert_idle(server)


async def test_dropped_calls_free_both_nodes(server: Serving, client: AsyncClient) -> None:
    [ids] = prompts(1, 150, 200, seed=3)

    async def is_running() -> bool:
        return (await client.status()).num_running > 0

    for num_pieces in (0, 1, 3):
        stream = client.generate(ids, max_tokens=400, ignore_eos=True)
        for _ in range(num_pieces):
            await anext(stream)
        if num_pieces == 0:
            task = asyncio.create_task(anext(stream))
            await until(is_running)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
    assert_idle(server)


def test_ranks_of_a_ray_of_ones_own_give_way_to_nobody(server: Serving) -> None:
    """Ray's workers run at low priority. Next to a busy process of another user they would
    stall."""
    pid = server.process.pid
    ranks = actors(pid, "PrefillActor") + actors(pid, "DecodeActor")
    niceness = {os.getpriority(os.PRIO_PROCESS, rank) for rank in ranks}
    assert niceness == {os.getpriority(os.PRIO_PROCESS, pid)}


def test_text_in_text_out(server: Serving) -> None:
    with Client(server.address) as client:
        pieces = list(client.generate("def f(x):\n    return ", max_tokens=20))
        whole = client.complete("def f(x):\n    return ", max_tokens=20)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.finished.usage.completion == len(whole.token_ids)


def test_commands_against_the_server(server: Serving) -> None:
    ran = tandem("generate", "import os\n", "--address", server.address, "--json", "--seed", "3")
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout.splitlines()[-1])
    assert answer["usage"]["completion"] == len(answer["token_ids"]) <= 128
    assert answer["seed"] == 3 and isinstance(answer["text"], str)
    assert answer["kv_transfer"]["bytes"] > 0
    refused = tandem("generate", "--token-ids", "0,123456", "--address", server.address)
    assert refused.returncode == 1 and "INVALID_ARGUMENT" in refused.stderr
    status = tandem("status", "--address", server.address, "--json")
    assert status.returncode == 0
    kinds = {node["kind"] for node in json.loads(status.stdout)["ranks"]}
    assert kinds == {"prefill", "decode"}


def test_a_port_in_use_is_told_before_anything_is_started(server: Serving) -> None:
    ran = tandem("serve", "--set", f"server.address={server.address}")
    assert ran.returncode != 0 and server.address in ran.stderr
    assert "starting Ray" in "".join(server.log) and "starting Ray" not in ran.stderr


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["model.path=/nonexistent"], "/nonexistent"),
        (["decode.max_num_seq=3"], "max_num_seqs"),
        (["speculation.max_depth=99"], "max_depth"),
        pytest.param(["decode.dp_size=3"], "dp_size=3: must divide", marks=pytest.mark.slow),
    ],
)
def test_mistakes_in_the_configuration_are_explained(sets: list[str], expected: str) -> None:
    args = [arg for item in sets for arg in ("--set", item)]
    ran = tandem("serve", "--set", "server.address=127.0.0.1:0", *args)
    assert ran.returncode != 0 and expected in ran.stderr


def test_generate_without_a_server_starts_its_own_and_leaves_nothing() -> None:
    ran = tandem(
        "generate", "--token-ids", "0,40,41", "--max-tokens", "6", "--json",
        "--set", "mode=colocated", "--set", "kv.num_pages=200",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout.splitlines()[-1])
    assert len(answer["token_ids"]) <= 6
    assert not near_ties(TINY_MODEL, [0, 40, 41], answer["token_ids"])


def test_sigterm_drains_running_streams_and_exits_zero(server: Serving) -> None:
    """This test must be the last of the file: it ends the server of all the others."""
    assert_idle(server)
    with Client(server.address) as client:
        stream = client.generate([0, 50, 51], max_tokens=120, ignore_eos=True)
        next(stream)
        tree = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        pieces = list(stream)
    assert pieces[-1].finish_reason == "length"
    assert server.process.wait(60) == 0, server.log
    wait_gone(tree)
