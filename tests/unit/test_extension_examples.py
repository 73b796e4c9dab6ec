"""The cost of a patch is counted, and a patch that no longer applies is reported."""

from pathlib import Path

import pytest

from tests.example_patches import Counted, apply

NEW = """\
diff --git a/new.py b/new.py
new file mode 100644
--- /dev/null
+++ b/new.py
@@ -0,0 +1,2 @@
+one = 1
+two = 2
"""
ADDED = """\
diff --git a/old.py b/old.py
--- a/old.py
+++ b/old.py
@@ -1,2 +1,3 @@
 ENTRYPOINTS = (
+    "new",
 )
"""
CHANGED = """\
diff --git a/old.py b/old.py
--- a/old.py
+++ b/old.py
@@ -1,2 +1,2 @@
-ENTRYPOINTS = (
+ENTRYPOINTS = ("new",
 )
"""


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (NEW + ADDED, Counted(("new.py",), 1, 0)),
        (NEW, Counted(("new.py",), 0, 0)),
        (CHANGED, Counted((), 1, 1)),
    ],
)
def test_new_files_and_lines_are_counted(text: str, counted: Counted, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("ENTRYPOINTS = (\n)\n")
    patch = tmp_path / "it.patch"
    patch.write_text(text)
    assert apply(patch, tmp_path) == counted
    assert (tmp_path / "new.py").exists() == bool(counted.created)
    assert ("new" in (tmp_path / "old.py").read_text()) == bool(counted.num_added)


def test_a_patch_of_what_is_no_longer_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("ROOMS = (\n)\n")
    patch = tmp_path / "it.patch"
    patch.write_text(ADDED)
    with pytest.raises(ValueError, match=r"it\.patch does not apply: .*old\.py"):
        apply(patch, tmp_path)
