"""A refactoring changes no plan, no answer, and nothing that a step calls or copies."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.engines import load
from tandem.model.loaded import LoadedModel
from tests import golden
from tests.counted import KINDS, PATH, figures


@pytest.fixture(scope="module")
def loaded(small_model: Path) -> LoadedModel:
    return load(small_model, "model.kernels=native")


@pytest.mark.parametrize("name", golden.LOADS)
def test_plans_and_answers_of_scripted_loads_are_those_written_down(
    loaded: LoadedModel, name: str
) -> None:
    lines = (golden.FOLDER / f"{name}.txt").read_text().splitlines()
    assert golden.trace_of(loaded, name) == lines


def test_no_load_is_written_down_that_is_run_no_more() -> None:
    assert {path.stem for path in golden.FOLDER.iterdir()} == golden.LOADS.keys()


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_calls_allocates_and_copies_what_is_written_down(kind: str, num_drafts: int) -> None:
    """The calls, allocations and copies of a step are the recorded ones, which decide its speed. A
    commit that changes a figure gives the reason."""
    written = json.loads(PATH.read_text())
    assert figures(kind, num_drafts) == written[f"{kind}, {num_drafts} drafts"]
