"""The documentation site has every page, and its links lead somewhere."""

from pathlib import Path

import pytest

from tests.site import (
    ROOT,
    adapt_links,
    listed_pages,
    problems,
    problems_of_style,
    source_of,
    stage,
)


def test_the_navigation_lists_every_page_once() -> None:
    listed = listed_pages()
    assert len(listed) == len(set(listed))
    pages = {source_of(page) for page in listed}
    folders = ("docs", "benchmarks/results", "deploy")
    found = {
        str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*.md")
    }
    assert sorted(found - pages) == [], "list them under nav in zensical.toml"


def test_every_link_leads_to_a_file(tmp_path: Path) -> None:
    stage(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")} == set(
        listed_pages()
    )


def test_links_are_adapted_to_the_site() -> None:
    pages = {"docs/index.md", "docs/client.md", "deploy/README.md", "CONTRIBUTING.md"}

    def adapted(path: str, text: str) -> str:
        return adapt_links(path, text, pages)[0]

    assert adapted("docs/index.md", "[a](../deploy/README.md#x)") == "[a](deploy/README.md#x)"
    assert adapted("deploy/README.md", "[a](../docs/client.md)") == "[a](../client.md)"
    assert adapted("CONTRIBUTING.md", "[a](docs/client.md)") == "[a](client.md)"
    assert adapted("docs/index.md", "[a](../LICENSE), [b](https://x.org)") == (
        "a, [b](https://x.org)"
    )
    for text in ("`[a](gone.md)`", "```\n[a](gone.md)\n```", "[a](#below)"):
        assert adapted("docs/index.md", text) == text
    picture = "![a](concepts/request.svg)"
    assert adapt_links("docs/index.md", picture, pages) == (
        picture,
        {"docs/concepts/request.svg"},
    )
    with pytest.raises(ValueError, match=r"docs/index\.md: \[a\]\(gone\.md\) leads to docs/gone"):
        adapted("docs/index.md", "[a](gone.md)")


@pytest.mark.parametrize(
    ("html", "said"),
    [
        ('<script src="https://x.org/a.js"></script>', "loads https://x.org/a.js"),
        ('<link rel="stylesheet" href="//x.org/a.css">', "loads //x.org/a.css"),
        ('<img src="http://x.org/a.png">', "loads http://x.org/a.png"),
        ('<img src="gone.png">', "gone.png does not exist"),
        ('<pre class="mermaid">', "the widget mermaid loads code from another host"),
    ],
)
def test_what_comes_from_elsewhere_or_is_missing_is_found(
    html: str, said: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(html)
    assert problems(page, tmp_path) == [f"page.html: {said}"]


def test_own_files_and_links_to_other_hosts_are_fine(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="https://x.org"><img src="data:image/png;base64,A"><script src="page.html?x">'
        '<link rel="icon" href="/page.html">'
    )
    assert problems(page, tmp_path) == []
    sheet = tmp_path / "page.css"
    sheet.write_text("a { background: url('https://x.org/a.png') } b { background: url(b.png) }")
    assert problems_of_style(sheet) == ["page.css: loads https://x.org/a.png"]
