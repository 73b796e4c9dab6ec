"""Each folder uses only the words it may use, so that it cannot depend on what it has no word for.

A name uses a word that is one of its parts: ``num_free_pages`` uses "page". docs/words.md defines
the words.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.sizes import PRODUCT, ROOT, product

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "answer": ("model", "decode_node", "runtime"),
    "attempt": ("cluster/client", "cluster/entrypoints", "cluster/control", "model", "runtime"),
    "block": ("cluster", "core", "decode_node", "kv_transfer", "prefill_node", "runtime"),
    "bucket": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/control",
        "kv_transfer",
        "model",
        "prefill_node",
        "runtime",
    ),
    "draft": ("cluster/gateway", "kv_transfer", "runtime/gang"),
    "drafter": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/control",
        "kv_transfer",
        "runtime/gang",
    ),
    "epoch": ("cluster/client", "cluster/entrypoints", "model"),
    "expert": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/gateway",
        "kv_transfer",
        "prefill_node",
        "decode_node",
    ),
    "gang": (
        "cluster/client",
        "cluster/entrypoints",
        "kv_transfer",
        "model",
        "prefill_node",
        "decode_node",
    ),
    "grant": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/control",
        "core",
        "kv_transfer",
        "model",
        "prefill_node",
        "runtime",
    ),
    "heartbeat": ("cluster/client", "cluster/entrypoints", "kv_transfer", "model"),
    "hidden": ("cluster",),
    "latent": ("cluster", "core", "decode_node", "kv_transfer", "prefill_node", "runtime"),
    "lease": ("cluster/client", "cluster/entrypoints", "model", "runtime"),
    "membership": (
        "cluster/client",
        "cluster/entrypoints",
        "kv_transfer",
        "model",
        "prefill_node",
        "decode_node",
        "runtime",
    ),
    "mtp": ("cluster", "core", "kv_transfer", "prefill_node", "decode_node", "runtime"),
    "node": ("kv_transfer", "runtime", "prefill_node"),
    "offer": ("cluster/client", "cluster/entrypoints", "core", "model", "runtime"),
    "page": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/gateway",
        "cluster/control",
        "model/sampling/acceptance",
        "model/network/dispatch",
        "runtime/gang",
    ),
    "proof": ("kv_transfer", "model", "prefill_node", "decode_node", "runtime"),
    "proposal": ("cluster", "core", "kv_transfer", "model", "prefill_node"),
    "pull": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/gateway",
        "core",
        "model",
        "prefill_node",
        "runtime",
    ),
    "rank": ("cluster/client", "cluster/entrypoints", "src/tandem"),
    "request": ("kv_transfer", "runtime"),
    "row": ("cluster/client",),
    "seal": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/gateway",
        "core",
        "model",
        "runtime",
    ),
    "session": ("cluster/client", "cluster/entrypoints", "kv_transfer", "model", "prefill_node"),
    "slot": (
        "cluster/client",
        "cluster/entrypoints",
        "cluster/gateway",
        "model/sampling/acceptance",
        "runtime",
    ),
    "staging": ("cluster", "decode_node", "model", "prefill_node", "runtime"),
    "step": ("cluster/client", "kv_transfer"),
    "suspect": ("cluster/client", "cluster/entrypoints", "kv_transfer", "model", "runtime"),
}
"""Folders whose names may not use a word."""

RETIRED = ("beat", "company", "house", "life", "seat", "verdict")
"""Words that no name may use. Each had two meanings, or the field has a word of its own."""

KNOWN = {
    ("block", "kv_transfer", "BLOCK"),
    ("draft", "cluster/gateway", "num_draft_tokens"),
    ("gang", "decode_node", "gang"),
    *(("mtp", folder, "has_mtp") for folder in ("cluster", "core", "runtime")),
    ("step", "kv_transfer", "step"),
}
"""(word, folder, name) of the names that break a rule. None may be added. A name that is gone is
removed from the set."""


def rules() -> dict[str, tuple[str, ...]]:
    """Return the folders that may not use each word."""
    return FORBIDDEN | dict.fromkeys(RETIRED, PRODUCT)


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
    """Return the parts of a name in lower case, each also without the s of a plural."""
    parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}
    return parts | {part.removesuffix("s") for part in parts}


def broken() -> set[tuple[str, str, str]]:
    """Return the names of the product that break a rule, as in KNOWN."""
    found = set()
    for file in product():
        forbidden = [
            (word, folder)
            for word, folders in rules().items()
            for folder in folders
            if file.startswith(f"{folder}/")
        ]
        for name in names(ast.parse((ROOT / file).read_text())):
            found |= {(word, folder, name) for word, folder in forbidden if word in words(name)}
    return found


def test_each_rule_is_about_folders_that_exist() -> None:
    for word, folders in rules().items():
        assert folders, word
        for folder in folders:
            assert (ROOT / folder).is_dir(), f"{word}: there is no folder {folder}"


def test_the_glossary_defines_each_word_that_has_a_rule() -> None:
    page = (ROOT / "docs/words.md").read_text().lower()
    missing = [word for word in FORBIDDEN if not re.search(rf"^\| [^|]*\b{word}\b", page, re.M)]
    assert not missing


def test_a_name_uses_its_parts() -> None:
    assert {"num", "free", "page", "pages"} == words("num_free_pages")
    assert {"kv", "page"} <= words("KVPage") and "page" in words("MAX_PAGES")
    assert "page" not in words("pager") | words("homepage")
    tree = ast.parse(
        "import a.page as b\n@d(slots=True)\nclass Pull(x.seal): y: int = f(row=lease)"
    )
    assert set(names(tree)) == {"b", "d", "Pull", "seal", "x", "y", "int", "f", "row", "lease"}


def test_no_folder_uses_a_word_that_it_may_not() -> None:
    found = broken()
    assert sorted(found - KNOWN) == [], "FORBIDDEN and RETIRED say which folders may use a word"
    assert sorted(KNOWN - found) == [], "these names are gone: remove them from KNOWN"
