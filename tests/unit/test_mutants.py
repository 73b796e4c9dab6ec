"""Every mutant of the list applies to the tree, and the runner reports which ones were caught."""

from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, read, try_all

CODE = "def double(number):\n    return 2 * number\n"
TESTS = """
from code_under_test import double

def test_two():
    assert double(2) == 4

def test_three():
    assert double(3) == 6
"""


def mutant(name: str, before: str, after: str, test: str) -> Mutant:
    return Mutant(name, "code_under_test.py", before, after, "sums", f"test_it.py::{test}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


@pytest.mark.parametrize("one", read(), ids=lambda one: one.name)
def test_each_can_still_be_made(one: Mutant) -> None:
    one.check(ROOT)


def test_who_changes_what_no_test_says_is_missed(tree: Path, capsys: pytest.CaptureFixture) -> None:
    square = mutant("square", "2 * number", "number * number", "test_three")
    equal_at_two = mutant("equal at two", "2 * number", "number * number", "test_two")
    assert try_all([square, equal_at_two], tree) == [equal_at_two]
    caught, failure, missed, breaks = capsys.readouterr().out.splitlines()
    assert caught.startswith("caught  square") and "assert 9 == 6" in failure
    assert missed.startswith("MISSED  equal at two") and breaks.strip() == "sums"
    assert (tree / "code_under_test.py").read_text() == CODE


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (mutant("a", "3 * number", "4", "test_two"), "has 0 times '3 . number', not once"),
        (mutant("b", "number", "4", "test_two"), "has 2 times"),
        (mutant("c", "2 * number", "4", "test_four"), "there is no test_it.py::test_four"),
    ],
    ids=["not there", "there twice", "no such test"],
)
def test_what_cannot_be_made_is_refused(tree: Path, wrong: Mutant, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        try_all([wrong], tree)


def test_nothing_is_caught_by_a_test_that_fails_anyway(tree: Path) -> None:
    (tree / "test_it.py").write_text(TESTS + "    assert False\n")
    with pytest.raises(ValueError, match="fail without a mutant"):
        try_all([mutant("square", "2 * number", "number * number", "test_three")], tree)
