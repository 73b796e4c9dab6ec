"""A disk fills up and is freed again while a cluster serves.

No process ends and no answer is wrong. Ray's logs, crash journals, temporary files and the home
folder all lie on that disk.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import RayHead, Serving, actors, alive, ray_head, serving
from tandem import Client, InferenceError
from tandem.core.config import TINY_MODEL
from tandem.core.info import PREFILL, SERVING
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk of its own takes root"),
]
DISK = "size=192m"
SETS = "kv.num_pages=100", "kv.page_size=16", "decode.max_num_seqs=14"
NUM_AT_ONCE, NUM_ROUNDS = 14, 3
LONG_NAME = "\U00020000" * 126
"""Request id. Many of this length need more than one page of a crash journal."""
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED.name, grpc.StatusCode.UNAVAILABLE.name
EXACT = "exact"
NUM_LONG = 40_000
"""Tokens of a prompt that exceeds what Ray sends inline in a call."""


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Mount a small file system for everything temporary, except pytest's folder, which exists
    already. The path is short because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="disk") as name:
        mount = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", name]
        mounted = subprocess.run(mount, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill the disk to the last byte during the block."""
    other = disk / "others"
    with other.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    assert os.statvfs(disk).f_bfree == 0
    try:
        yield
    finally:
        other.unlink()


def prompt(number: int) -> list[int]:
    return [5, 6, 7, 20 + number]


def ask(address: str, wanted: list[tuple[int, ...]], number: int) -> str:
    """Return the outcome of a request: EXACT, "wrong", or the name of a status."""
    try:
        with Client(address, retry_s=0) as client:
            answer = client.complete(
                prompt(number),
                max_tokens=40,
                ignore_eos=True,
                request_id=f"{LONG_NAME}{number:02}",
            )
    except InferenceError as error:
        return error.code.name
    return EXACT if answer.token_ids == wanted[number] else f"wrong: {answer.token_ids}"


def ask_many(server: Serving, wanted: list[tuple[int, ...]]) -> Counter[str]:
    """Send one request alone, then one for each row at the same time."""
    alone = ask(server.address, wanted, 0)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        many = pool.map(partial(ask, server.address, wanted), range(NUM_AT_ONCE))
        return Counter([alone, *many])


def processes(head: RayHead, server: Serving) -> set[int]:
    names = "Controller", "PrefillActor", "DecodeActor"
    found = [actors(head.pid, name) for name in names]
    assert all(found)
    return {head.pid, server.process.pid}.union(*found)


def test_a_disk_that_fills_up_under_load_ends_no_process_and_no_answer_is_wrong(disk: Path) -> None:
    with (
        ray_head(with_token=False, num_cpus=4) as head,
        serving(*SETS, head=head) as server,
        Client(server.address) as client,
    ):
        wanted = [
            client.complete(prompt(number), max_tokens=40, ignore_eos=True).token_ids
            for number in range(NUM_AT_ONCE)
        ]
        for number, ids in enumerate(wanted):
            assert not near_ties(TINY_MODEL, prompt(number), list(ids))
        before = processes(head, server)
        for _ in range(2):
            with full(disk):
                for _ in range(NUM_ROUNDS):
                    outcomes = ask_many(server, wanted)
                    assert outcomes.keys() <= {EXACT, *REFUSED}, outcomes
            wait_until(lambda: ask_many(server, wanted) == {EXACT: NUM_AT_ONCE + 1})
        assert processes(head, server) == before and all(map(alive, before))
        assert client.status().state == SERVING


def test_a_rank_that_dies_while_the_disk_is_full_comes_back_when_there_is_room(disk: Path) -> None:
    """While the rank is gone, requests are refused with a named status."""
    with (
        ray_head(with_token=False, num_cpus=4) as head,
        serving(*SETS, "server.recovery_timeout_s=1", head=head) as server,
        Client(server.address) as client,
    ):
        wanted = [client.complete(prompt(0), max_tokens=40, ignore_eos=True).token_ids]
        [decode] = actors(head.pid, "DecodeActor")
        with full(disk):
            os.kill(decode, 9)
            wait_until(lambda: not alive(decode))
            assert ask(server.address, wanted, 0) in REFUSED
        wait_until(lambda: ask(server.address, wanted, 0) == EXACT)
        assert actors(head.pid, "DecodeActor") != [decode]
        assert client.status().state == SERVING


def test_a_long_prompt_needs_no_room_in_an_object_store_that_is_full(
    disk: Path, tmp_path: Path
) -> None:
    """Ray would put its tokens into the object store, which lies on the full disk as well."""
    folder = tmp_path / "long"
    shutil.copytree(TINY_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 16
    (folder / "config.json").write_text(json.dumps(config))
    long = [300 + i % 700 for i in range(NUM_LONG)]
    sets = f"model.path={folder}", "kv.num_pages=3000", "kv.page_size=16"
    with (
        ray_head(with_token=False, num_cpus=4, store=disk) as head,
        serving(*sets, head=head) as server,
        Client(server.address, retry_s=0) as client,
        ThreadPoolExecutor() as pool,
    ):
        wanted = [client.complete(prompt(0), max_tokens=40, ignore_eos=True).token_ids]
        before = processes(head, server)
        with full(disk):
            asked = pool.submit(client.complete, long, max_tokens=2, request_id="long")
            # Do not wait for the whole prompt, whose computation takes minutes.
            wait_until(lambda: asked.done() or is_computed(client))
            assert not asked.done(), asked.exception()
            assert client.abort("long")
            assert asked.result().finished.finish_reason == "abort"
            assert ask(server.address, wanted, 0) == EXACT
        assert processes(head, server) == before and all(map(alive, before))


def is_computed(client: Client) -> bool:
    """Whether the prefill rank has received a prompt."""
    [prefill] = [rank for rank in client.status().ranks if rank.kind == PREFILL]
    return prefill.num_active_rows > 0
