"""Any rank of a gang is killed or stopped at any point of a step, in real processes.

All of it runs in `make soak`. test_lockstep.py and test_gang_steps.py test the same in one process.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import ROOT, Serving, alive, python_path, serving
from tandem import Client, InferenceError
from tandem.core.config import TINY_MODEL
from tests.integration.test_faults import begun, born, check, epochs, is_empty
from tests.integration.test_lost_prefill import prompts
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow
SETS = (
    "prefill.dp_size=2", "decode.dp_size=2", "kv.num_pages=700", "kv.page_size=16",
    "server.recovery_timeout_s=120", "control.failure_reset_s=0",
)  # fmt: skip
NUM_TOKENS = 400
POINTS = {"proposing": 0, "in its first collective": 1, "in a later one": 7}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(faults: Path) -> Iterator[Serving]:
    path = python_path(ROOT, ROOT / "tests" / "faults")
    env = os.environ | {"FAULTS": str(faults), "PYTHONPATH": path}
    with serving(*SETS, env=env) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def pids(faults: Path, gang: str) -> list[int]:
    return [int((faults / f"{gang}.{rank}.pid").read_text()) for rank in range(2)]


def first_token_s(server: Serving, prompt: list[int], since: float) -> float:
    """Return the seconds from ``since`` to the first token of a request that is retried."""
    with Client(server.address, retry_s=0) as client:

        def is_answered() -> bool:
            try:
                next(client.generate(prompt, max_tokens=2, ignore_eos=True))
                return True
            except InferenceError:
                return False

        wait_until(is_answered)
        return time.monotonic() - since


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("rank", [0, 1], ids=["planner", "other"])
@pytest.mark.parametrize("gang", ["decode-0", "prefill-0"])
def test_the_epoch_ends_and_who_is_left_is_in_the_next_one(
    server: Serving,
    faults: Path,
    pool: ThreadPoolExecutor,
    gang: str,
    rank: int,
    point: str,
    number: signal.Signals,
) -> None:
    """Started answers continue exactly, the other rank keeps its process, and new requests are
    served."""
    asked = prompts(5, 29)
    before, weights, processes = epochs(server), born(server), pids(faults, gang)
    answers = begun(pool, server, asked[:4], NUM_TOKENS)
    armed = faults / f"{processes[rank]}.gang"
    armed.with_suffix(".new").write_text(f"{int(number)} {POINTS[point]}")
    armed.with_suffix(".new").rename(armed)
    late = pool.submit(first_token_s, server, asked[4], time.monotonic())
    wait_until(lambda: not armed.exists())
    since = time.monotonic()
    wait_until(lambda: epochs(server).get(f"{gang}.{rank}", 0) > before[f"{gang}.{rank}"])
    served_s = first_token_s(server, asked[4], since)
    print(f"{gang} rank {rank} {number.name} {point}: next token after {served_s:.1f} s")
    check(asked[:4], answers, NUM_TOKENS)
    late.result(PATIENCE_S)
    wait_until(lambda: is_empty(server))
    after = pids(faults, gang)
    assert after[1 - rank] == processes[1 - rank] and after[rank] != processes[rank]
    assert alive(after[0]) and alive(after[1]) and not alive(processes[rank])
    others = {name for name in before if not name.startswith(gang)}
    assert {name: epochs(server)[name] for name in others} == {n: before[n] for n in others}
    assert born(server)[f"{gang}.{1 - rank}"] == weights[f"{gang}.{1 - rank}"]
    assert born(server)[f"{gang}.{rank}"] == epochs(server)[f"{gang}.{rank}"]
    with Client(server.address) as client:
        again = client.complete(asked[4], max_tokens=20, ignore_eos=True)
    assert not near_ties(TINY_MODEL, asked[4], list(again.token_ids))
