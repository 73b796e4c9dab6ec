"""Build the documentation site, or only check its pages.

    python -m tests.site [--check]

Pages are written for a reader of the repository: a link may point to any file. The site holds the
pages that ``zensical.toml`` lists, so they are copied first and their links are adapted. Zensical
then builds the copy with ``--strict``. The built pages must not load anything from another host.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "zensical.toml"
STAGED = ROOT / "build" / "site-pages"
"""Copy of the pages. ``zensical.toml`` names this folder, and ``BUILT``."""
BUILT = ROOT / "build" / "site"
_LINK = re.compile(r"(?P<is_image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_ASSETS = {".png", ".svg", ".json", ".jsonl"}
_LOADING = {
    **dict.fromkeys(("script", "img", "iframe", "source", "video", "audio", "embed"), "src"),
    "object": "data",
    "link": "href",
}
"""Attribute by which each HTML element loads a file."""
_WIDGETS = ("mermaid", "glightbox", "pyodide")
"""Names of widgets for which Zensical's script loads code from another host."""


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site: ``docs/`` is its root."""
    return path.removeprefix("docs/")


def listed_pages(config: Path = CONFIG) -> list[str]:
    """Return the site paths of the pages in the navigation, in its order."""
    return list(_leaves(tomllib.loads(config.read_text(encoding="utf-8"))["project"]["nav"]))


def _leaves(nav: Any) -> Iterator[str]:
    match nav:
        case str():
            yield nav
        case list() | dict():
            for inner in nav.values() if isinstance(nav, dict) else nav:
                yield from _leaves(inner)


def source_of(page: str) -> str:
    """Return the file of the repository that a page of the site is made from.

    Raises:
        ValueError: There is no such file.
    """
    for path in (f"docs/{page}", page):
        if (ROOT / path).is_file():
            return path
    raise ValueError(f"zensical.toml: nav lists {page}, but there is no such file")


def adapt_links(path: str, text: str, pages: set[str]) -> tuple[str, set[str]]:
    """Adapt the links of a page to the site, and find the files that it shows.

    Links to source files and to pages outside the navigation become plain text.

    Args:
        path: The page's file in the repository.
        text: The page.
        pages: Files in the repository of all pages of the site.

    Returns:
        The adapted text, and the images and data files that it links to.

    Raises:
        ValueError: A link's file does not exist.
    """
    assets = set[str]()
    spans = [match.span() for match in _CODE.finditer(text)]

    def adapt(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        is_in_code = any(start < match.start() < end for start, end in spans)
        if is_in_code or not target or re.match(r"\w+:", target):
            return match[0]
        file = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if not (ROOT / file).exists():
            raise ValueError(f"{path}: {match[0]} leads to {file}, which does not exist")
        if file not in pages and Path(file).suffix not in _ASSETS:
            return match["text"]
        if file not in pages:
            assets.add(file)
        relative = os.path.relpath(site_path(file), os.path.dirname(site_path(path)) or ".")
        end = f"#{anchor}" if anchor else ""
        return f"{match['is_image']}[{match['text']}]({relative}{end})"

    return _LINK.sub(adapt, text), assets


def stage(folder: Path) -> None:
    """Write the site's pages and the files that they show to ``folder``, which is emptied first.

    Raises:
        ValueError: A page or the file of a link does not exist.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages = {source_of(page) for page in listed_pages()}
    assets = set[str]()
    for path in pages:
        text, shown = adapt_links(path, (ROOT / path).read_text(encoding="utf-8"), pages)
        assets |= shown
        target = folder / site_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for path in assets:
        target = folder / site_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target)


class _Loads(HTMLParser):
    """Collect what a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        name = _LOADING.get(tag, "")
        if (address := named.get(name)) is not None:
            self.found.append(address)
        self.found += [name for name in _WIDGETS if name in (named.get("class") or "").split()]


def problems(page: Path, root: Path) -> list[str]:
    """Return what a built page loads from another host, and local files that are missing.

    Args:
        page: The page.
        root: Folder of the site, for addresses that begin with a slash.
    """
    reader = _Loads()
    reader.feed(page.read_text(encoding="utf-8"))
    found = []
    for address in reader.found:
        path = re.split("[?#]", address)[0]
        file = root / path.lstrip("/") if path.startswith("/") else page.parent / path
        if address in _WIDGETS:
            found.append(f"{page.name}: the widget {address} loads code from another host")
        elif re.match(r"(?!data:)\w+:|//", address):
            found.append(f"{page.name}: loads {address}")
        elif not address.startswith("data:") and not file.exists():
            found.append(f"{page.name}: {address} does not exist")
    return found


def problems_of_style(sheet: Path) -> list[str]:
    """Return what a style sheet loads from another host."""
    text = sheet.read_text(encoding="utf-8")
    addresses = re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", text)
    return [f"{sheet.name}: loads {address}" for address in addresses]


def build() -> int:
    """Build the site, and return the exit code."""
    stage(STAGED)
    shutil.rmtree(BUILT, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run([*command, "--config-file", str(CONFIG)], cwd=ROOT)
    if built.returncode:
        return built.returncode
    found = [text for page in BUILT.rglob("*.html") for text in problems(page, BUILT)]
    found += [text for sheet in BUILT.rglob("*.css") for text in problems_of_style(sheet)]
    print("\n".join(found) or f"the site is in {BUILT.relative_to(ROOT)}/")
    return bool(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.site", description=__doc__)
    parser.add_argument("--check", action="store_true", help="copy and check the pages only")
    if not parser.parse_args().check:
        return build()
    stage(STAGED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
