"""Finds the best tree of drafts for Medusa heads: python -m training.calibrate.

It measures on held-out text how often each of a head's most likely tokens is the main model's
choice. The best tree of 63 drafts, or of --num-nodes, is written as ``choices.json`` to the folder
of the heads. Its first n paths are the best tree of n drafts. The value of a path is the product of
its shares (Medusa, arXiv 2401.10774, appendix on sparse trees).
"""

import argparse
import json
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.engines import load
from tandem.core.draft_shapes import MAX_NODES
from tandem.model.drafters.choices import Choice
from tandem.model.drafters.medusa import CHOICES_FILE, MedusaDrafter
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Segment, pack_segments
from training.evaluate import held_out_windows

NUM_CANDIDATES = 10
PAGE_SIZE = 64


def best_tree(shares: list[list[float]], num_nodes: int) -> list[Choice]:
    """Return the ``num_nodes`` paths with the largest values, in descending order.

    A path is never worth more than its prefix, so prefixes come first and the paths form a tree.
    No other tree of ``num_nodes`` paths has a larger sum.

    Args:
        shares: ``shares[d][r]`` is how often the token of rank r of head d is right.
        num_nodes: Number of paths.
    """
    heap: list[tuple[float, Choice]] = []
    found: list[Choice] = []

    def offer(value: float, path: Choice) -> None:
        if len(path) < len(shares):
            for rank, share in enumerate(shares[len(path)]):
                heappush(heap, (-value * share, (*path, rank)))

    offer(1.0, ())
    while heap and len(found) < num_nodes:
        value, path = heappop(heap)
        found.append(path)
        offer(-value, path)
    return found


def path_values(shares: list[list[float]], paths: list[Choice]) -> Iterator[float]:
    """Yield the value of each path, assuming that the ranks of a path are independent."""
    for path in paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= shares[depth][rank]
        yield value


@torch.inference_mode()
def rank_shares(loaded: LoadedModel, windows: Tensor) -> list[list[float]]:
    """Return how often each rank of each head is the main model's most likely token."""
    drafter, network = loaded.drafter, loaded.network
    assert isinstance(drafter, MedusaDrafter), "speculation.drafter=medusa is loaded"
    num_pages = -(-windows.shape[1] // PAGE_SIZE)
    caches = loaded.allocate_caches(num_pages + 1, PAGE_SIZE)
    right, num = torch.zeros(len(drafter.heads), NUM_CANDIDATES), 0
    for window in tqdm(windows.tolist(), desc="held-out text"):
        segment = Segment(window, 0, list(range(1, num_pages + 1)))
        [hidden_TD] = network(pack_segments([segment], PAGE_SIZE, loaded.device), caches)
        best_T = network.logits(hidden_TD).argmax(1)
        num += len(best_T) - len(right)
        for depth, head in enumerate(drafter.heads):
            tokens_TK = head(hidden_TD).topk(NUM_CANDIDATES).indices
            ahead = depth + 1
            is_right_TK = tokens_TK[:-ahead] == best_T[ahead:].unsqueeze(1)
            right[depth] += is_right_TK[: len(best_T) - len(right)].sum(0)
    return [[value / num for value in row] for row in right.tolist()]


def format_table(shares: list[list[float]], paths: list[Choice]) -> Table:
    values = list(path_values(shares, paths))
    table = Table(title="share of places at which a head's k-th likeliest token is right")
    for column in ("head", *map(str, range(1, NUM_CANDIDATES + 1))):
        table.add_column(column)
    for depth, row in enumerate(shares, start=1):
        table.add_row(str(depth), *(f"{share:.2f}" for share in row))
    sums = ", ".join(f"{n} nodes {1 + sum(values[:n]):.2f}" for n in (3, 7, 15, 31, len(paths)))
    table.caption = f"expected tokens a step: {sums}"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    here = Path(__file__).parent
    add = parser.add_argument
    add("--checkpoint", type=Path, default=here / "tiny-v3", help="folder of the main model")
    add("--heads", type=Path, default=here / "tiny-v3-medusa", help="folder of the heads")
    add("--num-nodes", type=int, default=MAX_NODES)
    add("--windows", type=int, default=100, help="pieces of held-out text")
    add("--length", type=int, default=512, help="tokens of each")
    args = parser.parse_args()
    sets = (
        "speculation.drafter=medusa",
        f"speculation.draft_model_path={args.heads}",
        "decode.num_threads=2",
    )
    loaded = load(args.checkpoint, *sets)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    shares = rank_shares(loaded, held_out_windows(tokenizer, args.length, args.windows))
    paths = best_tree(shares, args.num_nodes)
    Console().print(format_table(shares, paths))
    (args.heads / CHOICES_FILE).write_text(json.dumps(paths) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
