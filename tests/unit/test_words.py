"""Names in each folder use only the words that docs/words.md allows there."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.sizes import ROOT, product

PAGE = ROOT / "docs/words.md"
KNOWN = {
    ("block", "kv_transfer", "BLOCK"),
    ("draft", "cluster/gateway", "num_draft_tokens"),
    ("gang", "decode_node", "gang"),
    *(("mtp", folder, "has_mtp") for folder in ("cluster", "core", "runtime")),
    ("step", "kv_transfer", "step"),
}
"""Known violations as (word, folder, name). None may be added, and one that is gone is removed."""


def rules() -> dict[str, tuple[str, ...]]:
    """Return the folders that may not use each word."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0].isalpha() and cells[0] != "word":
            assert cells[0] not in found, f"{cells[0]} stands there twice"
            found[cells[0]] = tuple(re.findall(r"`([\w/]+)`", cells[2]))
    return found


def names(tree: ast.AST) -> Iterator[str]:
    """Yield the names in the code, except ``slots`` of a dataclass, which is Python's."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="__slots__"):
                continue
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.alias(asname=str(name)) | ast.alias(name=name):
                yield name
            case ast.keyword(arg=str(name)) if name != "slots":
                yield name


@cache
def words(name: str) -> set[str]:
    """Return the parts of a name in lower case, also without the s of a plural."""
    parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}
    return parts | {part.removesuffix("s") for part in parts}


def said() -> set[tuple[str, str, str]]:
    """Return the violations in the product, in the form of KNOWN."""
    may_not = rules()
    found = set()
    for file in product():
        forbidden = [
            (word, folder)
            for word, folders in may_not.items()
            for folder in folders
            if file.startswith(f"{folder}/")
        ]
        for name in names(ast.parse((ROOT / file).read_text())):
            found |= {(word, folder, name) for word, folder in forbidden if word in words(name)}
    return found


def test_the_page_is_read() -> None:
    found = rules()
    assert {"page", "rank", "node", "gang", "life", "epoch", "seat", "latent"} <= found.keys()
    for word, folders in found.items():
        for folder in folders:
            assert (ROOT / folder).is_dir(), f"{word}: there is no folder {folder}"


def test_a_name_says_its_parts() -> None:
    assert {"num", "free", "page", "pages"} == words("num_free_pages")
    assert {"kv", "page"} <= words("KVPage") and "page" in words("MAX_PAGES")
    assert "page" not in words("pager") | words("homepage")
    tree = ast.parse(
        "import a.page as b\n@d(slots=True)\nclass Pull(x.seal): y: int = f(row=lease)"
    )
    assert set(names(tree)) == {"b", "d", "Pull", "seal", "x", "y", "int", "f", "row", "lease"}


def test_no_folder_says_another_word_that_it_may_not() -> None:
    found = said()
    assert sorted(found - KNOWN) == [], "docs/words.md says who may not say these"
    assert sorted(KNOWN - found) == [], "these are said no more: strike them"
