"""Every row of the table of failures names the tests that check it."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / "docs" / "failures.md"


def test_every_row_names_tests_that_there_are() -> None:
    there = {
        name
        for path in TESTS.glob("*/test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    head, *_ = DOC.read_text().split("\n## ")
    rows = [line for line in head.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split(" | ")[-1])
        assert named, f"no test holds {row}"
        assert not (missing := set(named) - there), f"{missing} of {row}"
