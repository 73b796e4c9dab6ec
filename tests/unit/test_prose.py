"""The rules of tests/prose.py find the faults that they describe, and nothing else."""

import json

import pytest

from tests.prose import ALLOWED, check, counts, findings, packed, part_of, texts_of, tracked

CLEAN = '''"""Move pages between two ranks."""

SLACK_S = 1.0
"""Seconds added to a timeout, so that the peer's error arrives first."""


def copy(page: int) -> None:
    """Copy ``page``.

    Raises:
        ValueError: The page is not allocated.
    """
    # A page that is being sent must not be freed.
    raise ValueError(f"page={page}: is not allocated; allocate it first")
'''
GONE = "core/" + "gone.py"
SECTION = "spec " + "\u00a73"


def found_in(source: str, path: str = "core/x.py") -> list[tuple[str, str]]:
    return [(one.rule, one.what) for text in texts_of(path, source) for one in findings(text)]


def test_plain_prose_has_no_finding() -> None:
    assert found_in(CLEAN) == []
    kinds = [text.kind for text in texts_of("core/x.py", CLEAN)]
    assert sorted(kinds) == ["comment", "docstring", "docstring", "field", "message"]


@pytest.mark.parametrize(
    ("text", "rule", "what"),
    [
        ("Of all ranks.", "opener", "Of"),
        ("What suits all ranks.", "opener", "What"),
        ("Planners" + " told it.", "word", "told"),
        ("All but" + " for one.", "word", "but for"),
        ("Wait so" + " long.", "word", "so long"),
        ("Send it, what" + " is left.", "headless", ", what is"),
        (f"Bounds of {SECTION}.", "reference", SECTION[:-1]),
        (f"See {GONE}.", "reference", GONE),
        (f"Move {'a ' * 30} page.", "long", ""),
    ],
)
def test_a_rule_finds_its_habit(text: str, rule: str, what: str) -> None:
    for source in (f'"""{text}"""\n', f"x = 1\n# {text}\n"):
        [(name, words)] = found_in(source)
        assert name == rule and words.startswith(what or words)


def test_names_links_and_paths_are_no_prose() -> None:
    assert found_in('"""Read ``told`` and `asked` of core/request.py."""\n') == []
    assert found_in("A [who" + " asked](x.md) page.\n\n    told\n", "docs/x.md") == []
    assert found_in("```\ntold\n```\n", "docs/x.md") == []
    words = found_in("Nobody" + " told it.\n", "docs/x.md")
    assert words == [("word", "nobody"), ("word", "told")]


def test_packed_assignments_are_found_and_pairs_are_not() -> None:
    def rules(line: str) -> list[str]:
        return [one.rule for one in packed("core/x.py", line)]

    assert rules("a, b = 1, 2") == ["packed"]
    assert rules("lo, hi = 1, 2") == rules("a, b = b, a") == rules("a, b = pair") == []
    assert rules("cos_R, sin_R = 1, 2") == []


def test_no_part_has_more_findings_than_before() -> None:
    found, num_texts, _ = check(tracked([]))
    assert num_texts > 2000
    allowed = json.loads(ALLOWED.read_text())
    for part, today in counts(found).items():
        for rule, num in today.items():
            assert num <= allowed[part].get(rule, 0), f"{part}: {num} findings of {rule}"
    assert {part_of(name) for name in ("core/x.py", "README.md", "tests/x.py")} == {
        *("product", "docs", "tests")
    }
