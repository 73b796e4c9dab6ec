"""Merging of two draft chains into one tree, and the drafters that can be merged."""

from pathlib import Path

import pytest
import torch

from benchmarks.harness import tiny
from benchmarks.harness.engines import load
from tandem.model.drafters.base import Drafts
from tandem.model.drafters.merged import merge_chains
from tandem.model.network.tree import build_tree

MADE = 5, 6, 7


@pytest.mark.parametrize(
    ("looked", "num", "paths"),
    [
        ((5, 6, 7), 3, {MADE}),
        ((5, 8, 9), 3, {MADE, (5, 8, 9)}),
        ((5, 6, 9), 3, {MADE, (5, 6, 9)}),
        ((8, 6, 7), 3, {MADE, (8, 6, 7)}),
        ((8, 9, 4), 2, {MADE, (8, 9)}),
        ((5, 8, 4), 1, {MADE}),
        ((8, 9, 4), 0, {MADE}),
    ],
)
def test_equal_prefixes_stand_once(
    looked: tuple[int, ...], num: int, paths: set[tuple[int, ...]]
) -> None:
    """Compare all paths of the tree. A child that repeats an earlier sibling leads nowhere."""
    chains = (Drafts(torch.tensor([one])) for one in (MADE, looked))
    made, other = chains
    drafts = merge_chains(made, other._replace(num_B=torch.tensor([num])))
    assert drafts.parents_BN is not None
    [parents], [tokens] = drafts.parents_BN.tolist(), drafts.tokens_BN.tolist()
    assert tokens[::2] == [*MADE] and build_tree(drafts.parents_BN, 3).depth == 3
    found, seen = {0: ()}, set()
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1):
        path = None if found.get(parent) is None else (*found[parent], token)
        found[node] = None if path in seen else path  # type: ignore[assignment]
        seen.add(path)
    whole = {path for path in found.values() if path}
    assert {one for one in whole if not any(one == o[: len(one)] and one != o for o in whole)} == (
        paths
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    tiny.write_tiny(folder, seed=5)
    return folder


def test_who_cannot_be_merged_is_refused_by_name(folder: Path) -> None:
    may = "cannot be merged with the n-gram drafter; use one of ngram.mtp, ngram.medusa"
    for name in ("ngram+ngram", "ngram+self", "ngram+none", "ngram+", "ngram+mtp+medusa"):
        with pytest.raises(ValueError, match=may) as told:
            load(folder, f"speculation.drafter={name}")
        assert f"speculation.drafter: '{name}'" in str(told.value)
    with pytest.raises(ValueError, match="speculation.drafter: 'mtp.ngram' cannot be loaded"):
        load(folder, "speculation.drafter=mtp+ngram")
    with pytest.raises(
        ValueError, match=r"speculation.max_tree_nodes=8: ngram.mtp .*set max_tree_nodes to null"
    ):
        load(folder, "speculation.drafter=ngram+mtp", "speculation.max_tree_nodes=8")
    with pytest.raises(ValueError, match="speculation.draft_model_path"):
        load(folder, "speculation.drafter=ngram+eagle")
