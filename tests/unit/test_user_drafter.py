"""User-defined drafters: a few lines of Python are enough, and their errors cost only drafts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engines import Bench, load
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL
from tandem.core.draft_shapes import MAX_NODES, MAX_TREE_SHAPES, chain_shapes, dynamic_tree_shapes
from tandem.core.request import Request
from tandem.decode_node.planning.buckets import resolve_buckets
from tandem.decode_node.planning.program_table import MAX_PROGRAMS, common_step_keys
from tandem.model.drafters.mtp_rows import MtpCatchUp
from tandem.model.drafters.user import MAX_FAILURES_IN_ROW, UserClass, UserDrafter, check_drafts
from tandem.model.loaded import LoadedModel
from tests import user_drafters
from tests.unit.test_trees import answers, everything


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    return load(TINY_MODEL, "speculation.drafter=none")


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return everything(held_out(6, 60, 90, seed=3))


@pytest.fixture(scope="module")
def expected(plain: LoadedModel, asked: list[Request]) -> list:
    return answers(plain, asked, num_drafts=0)[0]


def with_user(plain: LoadedModel, theirs: UserClass, **more: Any) -> LoadedModel:
    options = {"num_nodes": None, "vocab_size": plain.config.vocab_size, "timeout_s": 30.0} | more
    return replace(plain, drafter=UserDrafter(theirs, **options))


def accepted(bench: Bench) -> int:
    return sum(one.counts.num_accepted for one in bench.updates() if one.counts is not None)


@pytest.mark.parametrize(
    ("name", "num_nodes", "overlap"),
    [
        *(("Repeats", None, False), ("Branches", 12, True)),
        pytest.param("Repeats", None, True, marks=pytest.mark.slow),
        pytest.param("Branches", 12, False, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_drafts(
    asked: list[Request], expected: list, overlap: bool, name: str, num_nodes: int | None
) -> None:
    """Covers chains and trees. The option names the class by its path."""
    drafter = f"speculation.drafter=tests.user_drafters:{name}"
    trees = f"speculation.max_tree_nodes={num_nodes or 'null'}"
    loaded = load(TINY_MODEL, drafter, trees, "speculation.drafter_timeout_s=60")
    told, bench = answers(loaded, asked, overlap=overlap)
    assert told == expected and loaded.drafter.status_note == ""
    assert accepted(bench) > 40


def test_its_text_is_its_own(plain: LoadedModel, asked: list[Request], expected: list) -> None:
    told, bench = answers(with_user(plain, user_drafters.Vandal()), asked)
    _, kind = answers(with_user(plain, user_drafters.Repeats()), asked)
    assert told == expected and accepted(bench) == accepted(kind) > 0


def test_lies_cost_the_drafts_of_their_rows(
    plain: LoadedModel, asked: list[Request], expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid results cost only the drafts of their rows, although the drafter keeps being
    called."""
    monkeypatch.setattr("tandem.model.drafters.user.MAX_FAILURES_IN_ROW", 10**6)
    hostile = user_drafters.Hostile()
    loaded = with_user(plain, hostile)
    told, bench = answers(loaded, asked)
    assert told == expected and accepted(bench) > 20
    assert isinstance(loaded.drafter, UserDrafter)
    assert loaded.drafter.num_failures == hostile.num_calls // 3
    assert loaded.drafter.status_note in bench.decode.programs.exec_mode_status


def test_one_that_hangs_holds_a_step_for_its_bound_and_is_off_after_three(
    plain: LoadedModel, asked: list[Request], expected: list
) -> None:
    """A drafter that hangs delays a step by its timeout, and is off after three failures. It is not
    called while it hangs, and its late result is ignored."""
    theirs = user_drafters.Hangs()
    # time: the bound is what is tested
    loaded = with_user(plain, theirs, timeout_s=0.01)
    told, bench = answers(loaded, asked)
    assert told == expected and theirs.num_calls == 1 and accepted(bench) == 0
    assert bench.decode.programs.exec_mode_status.endswith(
        "Hangs failed 3 times and is switched off: "
        "TimeoutError('draft() has not returned within 0.01 s')"
    )
    theirs.let_go.set()
    told, bench = answers(loaded, asked)
    assert told == expected and accepted(bench) == 0


def test_one_that_fails_again_and_again_is_called_no_more(
    plain: LoadedModel, asked: list[Request], expected: list, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = with_user(plain, user_drafters.Broken())
    told, _ = answers(loaded, asked)
    assert told == expected
    assert caplog.text.count("is switched off: RuntimeError('no idea')") == 1
    assert isinstance(loaded.drafter, UserDrafter)
    assert loaded.drafter.num_failures == MAX_FAILURES_IN_ROW * len(asked)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1.5], "ints"),
        ([True], "ints"),
        ([1, 2, 3, 4], "use at most 3"),
        (([1, 2], [0]), "2 tokens, 1 parents"),
        ([-1], "-1 is not a token id; use 0 to 9"),
        ([10], "10 is not a token id"),
        (([1, 2], [0, 2]), "2 is not the number of an earlier node"),
        (([1, 2], [0, -1]), "-1 is not the number of an earlier node"),
        (([1, 2], [0, 0]), "set speculation.max_tree_nodes"),
    ],
)
def test_what_is_wrong_is_said(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_drafts(given, chain_shapes(3)[3], 10)
    assert check_drafts([1, 2], chain_shapes(3)[3], 10) == ([1, 2], [0, 1])
    assert check_drafts(([1, 2], [0, 0]), dynamic_tree_shapes(8, 3)[-1], 10) == ([1, 2], [0, 0])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NoClass", "has no attribute 'NoClass'"),
        ("Undrafting", "has no attribute 'draft'"),
        ("some_function", "__mro__"),
        ("WithArguments", "cannot be created without arguments: TypeError"),
    ],
)
def test_a_class_that_cannot_be_had_is_refused_with_what_it_said(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"speculation\.drafter.*{name}.*{told}"):
        load(TINY_MODEL, f"speculation.drafter=tests.user_drafters:{name}")


def test_a_module_that_raises_is_refused_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_as_it_is_imported.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded .ZeroDivisionError.*use auto"):
        load(TINY_MODEL, "speculation.drafter=raises_as_it_is_imported:Drafter")


@pytest.mark.parametrize("drafter", ["ngram"])
def test_trees_of_who_drafts_chains_are_refused(drafter: str) -> None:
    sets = f"speculation.drafter={drafter}", "speculation.max_tree_nodes=12"
    with pytest.raises(
        ValueError,
        match=rf"max_tree_nodes=12: {drafter} drafts chains, .*set max_tree_nodes to null",
    ):
        load(TINY_MODEL, *sets)


@pytest.mark.parametrize("most_rows", [16, 64, 256])
def test_programs_of_all_sizes_and_levels_of_trees_are_kept_on_devices(most_rows: int) -> None:
    sizes = resolve_buckets(None, most_rows, "cuda")
    assert (
        len(common_step_keys(sizes, dynamic_tree_shapes(MAX_NODES, 8), MtpCatchUp(8)))
        <= MAX_PROGRAMS
    )


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 9, MAX_NODES])
def test_trees_have_few_levels_each_a_part_of_the_next(num_nodes: int) -> None:
    nothing, *levels = dynamic_tree_shapes(num_nodes, 4)
    assert nothing == chain_shapes(0)[0] and len(levels) <= MAX_TREE_SHAPES
    sizes = [level.num_nodes for level in levels]
    assert sizes == sorted(set(sizes)) and sizes[-1] == num_nodes and sizes[0] >= 1
    assert all(level.depth == min(4, level.num_nodes) for level in levels)
