"""Every path that docs/structure.md names exists, and the page names every file of the spine."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tandem.model.drafters import CHAIN_DRAFTERS, NONE
from tests.sizes import PRODUCT, ROOT, SPINE, names, product

PAGE = ROOT / "docs/structure.md"
FOLDERS = *PRODUCT, "benchmarks", "deploy", "docs", "tests", "training"
_NAMED = re.compile(r"[`(]([\w./-]+(?:/|\.(?:py|md|cpp|toml|json)))(?:: [\w, ]+)?[`)]")


def paths() -> set[str]:
    """Return every file and, with a trailing slash, every folder."""
    found = set()
    for folder in FOLDERS:
        inside = [path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
        for path in (ROOT / folder, *inside):
            found.add(f"{path.relative_to(ROOT)}{'/' * path.is_dir()}")
    return found


def paragraphs(text: str) -> list[str]:
    """Split a page into paragraphs. Rows of a table and items of a list are separate."""
    return re.split(r"\n\n|\n(?=\d+\. |- |\|)", text)


def meant(paragraph: str, there: set[str]) -> Iterator[str]:
    """Yield the paths that a paragraph names.

    A name is a whole path, or the end of a path next to or below the one named last. It may also be
    an end that only one path has. Raises ValueError for any other name.
    """
    near: list[PurePosixPath] = [PurePosixPath("docs")]
    for name in _NAMED.findall(paragraph):
        beside = (f"{folder}/{name}" for folder in reversed(near))
        ends = [path for path in there if f"/{path}".endswith(f"/{name}")]
        path = next((path for path in (name, *beside) if path in there), None)
        if path is None and len(ends) != 1:
            raise ValueError(f"{name}: {sorted(ends)} could be meant, after {near[-1]}")
        path = path or ends[0]
        yield path
        whole = PurePosixPath(path)
        near += [whole.parent, whole] if path.endswith("/") else [whole.parent]


def named(text: str, there: set[str]) -> set[str]:
    return {path for part in paragraphs(text) for path in meant(part, there)}


def test_every_file_that_is_named_is_there() -> None:
    text = PAGE.read_text()
    assert len(_NAMED.findall(text)) > 100
    named(text, paths())


def test_every_file_of_the_spine_is_named() -> None:
    missing = names(SPINE) - named(PAGE.read_text(), paths())
    assert not missing, f"{PAGE.name} does not name {sorted(missing)}"


def test_a_name_is_looked_for_near_the_last_one() -> None:
    there = {"a/", "a/one.py", "a/two.py", "b/", "b/two.py", "b/c/", "b/c/three.py", "docs/x.md"}
    assert named("`a/one.py`, `two.py: f, g`", there) == {"a/one.py", "a/two.py"}
    assert named("`b/` has `two.py` and `c/`: `three.py`", there) == {
        *("b/", "b/two.py", "b/c/", "b/c/three.py")
    }
    assert named("`three.py` [x](x.md)", there) == {"b/c/three.py", "docs/x.md"}
    for text in ("`two.py`", "`a/one.py`\n\n`two.py`", "`gone.py`", "`a/one.py`, `c/gone/`"):
        with pytest.raises(ValueError, match="could be meant"):
            named(text, there)


def test_nobody_but_the_table_of_drafters_asks_for_one_by_name() -> None:
    """Code does not compare, match or look up a drafter's name. Differences belong in the
    drafter."""
    kinds = {*CHAIN_DRAFTERS, NONE}
    found = []
    for file in product():
        if file == "model/drafters/__init__.py":
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Compare | ast.Match | ast.If | ast.IfExp):
                tested = node if isinstance(node, ast.Compare | ast.Match) else node.test
                told = ast.unparse(tested)
                texts = {one.value for one in ast.walk(tested) if isinstance(one, ast.Constant)}
                if "drafter" in told and (texts & kinds or ".name" in told):
                    found.append(f"{file}:{node.lineno}: {told}")
    assert not found
