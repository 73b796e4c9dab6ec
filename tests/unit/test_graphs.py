"""Outputs and state of steps that run as CUDA graphs, whose outputs are invalid once the next one
runs.

A stand-in (tests/graphs.py) replaces CUDA graphs. Rows join, leave and use all sampling options.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.request import REJECTION, RELAXED, Request, Speculation
from tandem.decode_node.program import launcher
from tandem.model.loaded import LoadedModel
from tests.graphs import Graphs

DRAFTERS = {
    "none": ["speculation.drafter=none"],
    "mtp": [],
    "tree": ["speculation.max_tree_nodes=4"],
    "ngram": ["speculation.drafter=ngram"],
    "self": ["speculation.drafter=self", "speculation.draft_budget_pages=3"],
    "merged": ["speculation.drafter=ngram+mtp"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("graphs")
    tiny.write_tiny(folder, seed=21)
    return folder


@pytest.fixture
def _copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results are copied to the host as from a device, and unwritten memory holds garbage. Programs
    are captured as soon as rows need them."""
    monkeypatch.setattr("tandem.model.checkpoint.tensors._to_host", Tensor.clone)
    monkeypatch.setattr("tandem.decode_node.planning.program_table.MAX_EAGER_STEPS", 0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def asked() -> list[Request]:
    rows = [greedy(f"r{i}", [*range(5 + i, 25), *range(5, 15)], 24 + 5 * i) for i in range(5)]
    hot = replace(rows[0].sampling, temperature=0.8, top_p=0.9, seed=5)
    rows[1] = replace(rows[1], sampling=replace(hot, logprobs=0))
    rows[2] = replace(rows[2], sampling=replace(rows[2].sampling, presence_penalty=0.5, logprobs=2))
    rows[3] = replace(rows[3], sampling=hot, speculation=Speculation(2, REJECTION))
    rows[4] = replace(rows[4], speculation=Speculation(3, RELAXED, 5, 0.5))
    ends = [replace(one.sampling, ignore_eos=True) for one in rows]
    return [replace(one, sampling=end) for one, end in zip(rows, ends, strict=True)]


def told(loaded: LoadedModel, overlap: bool) -> dict[str, list[Any]]:
    """Return the output of each row. Rows join one after another, so programs of all sizes take
    turns."""
    bench = Bench(loaded, num_drafts=3, max_rows=5, overlap=overlap, buckets=(1, 2, 3, 5))
    while bench.decode.has_work():  # programs are prepared in advance
        bench.decode.step()
    for request in asked():
        bench.start(request)
        for _ in range(3):
            bench.decode.step()
    while bench.decode.has_work():
        bench.decode.step()
    bench.check_empty()
    found: dict[str, list[Any]] = {}
    for one in bench.updates():
        logprobs = one.logprobs or [None] * len(one.token_ids)
        told = zip(one.token_ids, logprobs, strict=True)
        found.setdefault(one.identity.request_id, []).extend(told)
    return found


@pytest.mark.parametrize(
    ("drafter", "overlap"),
    [
        *((drafter, True) for drafter in DRAFTERS),
        *(
            pytest.param(drafter, False, marks=() if drafter == "mtp" else pytest.mark.slow)
            for drafter in DRAFTERS
        ),
    ],
)
def test_nothing_of_a_graph_is_read_after_the_next_one(
    folder: Any, _copies: None, drafter: str, overlap: bool
) -> None:
    loaded = load(folder, "model.kernels=native", "speculation.max_depth=3", *DRAFTERS[drafter])
    graphs = Graphs()
    answers = told(replace(loaded, kernels=graphs, uncapturable={}), overlap)
    assert sum(one.num_replays for one in graphs.pool) > 20
    assert answers == told(loaded, overlap)


def test_who_reads_a_verdict_in_place_would_be_found_out(
    folder: Any, _copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(folder, "model.kernels=native", "speculation.max_depth=3")
    expected = told(loaded, True)
    monkeypatch.setattr(launcher, "download", lambda rows: rows)
    found = told(replace(loaded, kernels=Graphs(), uncapturable={}), True)
    assert found != expected
