"""Answers that run into NaN or infinite values, through the whole path.

They end with a status and are counted. Caches keep nothing of them, and other answers are
unaffected.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.harness import tiny
from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from benchmarks.harness.held_out import held_out
from tandem import AsyncClient, InferenceError
from tandem.cluster.entrypoints.server import Server
from tandem.core.errors import NonFiniteLogits
from tandem.model.network.cache import MAIN
from tests.integration.test_http_port import samples
from tests.rig import Rig, rig
from tests.waiting import until

SETS = "kv.num_pages=80", "kv.page_size=16", "prefill.max_num_batched_tokens=32"
ADDRESSES = "server.address=127.0.0.1:0", "server.http_address=127.0.0.1:0"
NUM_TOKENS, READ = 12, 1500
"""``READ`` is a token of prompts for which the checkpoint has non-finite weights."""
SHARED, WRITING, *CLEAN = held_out(5, 40, 60, seed=5)
BROKEN = [[*SHARED, READ, *CLEAN[0][:20]], [READ], [*CLEAN[1], READ]]


@pytest.fixture(scope="module")
def written(small_model: Path) -> list[int]:
    """Return the answer to WRITING, up to a token that has non-finite weights as well."""
    known = {*SHARED, *WRITING, *(token for prompt in CLEAN for token in prompt)}
    for prompt in ([*SHARED, *CLEAN[0]], *CLEAN):
        known |= {*tiny.reference_greedy(small_model, prompt, NUM_TOKENS)}
    tokens = tiny.reference_greedy(small_model, WRITING, NUM_TOKENS)
    end = next(i for i, token in enumerate(tokens) if i > 1 and token not in known | {*tokens[:i]})
    return tokens[: end + 1]


@pytest.fixture(scope="module")
def folder(small_model: Path, written: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "model"
    shutil.copytree(small_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][[READ, written[-1]]] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return folder


@asynccontextmanager
async def served(folder: Path, *sets: str) -> AsyncIterator[tuple[Rig, Server, AsyncClient]]:
    async with rig(folder, *SETS, *ADDRESSES, *sets) as cluster, Server(cluster.config) as server:
        await server.attach(cluster.gateway)
        async with AsyncClient(server.address, retry_s=0) as client:
            yield cluster, server, client


async def read(client: AsyncClient, prompt: Sequence[int], **options: object) -> list[int]:
    """Return the tokens that precede the answer's INTERNAL status."""
    tokens: list[int] = []
    with pytest.raises(InferenceError, match="non_finite: ") as ended:
        async for piece in client.generate(prompt, ignore_eos=True, **options):
            tokens += piece.token_ids
    assert ended.value.code == grpc.StatusCode.INTERNAL
    return tokens


async def check(folder: Path, small_model: Path, written: list[int], *sets: str) -> None:
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    clean = [[*SHARED, *CLEAN[0]], *CLEAN]
    async with served(folder, *sets) as (cluster, server, client):
        prefixes = [rank.engine.scheduler._pages.prefixes for rank in cluster.prefills]
        for prompt in BROKEN:
            assert await read(client, prompt) == []
        assert not any(map(len, prefixes)), "nothing of them is known"
        for num in range(2):
            ended = [*(read(client, prompt) for prompt in BROKEN), read(client, WRITING)]
            whole = (client.complete(prompt, **options) for prompt in clean)
            *told, own = await asyncio.gather(*ended, *whole)
            assert told[: len(BROKEN) + 1] == [[], [], [], written], num
            for prompt, answer in zip(clean, [*told[len(BROKEN) + 1 :], own], strict=True):
                assert not near_ties(small_model, prompt, list(answer.token_ids))
        await cluster.check_empty()
        num_ended = 3 * len(BROKEN) + 2
        ranks = cluster.gateway.fleet.ranks.values()

        def num_counted() -> float:
            beats = (rank.heartbeat for rank in ranks if rank.heartbeat is not None)
            return sum(beat.load.counters["num_non_finite"] for beat in beats)

        await until(lambda: num_counted() >= num_ended)
        found = await samples(server)
        assert found["tandem_rejections_total", (("code", "INTERNAL"),)] == num_ended
        told = [n for (name, _), n in found.items() if name == "tandem_num_non_finite_total"]
        assert sum(told) == num_ended and len(told) == len(ranks)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_they_end_alone_and_are_counted(
    folder: Path, small_model: Path, written: list[int], mode: str
) -> None:
    """Covers prompts of several chunks, of one token, and ending with the bad token, and an answer
    that has it. Prompts with the same prefix run in parallel."""
    await check(folder, small_model, written, f"mode={mode}")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("num_drafts", [0, 3])
async def test_they_end_alone_in_gangs(
    folder: Path, small_model: Path, written: list[int], num_drafts: int, kernels: str
) -> None:
    sizes = "prefill.dp_size=2", "decode.dp_size=2", f"model.kernels={kernels}"
    await check(folder, small_model, written, *sizes, f"speculation.max_depth={num_drafts}")


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_a_known_page_that_is_broken_ends_one_prompt_and_is_forgotten(
    small_model: Path, mode: str
) -> None:
    async with rig(small_model, *SETS, f"mode={mode}") as cluster:
        [prefill] = cluster.prefills
        asked = [greedy(f"r{i}", [*SHARED, 5], NUM_TOKENS) for i in range(4)]
        first = await cluster.complete(asked[0])
        known = prefill.engine.scheduler._pages.prefixes

        def plant() -> None:
            page = next(iter(known._pages.values()))
            prefill.engine._caches[MAIN][0][page, 3, 7] = float("inf")

        await prefill.loop.call(plant)
        with pytest.raises(NonFiniteLogits, match="non_finite: r1"):
            await cluster.complete(asked[1])
        assert not len(known)
        for request, num_cached in ((asked[2], 0), (asked[3], first[2].usage.prompt // 16 * 16)):
            again = await cluster.complete(request)
            assert again[0] == first[0] and again[2].usage.cached == num_cached
        await cluster.check_empty()
