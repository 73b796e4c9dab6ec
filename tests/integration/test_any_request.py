"""Random requests over whole clusters: each answer is the one that the checkpoint gives.

The requests combine options that other tests cover one by one. Examples are penalties and seeds
with preemption, biases of special tokens with ``min_tokens``, stop strings with log probabilities,
and several answers with stop tokens. Prompts reach the end of the context and pools are small.
Clients resume answers after any piece. The oracle is tests/answers.py.
"""

import asyncio
from pathlib import Path

import pytest

from tandem.core.request import STRICT
from tests.answers import AnyRequests, Reference, ask, ask_all
from tests.rig import rig

TREE = "speculation.max_depth=4", "speculation.max_tree_nodes=16", "speculation.draft_length=fixed"
CLUSTERS: dict[str, tuple[str, ...]] = {
    "disaggregated": ("kv.page_size=8", "kv.num_pages=40", "speculation.max_depth=8"),
    "merged": (
        *("mode=colocated", "kv.page_size=8", "kv.num_pages=30", "model.max_model_len=63"),
        *("speculation.drafter=ngram+mtp", "speculation.max_depth=4", "decode.overlap=true"),
    ),
    "tree": ("kv.page_size=1", "kv.num_pages=300", *TREE, "decode.overlap=true"),
    "ngram": (
        *("kv.page_size=4", "kv.num_pages=60", "model.max_model_len=64"),
        *("speculation.drafter=ngram", "speculation.max_depth=8"),
    ),
    "colocated": (
        *("mode=colocated", "kv.page_size=8", "kv.num_pages=24", "decode.max_num_seqs=4"),
        *("prefill.max_num_batched_tokens=7", "speculation.max_depth=5", "decode.overlap=true"),
    ),
    "colocated tree": ("mode=colocated", "kv.page_size=16", "kv.num_pages=60", *TREE),
    "no drafts": ("kv.page_size=32", "kv.num_pages=20", "speculation.drafter=none"),
    "gangs": (
        *("prefill.dp_size=2", "decode.dp_size=2", "kv.page_size=8", "kv.num_pages=40"),
        "speculation.max_depth=4",
    ),
    "native": (
        *("kv.page_size=8", "kv.num_pages=40", "model.kernels=native"),
        *("speculation.max_depth=8", "speculation.draft_length=fixed"),
    ),
}
BURST = 8


async def check_answers(path: Path, sets: tuple[str, ...], num_bursts: int, seed: int) -> None:
    """Send bursts of requests, resume some answers of each burst, and check all of them."""
    sets = "model.max_model_len=96", *sets
    lengths = [int(one.partition("=")[2]) for one in sets if one.startswith("model.max_model_len")]
    async with rig(path, *sets) as cluster:
        num_drafts = cluster.decodes[0].info.model.num_draft_tokens
        requests = AnyRequests(seed, lengths[-1], num_drafts, strict=seed % 2 == 0)
        reference = Reference(path, lengths[-1])
        for _ in range(num_bursts):
            burst = [requests.make() for _ in range(BURST)]
            answers = await asyncio.gather(*(ask_all(cluster, one) for one in burst))
            for request, several in zip(burst, answers, strict=True):
                for answer in several:
                    reference.check(request, answer)
            for request, several in [*zip(burst, answers, strict=True)][::2]:
                resumed, text = requests.resumed(request, several[-1])
                rest = await ask(cluster, resumed)
                reference.check(resumed, rest)
                if request.speculation.acceptance == STRICT:
                    assert resumed.output_ids + rest.token_ids == several[-1].token_ids
                    assert text + rest.text == several[-1].text
        await cluster.check_empty()


@pytest.mark.parametrize("name", ["disaggregated", "merged", "tree"])
async def test_answers_are_those_of_the_checkpoint(small_model: Path, name: str) -> None:
    await check_answers(small_model, CLUSTERS[name], num_bursts=2, seed=[*CLUSTERS].index(name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("name", CLUSTERS)
async def test_many_answers_are_those_of_the_checkpoint(
    small_model: Path, name: str, seed: int
) -> None:
    await check_answers(small_model, CLUSTERS[name], num_bursts=12, seed=seed)
