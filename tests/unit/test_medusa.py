"""Medusa heads and static trees give the outputs of the published code and its formula."""

import json
import random
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import load as load_config
from tandem.core.info import PREFILL
from tandem.model.drafters.choices import Choice, parents_of, with_prefixes
from tandem.model.drafters.medusa import MedusaDrafter
from tandem.model.loaded import load_model
from tandem.model.network.tree import build_tree
from tests.trees import path_to
from tests.unit.test_drafts import Spy, fresh_rows, prompt
from training.calibrate import best_tree, path_values

BUFFERS = json.loads((Path(__file__).parents[1] / "data/medusa_buffers.json").read_text())
NUM_HEADS = 3
CHOICES_FILE = [[0], [1], [0, 0], [2], [1, 0], [0, 0, 0], [0, 1], [1, 0, 2]]


def tree_told(choices: list[Choice]) -> tuple[list[str], list[int], list[list[int]], list[int]]:
    """Return masks, depths, the paths to the leaves, and candidate indices of the nodes, root
    first."""
    drafter = MedusaDrafter([], choices, 8, torch.device("cpu"))
    level = drafter.draft_shapes(8)[-1]
    assert level.num_nodes == len(choices) and level.parents is not None
    tree = build_tree(torch.tensor([level.parents]), level.depth)
    masks = [format(bits % (1 << 64), "x") for bits in tree.bits_BQ[0].tolist()]
    leaves = {*range(1, len(choices) + 1)} - {*level.parents}
    paths = [[0, *path_to(level.parents, leaf)] for leaf in leaves]
    num_ranks, (places_N, _) = drafter._candidate_slots[level]
    ranks = [place % num_ranks for place in places_N.tolist()]
    depths: list[int] = tree.depth_BQ[0].tolist()
    assert [depth - 1 for depth in depths[1:]] == [p // num_ranks for p in places_N.tolist()]
    return masks, depths, paths, ranks


def same_paths(paths: list[list[int]], padded: list[list[int]]) -> bool:
    """Compare paths; the published ones are padded with values that are no node."""
    told = [[0, *(one for one in path[1:] if one > 0)] for path in padded]
    return sorted(paths) == sorted(told)


@pytest.mark.parametrize("case", BUFFERS["choices"], ids=lambda case: str(len(case["choices"])))
def test_trees_of_choices_are_the_authors(case: dict[str, Any]) -> None:
    choices = sorted(map(tuple, case["choices"]), key=lambda path: (len(path), path))
    masks, depths, paths, ranks = tree_told(choices)
    assert (masks, depths) == (case["mask"], case["position_ids"])
    assert same_paths(paths, case["retrieve_indices"])
    indices = [(depth - 1) * 10 + rank + 1 for depth, rank in zip(depths[1:], ranks, strict=True)]
    assert [0, *indices] == case["tree_indices"]


@pytest.mark.parametrize("case", BUFFERS["cartesian"], ids=lambda case: str(case["top_k"]))
def test_cartesian_trees_are_those_of_the_first_release(case: dict[str, Any]) -> None:
    _, *top_k = case["top_k"]
    choices = [
        path
        for depth in range(1, len(top_k) + 1)
        for path in product(*(range(k) for k in top_k[:depth]))
    ]
    masks, depths, paths, ranks = tree_told(choices)
    assert (masks, depths) == (case["mask"], case["position_ids"])
    assert same_paths(paths, case["retrieve_indices"])
    before = [sum(top_k[: depth - 1]) for depth in depths[1:]]
    assert [0, *(1 + b + rank for b, rank in zip(before, ranks, strict=True))] == case[
        "tree_indices"
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    tiny.write_tiny(folder, seed=11)
    return folder


def heads(num_layers: int, has_own: bool, size: int = 48, vocab: int = 96) -> dict[str, Tensor]:
    """Return random heads with the authors' tensor names."""
    generator = torch.Generator().manual_seed(num_layers)
    found = {}
    for i in range(NUM_HEADS):
        for j in range(num_layers):
            found[f"{i}.{j}.linear.weight"] = torch.randn(size, size, generator=generator) / 7
            found[f"{i}.{j}.linear.bias"] = torch.randn(size, generator=generator)
        if has_own:
            found[f"{i}.{num_layers}.weight"] = torch.randn(vocab, size, generator=generator)
    return found


def expected_logits(tensors: dict[str, Tensor], i: int, x: Tensor, shared: Tensor) -> Tensor:
    j = 0
    while f"{i}.{j}.linear.weight" in tensors:
        x = x + F.silu(
            F.linear(x, tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"])
        )
        j += 1
    return F.linear(x, tensors.get(f"{i}.{j}.weight", shared))


def vllm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    def name(old: str) -> str:
        i, rest = old.split(".", 1)
        if "linear" in rest:
            j, _, leaf = rest.split(".")
            return f"blocks.{i}.layers.{j}.{leaf}"
        return f"lm_heads.{i}.weight"

    return {name(old): tensor for old, tensor in tensors.items()}


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", ["pt", "safetensors", "vllm", "shared"])
@pytest.mark.parametrize("num_nodes", [None, 8])
def test_drafts_are_those_of_the_formula(
    tmp_path: Path, folder: Path, num_layers: int, kind: str, num_nodes: int | None
) -> None:
    """In every step, drafts are the top-k tokens of each head, at their places in the tree. The
    main model's hidden state is recomputed. All file formats are covered."""
    tensors = heads(num_layers, has_own=kind != "shared")
    if kind == "pt":
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    elif kind == "vllm":
        save_file(vllm_names(tensors), tmp_path / "model.safetensors")
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "choices.json").write_text(json.dumps(CHOICES_FILE))
    size = "null" if num_nodes is None else str(num_nodes)
    sets = "speculation.drafter=medusa", f"speculation.draft_model_path={tmp_path}"
    loaded = load(folder, *sets, f"speculation.max_tree_nodes={size}")
    choices = CHOICES_FILE if num_nodes else [[0], [0, 0], [0, 0, 0]]
    spy = Spy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), page_size=4)
    known = prompt(13)
    first, _ = bench.start(greedy("r", known, 12, ignore_eos=True))
    known.append(first)
    shared = load_file(folder / "model.safetensors")["lm_head.weight"].float()
    while bench.decode.has_work():
        bench.decode.step()
        batch, num_pages = fresh_rows(known[:-1], 8, 0)
        with torch.inference_mode():
            [hidden] = loaded.network(batch, loaded.allocate_caches(num_pages + 4, 8))
        expected = []
        for path in choices:
            logits = expected_logits(tensors, len(path) - 1, hidden[-1].clone(), shared)
            expected.append(int(logits.topk(5).indices[path[-1]]))
        assert spy.drafts[-1][0] == expected
        known += bench.frames[-1].updates[0].token_ids
    bench.check_empty()


def test_prefill_nodes_read_no_heads_and_ship_hidden_states(tmp_path: Path, folder: Path) -> None:
    save_file(heads(1, True), tmp_path / "medusa_lm_head.safetensors")
    sets = [
        f"model.path={folder}",
        "speculation.drafter=medusa",
        f"speculation.draft_model_path={tmp_path}",
    ]
    loaded = load_model(load_config(None, sets), PREFILL)
    assert isinstance(loaded.drafter, MedusaDrafter)
    assert not len(loaded.drafter.heads) and loaded.drafter.num_features == 48
    save_file(_wide(heads(1, True)), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="use heads that were trained for it"):
        load_model(load_config(None, sets), PREFILL)


def test_zero_hidden_changes_no_token(tmp_path: Path, folder: Path) -> None:
    save_file(heads(1, True), tmp_path / "medusa_lm_head.safetensors")
    loaded = load(folder, "speculation.drafter=medusa", f"speculation.draft_model_path={tmp_path}")
    asked = greedy("r", prompt(9), 20, ignore_eos=True)
    [plain] = Bench(loaded, num_drafts=0).generate(asked)
    assert Bench(loaded, handover_hidden=False).generate(asked) == [plain]


def _foreign(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"model.norm.weight": torch.ones(3)}


def _wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"1.1.weight": torch.zeros(97, 48)}


def _hole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if not name.startswith("1.")}


def _no_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name != "2.0.linear.bias"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_foreign, "Medusa heads; unknown tensors: model.norm.weight"),
        (_wide, r"1.1.weight has shape \(97, 48\), but this model needs \(96, 48\); use heads"),
        (_hole, "Medusa heads; unknown tensors: 2.0.linear"),
        (_no_bias, "tensor 2.0.linear.bias is missing"),
    ],
)
def test_foreign_heads_are_refused(tmp_path: Path, folder: Path, change: Any, told: str) -> None:
    save_file(change(heads(1, True)), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=told):
        load(folder, "speculation.drafter=medusa", f"speculation.draft_model_path={tmp_path}")


def test_files_that_are_none_are_refused(tmp_path: Path, folder: Path) -> None:
    for path, told in (
        (tmp_path, "contains none of the files medusa_lm_head"),
        ("null", "name the folder"),
    ):
        with pytest.raises(ValueError, match=told):
            load(folder, "speculation.drafter=medusa", f"speculation.draft_model_path={path}")
    torch.save({"0.0.linear.weight": 7}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="medusa_lm_head.pt: cannot be read"):
        load(folder, "speculation.drafter=medusa", f"speculation.draft_model_path={tmp_path}")
    for name in ("medusa_lm_head.pt", "medusa_lm_head.safetensors"):
        (tmp_path / name).write_bytes(b"no weights")
        with pytest.raises(ValueError, match=f"{name}: (cannot be read|is not a readable)"):
            load(folder, "speculation.drafter=medusa", f"speculation.draft_model_path={tmp_path}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[0], [0, 1, 2]]", r"\[0, 1, 2\] needs its prefix \[0, 1\]; add that"),
        ("[[0], [1, 0]]", r"\[1, 0\] needs its prefix \[1\]"),
        (
            "[[0], []]",
            r"mine.json: \[1\]: .*at least 1 item.*; write a list of paths of ranks from 0 to 63",
        ),
        ("[[0], [-1]]", r"\[1\]\[0\]: .*greater than or equal to 0"),
        ("[[0], [64]]", r"\[1\]\[0\]: .*less than or equal to 63"),
        ("[[0], [true]]", r"\[1\]\[0\]: .*valid integer"),
        ("[0, 1]", r"\[0\]: .*valid array"),
        ('{"a": 1}', "all: .*valid array"),
        ("[[0]", "all: Invalid JSON"),
        (
            "[[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]",
            r"\[0, 0, 0, 0\] needs 4 heads, but the file has 3",
        ),
        ("[[0], [0, 0]]", "drafts chains"),
    ],
)
def test_choices_that_are_none_are_refused(
    tmp_path: Path, folder: Path, text: str, told: str
) -> None:
    save_file(heads(1, True), tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "mine.json").write_text(text)
    sets = (
        f"speculation.draft_model_path={tmp_path}",
        f"speculation.medusa_choices={tmp_path / 'mine.json'}",
    )
    with pytest.raises(ValueError, match=told):
        load(folder, "speculation.drafter=medusa", "speculation.max_tree_nodes=63", *sets)


def test_choices_without_a_number_of_nodes_are_refused(tmp_path: Path, folder: Path) -> None:
    """Tree choices without a number of nodes are refused, because chains would be drafted
    silently."""
    sets = f"speculation.draft_model_path={tmp_path}", "speculation.medusa_choices=any.json"
    with pytest.raises(
        ValueError, match=r"choices: only used for trees; also set speculation\.max_tree_nodes"
    ):
        load(folder, "speculation.drafter=medusa", *sets)


def test_choices_keep_their_order_but_behind_prefixes() -> None:
    assert with_prefixes([(1,), (0, 2), (0,), (0, 2, 1)]) == ((1,), (0,), (0, 2), (0, 2, 1))
    assert parents_of([(1,), (0,), (0, 2), (0, 2, 1), (1, 1)]) == (0, 0, 2, 3, 1)


def test_calibration_is_brute_force_over_all_trees() -> None:
    """Compare with all trees of up to 6 nodes, for random shares. None is better, and each chosen
    tree contains the one before."""
    draw = random.Random(2)
    for _ in range(6):
        shares = [sorted((draw.random() for _ in range(3)), reverse=True) for _ in range(3)]
        if draw.random() < 0.5:
            shares = [row[::-1] for row in shares]
        paths = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
        likely = sorted(paths, key=lambda path: -next(path_values(shares, [path])))[:14]
        for num in range(1, 7):
            trees = (
                some
                for some in combinations(likely, num)
                if all(p[:-1] in ((), *some) for p in some)
            )
            best = max(sum(path_values(shares, [*some])) for some in trees)
            found = best_tree(shares, num)
            assert len(found) == num and found == best_tree(shares, 6)[:num]
            assert sum(path_values(shares, found)) == pytest.approx(best)
            assert with_prefixes(found) == (*found,)
