"""Weights that change under their path, and answers started by another model: none are mixed."""

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import tiny
from benchmarks.harness.procs import Serving, actors, serving, tandem
from tandem import AsyncClient, Client, InferenceError
from tandem.cluster.control.plan import plan_gangs
from tandem.cluster.entrypoints.server import Server
from tandem.core.errors import LayoutMismatch, Unavailable
from tandem.core.info import DECODE, NOT_SERVING, PREFILL, SERVING
from tandem.core.request import Request, SamplingParams
from tandem.kv_transfer.layout import check_compatible
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.files import CheckpointFiles
from tests import rig as rigs
from tests.rig import Rig, rig
from tests.small import write_small
from tests.waiting import until, wait_until

SETS = "kv.num_pages=100", "kv.page_size=16", "server.recovery_timeout_s=0.5"
SERVER = (*SETS, "server.address=127.0.0.1:0", "server.drain_timeout_s=0.1")
PROMPT = tuple(range(5, 45))
NUM_TOKENS = 24
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two checkpoints of the same shape."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    write_small(old)
    shutil.copytree(old, new, dirs_exist_ok=True)
    tensors = load_file(old / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, one in tensors.items():
        if one.ndim > 1:
            tensors[name] = one + 0.3 * one.std() * torch.randn(one.shape, generator=generator)
    save_file(tensors, new / "model.safetensors")
    return old, new


@pytest.fixture
def link(tmp_path: Path, folders: tuple[Path, Path]) -> Path:
    """Return the link to the cluster's checkpoint, which points to the old one at first."""
    rigs._loaded.clear()
    path = tmp_path / "current"
    path.symlink_to(folders[0])
    return path


def move(link: Path, folder: Path) -> None:
    link.unlink()
    link.symlink_to(folder)
    rigs._loaded.clear()


def request(name: str, num_tokens: int = NUM_TOKENS) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0, ignore_eos=True)
    return Request(name, PROMPT, sampling=sampling)


def reference(folder: Path, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """Return the answer of this checkpoint, computed by transformers."""
    return tuple(tiny.reference_greedy(folder, list(PROMPT), num_tokens))


def digest_of(folder: Path) -> str:
    with CheckpointFiles(folder) as files:
        return files.digest(ModelConfig.from_dir(folder))


async def replace(cluster: Rig, kind: str) -> None:
    """Kill a rank. Its next epoch loads the checkpoint that the link points to now."""
    ranks = cluster.prefills if kind == PREFILL else cluster.decodes
    dead = ranks.pop()
    cluster.members.remove(dead.spec.epoch_name)
    await dead.stop()
    [plan] = [one for one in plan_gangs(cluster.config) if one.kind == kind]
    await cluster.start(*plan.specs(next(rigs._epochs), ["127.0.0.1"]))


@pytest.fixture
async def moved(link: Path, folders: tuple[Path, Path]) -> AsyncIterator[Rig]:
    async with rig(link, *SETS) as cluster:
        yield cluster
        await rigs.stop_all([*cluster.prefills, *cluster.decodes])


async def test_a_rank_of_other_weights_gets_no_request_and_ends_no_answer(
    moved: Rig, link: Path, folders: tuple[Path, Path]
) -> None:
    """An answer that is being decoded continues."""
    wanted, (old, new) = reference(folders[0], 100), map(digest_of, folders)
    begun = moved.gateway.start_answers(request("begun", 100))
    answer = list[int]()

    async def read() -> None:
        async for piece in begun.pieces():
            answer.extend(piece.token_ids)

    reader = asyncio.create_task(read())
    await until(lambda: len(answer) > 10)
    move(link, folders[1])
    await replace(moved, PREFILL)
    await until(moved.gateway.fleet.unready_gangs)
    with pytest.raises(Unavailable) as refused:
        await moved.complete(request("later"))
    assert old in str(refused.value) and new in str(refused.value)
    await reader
    assert tuple(answer) == wanted, "its decode rank has all it needs"
    assert not moved.gateway.fleet.usable_pairs()
    prefill, decode = moved.prefills[0].info, moved.decodes[0].info
    with pytest.raises(LayoutMismatch) as differ:
        check_compatible(prefill.caches, decode.caches)
    assert f"model: {old}" in str(differ.value) and f"model: {new}" in str(differ.value)


async def test_a_gateway_refuses_a_cluster_that_has_become_another_model(
    moved: Rig, link: Path, folders: tuple[Path, Path]
) -> None:
    """Its started answers soon end with a named error. A gateway started later serves the new
    model."""
    old, new = map(digest_of, folders)
    begun = moved.gateway.start_answers(request("begun", 900))
    pieces = begun.pieces()
    first = await anext(pieces)
    move(link, folders[1])
    for kind in (DECODE, PREFILL):
        await replace(moved, kind)
    given = list(first.token_ids)
    with pytest.raises(Unavailable) as refused:
        async for piece in pieces:
            given += piece.token_ids
    wanted = reference(folders[0], len(given))
    assert tuple(given) == wanted and len(given) < 900
    status = await moved.gateway.status(0)
    assert status.state == NOT_SERVING and not moved.gateway.is_healthy()
    causes = {rank.name: rank.cause for rank in status.ranks}
    for text in (str(refused.value), causes["prefill-0"], causes["decode-0"]):
        assert old in text and new in text
    async with rigs.gateway(moved) as later:
        assert later.model.digest == new and later.is_healthy()
        moved.gateway = later
        ids, _, _ = await moved.complete(request("new"))
        assert tuple(ids) == reference(folders[1])


async def test_another_model_does_not_continue_a_begun_answer(
    folders: tuple[Path, Path],
) -> None:
    """Two servers share an address, as during the rollout of a checkpoint."""
    rigs._loaded.clear()
    async with (
        rig(folders[0], *SERVER) as a,
        rig(folders[1], *SERVER) as b,
        Server(a.config) as one,
        Server(b.config) as two,
    ):
        await one.attach(a.gateway)
        await two.attach(b.gateway)
        async with AsyncClient(one.address) as client:
            whole = (await client.complete(PROMPT, **LONG)).token_ids
            digests = [(await client.model_info()).digest]
        digests.append(b.gateway.model.digest)
        got, ending = list[int](), None
        async with AsyncClient(f"ipv4:{one.address},{two.address}") as client:
            with pytest.raises(InferenceError) as refused:
                async for piece in client.generate(PROMPT, **LONG):
                    got += piece.token_ids
                    ending = ending or asyncio.create_task(one.stop())
        error = refused.value
        assert error.code == grpc.StatusCode.FAILED_PRECONDITION
        assert all(digest in error.details for digest in digests) and len(set(digests)) == 2
        assert tuple(got) == whole[: len(got)] == error.token_ids and 0 < len(got) < 900
        assert error.model == digests[0]
        async with AsyncClient(two.address) as client:
            resume = {"resume_token_ids": got, "resume_model": error.model}
            with pytest.raises(InferenceError, match="FAILED_PRECONDITION: resume_model="):
                await client.complete(PROMPT, **LONG, **resume)
        async with rigs.gateway(a) as again, Server(a.config) as three:
            await three.attach(again)
            async with AsyncClient(three.address) as client:
                rest = await client.complete(PROMPT, **LONG, **resume)
        assert (*got, *rest.token_ids) == whole


def generated(address: str, retry_s: float = 60.0) -> tuple[int, ...]:
    with Client(address, retry_s=retry_s) as client:
        return client.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True).token_ids


def end_of(server: Serving, kind: str, number: int = 0) -> int:
    """Kill the process of a rank; return its id."""
    pid = actors(server.process.pid, kind)[number]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_killed_rank_whose_link_has_moved_waits_and_status_says_why(
    link: Path, folders: tuple[Path, Path]
) -> None:
    """Real processes on a Ray. The other gang keeps serving. Once the link is restored, all is
    well."""
    wanted, digests = reference(folders[0]), [digest_of(folder) for folder in folders]
    sets = f"model.path={link}", "mode=colocated", "decode.replicas=2", "kv.num_pages=100"
    with serving(*sets) as server:
        assert generated(server.address) == wanted
        move(link, folders[1])
        end_of(server, "ColocatedActor")
        told = ""

        def is_told() -> bool:
            nonlocal told
            told = " ".join(tandem("status", "--address", server.address).stdout.split())
            assert generated(server.address) == wanted
            return "not loading: model.path: has weights " in told

        wait_until(is_told)
        assert "DEGRADED" in told and all(digest in told for digest in digests)
        waiting = actors(server.process.pid, "ColocatedActor")
        assert len(waiting) == 2
        move(link, folders[0])
        with Client(server.address) as client:
            wait_until(lambda: client.status().state == SERVING)
            assert client.model_info().digest == digests[0]
        assert actors(server.process.pid, "ColocatedActor") == waiting, "it went on by itself"
        assert generated(server.address) == wanted


@pytest.mark.slow
def test_weights_swapped_under_load_with_kills_mix_no_answer(
    link: Path, folders: tuple[Path, Path]
) -> None:
    """A gang whose rank dies while the link points elsewhere waits.

    If all its ranks die, the gateway refuses to continue answers with the new model. Every answer
    is the old model's, and every such refusal names both digests.
    """
    wanted, digests = reference(folders[0]), [digest_of(folder) for folder in folders]
    sets = (
        f"model.path={link}",
        "decode.dp_size=2",
        "kv.num_pages=100",
        "server.recovery_timeout_s=5",
    )
    kinds, over = ("PrefillActor", "DecodeActor"), threading.Event()
    answers, refusals = list[tuple[int, ...]](), list[str]()

    def load(address: str) -> None:
        while not over.is_set():
            try:
                answers.append(generated(address, retry_s=1.0))
            except InferenceError as error:
                refusals.append(str(error))

    def is_refused(why: str, since: int) -> bool:
        return any(why in text and all(d in text for d in digests) for text in refusals[since:])

    with serving(*sets) as server, ThreadPoolExecutor(4) as pool, Client(server.address) as client:
        try:
            loads = [pool.submit(load, server.address) for _ in range(4)]
            for turn in range(6):
                last, since = len(answers) + 8, len(refusals)
                wait_until(lambda last=last: len(answers) >= last)
                move(link, folders[1])
                end_of(server, kinds[turn % 2], turn // 2 % 2 if turn % 2 else 0)
                wait_until(lambda since=since: is_refused("weights with digest", since))
                move(link, folders[0])
                wait_until(lambda: client.status().state == SERVING)
            move(link, folders[1])
            for pid in [pid for kind in kinds for pid in actors(server.process.pid, kind)]:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_refused("the gang serves the model", 0))
        finally:
            over.set()
        for one in loads:
            one.result()
        assert client.status().state == NOT_SERVING
    assert set(answers) == {wanted} and len(answers) > 48
    assert not [text for text in refusals if "UNAVAILABLE" not in text]
