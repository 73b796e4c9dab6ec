"""Ranks that die, hang or are poisoned, in real processes: every answer continues.

All of it runs in `make soak`. test_poison.py and test_recovery.py test the same in one process.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import ROOT, Serving, actors, python_path, serving
from tandem import Client, InferenceError
from tandem.core.config import TINY_MODEL
from tandem.core.info import RankStatus
from tests.faults.sitecustomize import NUM_TOLD, POISON, PREFILL_POISON
from tests.integration.test_lost_prefill import prompts
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow
SETS = ("decode.replicas=2", "kv.num_pages=700", "kv.page_size=16", "server.recovery_timeout_s=120")
NUM_ROWS = 8
Answers = list["Future[list[int]]"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@contextmanager
def faulty(faults: Path, max_rows: int, *sets: str) -> Iterator[Serving]:
    path = python_path(ROOT, ROOT / "tests" / "faults")
    env = os.environ | {"FAULTS": str(faults), "PYTHONPATH": path}
    with serving(*SETS, f"decode.max_num_seqs={max_rows}", *sets, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def server(faults: Path) -> Iterator[Serving]:
    with faulty(faults, NUM_ROWS) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as threads:
        yield threads


def ask(
    server: Serving, prompt: list[int], num_tokens: int, told: list[int], retry_s: float = 0
) -> list[int]:
    with Client(server.address, retry_s=retry_s) as client:
        for piece in client.generate(prompt, max_tokens=num_tokens, ignore_eos=True):
            told += getattr(piece, "token_ids", ())
    return told


def sent(
    pool: ThreadPoolExecutor,
    server: Serving,
    asked: list[list[int]],
    num_tokens: int,
    told: list[list[int]] | None = None,
) -> Answers:
    """Start an answer to each prompt; its tokens are appended to its list in ``told``."""
    return [
        pool.submit(ask, server, prompt, num_tokens, so_far)
        for prompt, so_far in zip(asked, told or [[] for _ in asked], strict=True)
    ]


def begun(
    pool: ThreadPoolExecutor, server: Serving, asked: list[list[int]], num_tokens: int
) -> Answers:
    """Start an answer to each prompt, and return once each has a token."""
    told = [list[int]() for _ in asked]
    answers = sent(pool, server, asked, num_tokens, told)
    wait_until(lambda: all(told))
    assert not any(answer.done() for answer in answers), "too short to be interrupted"
    return answers


def check(asked: list[list[int]], answers: Answers, num_tokens: int) -> None:
    for prompt, answer in zip(asked, answers, strict=True):
        token_ids = answer.result(PATIENCE_S)
        assert len(token_ids) == num_tokens
        assert not near_ties(TINY_MODEL, prompt, token_ids)


def nodes_of(server: Serving) -> list[RankStatus]:
    with Client(server.address) as client:
        return list(client.status().ranks)


def epochs(server: Serving) -> dict[str, int]:
    return {node.name: node.epoch for node in nodes_of(server)}


def born(server: Serving) -> dict[str, int]:
    return {node.name: node.process_epoch for node in nodes_of(server)}


def replaced(server: Serving, before: dict[str, int]) -> set[str]:
    """Return the nodes that have a new epoch, once nothing is held anywhere."""
    wait_until(lambda: is_empty(server))
    return {name for name, epoch in epochs(server).items() if epoch != before[name]}


def is_empty(server: Serving) -> bool:
    return all(
        node.alive
        and not node.num_active_rows
        and not node.num_open_leases
        and node.num_free_tokens == node.max_tokens
        for node in nodes_of(server)
    )


@contextmanager
def blocked(faults: Path, pid: int, what: str) -> Iterator[None]:
    """Block a rank's engine thread or its asyncio loop."""
    path = faults / f"{pid}.{what}"
    path.touch()
    try:
        yield
    finally:
        path.unlink()


def test_one_poison_among_sixty_four(faults: Path, pool: ThreadPoolExecutor) -> None:
    with faulty(faults, 32, "kv.num_pages=1400") as server:
        check_poison(server, pool, 64, num_tokens=600)


def test_poison_is_refused_when_it_killed_alone_and_the_innocent_finish(
    server: Serving, pool: ThreadPoolExecutor
) -> None:
    check_poison(server, pool, 2 * NUM_ROWS)


def check_poison(
    server: Serving, pool: ThreadPoolExecutor, num: int, num_tokens: int = 300
) -> None:
    """Send one poison among ``num`` requests that fill both decode ranks.

    The poison causes a segmentation fault. Suspects then run alone, and only the poison is refused.
    """
    before = epochs(server)
    asked = [*prompts(num - 1, seed=31), [*POISON, 9]]
    answers = begun(pool, server, asked, num_tokens)
    *innocent, poison = answers
    with pytest.raises(InferenceError) as refused:
        poison.result(PATIENCE_S)
    assert refused.value.code == grpc.StatusCode.INTERNAL
    assert "was alone in a step that killed a rank" in refused.value.details
    assert len(refused.value.token_ids) >= NUM_TOLD - 8
    check(asked[:-1], innocent, num_tokens)
    assert replaced(server, before) == {"decode-0", "decode-1"}


def test_poison_in_prefill_takes_two_nodes_and_no_answer(
    faults: Path, pool: ThreadPoolExecutor
) -> None:
    """Answers without a token are sent again by their clients, as the clients do by default."""
    with faulty(faults, NUM_ROWS, "prefill.replicas=2") as server:
        before = epochs(server)
        asked = [*prompts(8, seed=37), [*PREFILL_POISON, 9]]
        answers = [pool.submit(ask, server, prompt, 30, [], 60) for prompt in asked]
        with pytest.raises(InferenceError) as refused:
            answers[-1].result(PATIENCE_S)
        assert refused.value.code == grpc.StatusCode.INTERNAL
        check(asked[:-1], answers[:-1], 30)
        assert replaced(server, before) == {"prefill-0", "prefill-1"}


def test_unrelated_kills_refuse_nobody_and_every_begun_answer_goes_on(
    server: Serving, pool: ThreadPoolExecutor
) -> None:
    """Both decode nodes are full when one is killed, so half of the answers wait for a row."""
    wait_until(lambda: is_empty(server))
    asked = prompts(2 * NUM_ROWS, seed=32)
    answers = begun(pool, server, asked, 400)
    first, second = actors(server.process.pid, "DecodeActor")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: second in actors(server.process.pid, "DecodeActor")[:1])
    wait_until(lambda: len(actors(server.process.pid, "DecodeActor")) == 2)
    os.kill(second, signal.SIGKILL)
    check(asked, answers, 400)
    wait_until(lambda: is_empty(server))


@pytest.mark.parametrize("stopped_s", [6, 20, 40, None])
def test_a_stopped_decode_node_is_routed_around_and_brings_nothing_stale(
    server: Serving, pool: ThreadPoolExecutor, stopped_s: float | None
) -> None:
    wait_until(lambda: is_empty(server))
    before = epochs(server)
    asked = prompts(12, seed=33)
    answers = begun(pool, server, asked, 600)
    stopped = actors(server.process.pid, "DecodeActor")[0]
    os.kill(stopped, signal.SIGSTOP)
    if stopped_s is not None:
        time.sleep(stopped_s)  # time: it tells a pause from a death
        if stopped in actors(server.process.pid, "DecodeActor"):
            os.kill(stopped, signal.SIGCONT)
    check(asked, answers, 600)
    changed = replaced(server, before)
    if stopped_s is None or stopped_s > 30:
        assert changed and changed <= {"decode-0", "decode-1"}
    elif stopped_s < 10:
        assert not changed, "six seconds are no death"
    again = prompts(6, seed=34)
    check(again, sent(pool, server, again, 200), 200)


@pytest.mark.parametrize("what", ["engine", "loop"])
def test_a_rank_of_which_half_is_blocked_is_replaced(
    server: Serving, faults: Path, pool: ThreadPoolExecutor, what: str
) -> None:
    """The engine thread blocks while the asyncio loop runs, and vice versa."""
    wait_until(lambda: is_empty(server))
    before = epochs(server)
    asked = prompts(12, seed=35)
    answers = begun(pool, server, asked, 600)
    pid = actors(server.process.pid, "DecodeActor")[0]
    with blocked(faults, pid, what):
        check(asked, answers, 600)
        wait_until(lambda: pid not in actors(server.process.pid, "DecodeActor"))
    changed = replaced(server, before)
    assert len(changed) == 1 and changed <= {"decode-0", "decode-1"}


@pytest.mark.parametrize("what", ["engine", "loop", "stop"])
def test_health_follows_the_only_prefill_node(
    server: Serving, faults: Path, pool: ThreadPoolExecutor, what: str
) -> None:
    """The node is idle, so only heartbeats can reveal the fault. Answers wait for its next
    epoch."""
    wait_until(lambda: is_empty(server))
    [pid] = actors(server.process.pid, "PrefillActor")
    if what == "stop":
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not is_healthy(server))
    else:
        with blocked(faults, pid, what):
            wait_until(lambda: not is_healthy(server))
    wait_until(lambda: is_healthy(server))
    asked = prompts(4, seed=36)
    check(asked, sent(pool, server, asked, 60), 60)


def is_healthy(server: Serving) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(server.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
