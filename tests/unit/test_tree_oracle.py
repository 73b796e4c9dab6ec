"""Draft trees compared with transformers' forward with a 4-d mask. Covers the nodes that each node
sees, positions, and the cache after the accepted path was moved."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.decode_node.program.step import move_path, verify
from tandem.model.drafters.base import Drafts
from tandem.model.network.cache import MAIN
from tandem.model.network.tree import build_tree
from tandem.model.sampling.acceptance.base import VerifyResult
from tests.numerics import assert_near, network_rounding
from tests.trees import Parents, level_of, path_to
from tests.unit.test_drafts import prompt

GEOMETRIES: dict[str, dict[str, Any]] = {
    "latent queries": {},
    "plain queries": {
        **{"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 48},
        **{"n_group": 1, "first_k_dense_replace": 2},
    },
}
ALL, NONE = 0.0, torch.finfo(torch.float32).min


def shape(draw: random.Random) -> Parents:
    return tuple(draw.randint(max(0, i - 4), i) for i in range(draw.randint(3, 20)))


@torch.no_grad()
def by_transformers(folder: Path, ids: list[int], tokens: list[int], parents: Parents) -> Tensor:
    """Return the logits [Q, V] of the last known token and all nodes."""
    num_before, paths = len(ids) - 1, [path_to(parents, n) for n in range(len(parents) + 1)]
    mask = torch.full((len(ids) + len(tokens),) * 2, NONE).triu(1)
    mask[num_before:, num_before:] = NONE
    for node, path in enumerate(paths):
        mask[num_before + node, [num_before + one for one in (0, *path)]] = ALL
    positions = [*range(num_before), *(num_before + len(path) for path in paths)]
    logits: Tensor = tiny.reference(folder)(
        torch.tensor([ids + tokens]),
        attention_mask=mask[None, None],
        position_ids=torch.tensor([positions]),
    ).logits
    return logits[0, num_before:]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_tree_is_transformers_forward_with_its_mask(
    tmp_path: Path, geometry: str, kernels: str
) -> None:
    tiny.write_tiny(tmp_path, seed=51, **GEOMETRIES[geometry])
    loaded = load(tmp_path, f"model.kernels={kernels}", "speculation.drafter=none")
    draw = random.Random(6)
    for case in range(6):
        parents, ids = shape(draw), prompt(9 + 5 * case, seed=case)
        bench = Bench(loaded, num_drafts=0, page_size=4)
        known = [*ids, bench.start(greedy("r", ids, 60, ignore_eos=True))[0]]
        sequence = bench.sequence("r")
        num_more = bench.pool.num_pages_for(len(known) + len(parents) + 1) - len(sequence.pages)
        sequence.pages.extend(bench.pool.allocate(max(0, num_more)))
        launcher = bench.decode._launcher
        launcher.rows.update_page_table(sequence)
        rows = launcher.rows.select(torch.tensor([sequence.row]), len(sequence.pages))
        tokens = [draw.randrange(5, 90) for _ in parents]
        tree = build_tree(torch.tensor([parents]), level_of(parents).depth)
        with torch.inference_mode():
            drafts = Drafts(torch.tensor([tokens]))
            *_, [logits_NV] = verify(loaded, bench.caches, rows, drafts, tree)
        expected_NV = by_transformers(tmp_path, known, tokens, parents)
        bound = network_rounding(3, 48, float(expected_NV.abs().max()), growth=16)
        assert_near(logits_NV, expected_NV, bound)
        node = draw.randint(1, len(parents))
        path = path_to(parents, node)
        path_BE = torch.tensor([[0, *path, *([0] * (tree.depth - len(path)))]])
        result = VerifyResult(torch.zeros_like(path_BE), torch.tensor([len(path)]), path_BE)
        with torch.inference_mode():
            move_path(loaded, bench.caches[MAIN], rows, result)
            known += [tokens[one - 1] for one in path]
            state = replace(
                rows.state,
                last_B1=torch.tensor([[known[-1]]]),
                num_known_B=torch.tensor([len(known)]),
            )
            after, nothing = replace(rows, state=state), Drafts(torch.zeros(1, 0).long())
            *_, [[logits_V]] = verify(loaded, bench.caches, after, nothing)
        assert_near(logits_V, tiny.reference_logits(tmp_path, known)[-1], bound)
        bench.drop("r")
        bench.check_empty()
