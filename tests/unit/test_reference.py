"""The committed pages in docs/reference/ are those that the code generates."""

from pathlib import Path
from typing import Literal

import pytest

from tests.reference import FOLDER, GENERATORS, MARKER, generate_page
from tests.reference.values import bounds, prose, values


@pytest.mark.parametrize("name", GENERATORS)
def test_a_page_is_up_to_date(name: str) -> None:
    committed, generated = generate_page(name)
    assert committed == generated, "run make reference and commit the page"


def test_every_page_of_the_folder_is_generated() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == set(GENERATORS)


@pytest.mark.parametrize("marker", ["", f"{MARKER}\n{MARKER}"])
def test_a_page_has_one_marker(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.reference.FOLDER", tmp_path)
    (tmp_path / "cli.md").write_text(f"# Command line\n{marker}\n")
    with pytest.raises(ValueError, match=r"cli\.md: write this line once"):
        generate_page("cli.md")


def test_values_are_described_in_words() -> None:
    assert values(Literal["auto", "cpu"]) == "`auto`, `cpu`"
    assert values(int | None) == "integer or `null`"
    assert values(tuple[int, ...] | None) == "list of integer or `null`"
    assert values(tuple[str, str]) == "list of 2 x text"
    assert values(Literal["auto"] | bool) == "`auto`, `true`, `false`"


def test_bounds_are_described_in_words() -> None:
    assert bounds(1, 4096) == "1 to 4,096"
    assert bounds(0.001, None) == "at least 0.001"
    assert bounds(None, 60, above=0) == "above 0, at most 60"
    assert bounds(None, None) == ""


def test_plain_text_is_escaped_and_code_is_not() -> None:
    assert prose("a | b *c* <think>\n  and `d|e*`") == r"a \| b \*c\* &lt;think> and `d|e*`"
