"""Every drafter at its largest level over gRPC, in every layout.

Answers must equal, to the bit, those of the same layout without drafts, for all request options.
The whole table runs with ``pytest -m "slow or not slow"``.
"""

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from tandem import AsyncClient
from tandem.cluster.client.options import GenerateOptions
from tandem.core.answer import Delta, TokenLogprobs
from tandem.core.config import TINY_MODEL
from tests.conformance import DRAFTERS, texts
from tests.integration.test_spine import served
from tests.rig import Rig, rig
from tests.user_drafters import Hangs

LAYOUTS: dict[str, tuple[str, ...]] = {
    "disaggregated": (),
    "colocated": ("mode=colocated",),
    "1 x 2": ("decode.dp_size=2",),
    "2 x 1": ("prefill.dp_size=2",),
    "2 x 2": ("prefill.dp_size=2", "decode.dp_size=2"),
    "1 x 4": ("decode.dp_size=4",),
    "2 x 4": ("prefill.dp_size=2", "decode.dp_size=4"),
}
IN_MAKE_TEST = {("disaggregated", "mtp tree"), ("colocated", "medusa tree"), ("2 x 2", "mtp tree")}
SETS = (
    *("model.kernels=native", "speculation.draft_length=fixed", "kv.num_pages=300"),
    "server.address=127.0.0.1:0",
)
KINDS: tuple[GenerateOptions, ...] = (
    {},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "logprobs": 1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "max_drafts": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}, "logprobs": 0},
    {"min_tokens": 15, "stop_token_ids": (10, 13), "max_drafts": 1},
    {"max_drafts": 0, "logprobs": 2},
)
Answer = dict[int, list[tuple[int, TokenLogprobs | None]]]


async def answer(
    client: AsyncClient, i: int, ids: list[int], has_drafts: bool
) -> tuple[Answer, int]:
    """Return tokens and log probabilities of each answer to a prompt, and the accepted drafts."""
    options = KINDS[i % len(KINDS)] | {"seed": 77 + i, "max_tokens": 24}
    options.setdefault("ignore_eos", "stop_token_ids" not in options)
    if not has_drafts:
        options.pop("max_drafts", None)
    told: Answer = defaultdict(list)
    num_accepted = 0
    async for piece in client.generate(ids, **options):
        if isinstance(piece, Delta):
            more: Any = piece.logprobs or [None] * len(piece.token_ids)
            told[piece.index] += zip(piece.token_ids, more, strict=True)
        else:
            num_accepted += piece.speculation.num_accepted
    return dict(told), num_accepted


async def answers(cluster: Rig, has_drafts: bool = True) -> tuple[list[Answer], int]:
    """Complete the first request alone, so that in its first step one rank is busy and others
    idle."""
    asked = texts(10, seed=5)
    async with served(cluster) as address, AsyncClient(address) as client:
        first = await answer(client, 0, asked[0], has_drafts)
        asking = (answer(client, i, ids, has_drafts) for i, ids in enumerate(asked[1:], start=1))
        told = [first, *await asyncio.gather(*asking)]
    await cluster.check_empty()
    found, nums = zip(*told, strict=True)
    return [*found], sum(nums)


_plain: list[Answer] = []


async def without_drafts() -> list[Answer]:
    """Return the answers of a split cluster, which are those of every layout to the last bit."""
    if not _plain:
        async with rig(TINY_MODEL, *SETS, "speculation.drafter=none") as cluster:
            found, num_accepted = await answers(cluster, has_drafts=False)
            assert num_accepted == 0
        _plain.extend(found)
    return _plain


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(
            layout, name, marks=() if {(layout, name)} & IN_MAKE_TEST else pytest.mark.slow
        )
        for layout in LAYOUTS
        for name in DRAFTERS
    ],
)
async def test_answers_are_those_without_drafts(layout: str, name: str) -> None:
    expected = await without_drafts()
    async with rig(TINY_MODEL, *SETS, *LAYOUTS[layout], *DRAFTERS[name]) as cluster:
        told, num_accepted = await answers(cluster)
    assert told == expected and num_accepted > 0


@pytest.mark.parametrize(
    "hostile",
    ["Hostile", *(pytest.param(one, marks=pytest.mark.slow) for one in ("Broken", "Hangs"))],
)
async def test_a_hostile_class_under_64_requests(hostile: str) -> None:
    """Every answer is exact and nothing leaks.

    The drafter is turned off after three consecutive steps in which it failed for some row, even if
    its other drafts are correct.
    """
    asked = texts(8, most=24, seed=5) * 8
    told = []
    for sets in (
        ["speculation.drafter=none"],
        [f"speculation.drafter=tests.user_drafters:{hostile}", "speculation.max_tree_nodes=6"],
    ):
        sets += [*SETS, "speculation.drafter_timeout_s=0.05", "decode.max_num_seqs=64"]
        async with rig(TINY_MODEL, *sets) as cluster:
            async with served(cluster) as address, AsyncClient(address) as client:
                asking = (client.complete(ids, max_tokens=12, ignore_eos=True) for ids in asked)
                told.append([one.token_ids for one in await asyncio.gather(*asking)])
            await cluster.check_empty()
            [decode] = cluster.decodes
            trouble = decode.engine.programs.exec_mode_status
            theirs = getattr(decode.engine._loaded.drafter, "_user_drafter", None)
            if isinstance(theirs, Hangs):
                theirs.let_go.set()
    assert told[0] == told[1] and f"{hostile} failed" in trouble and "is switched off" in trouble
