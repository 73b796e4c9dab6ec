"""Generate the pages in docs/reference/ from the code.

Each page has an introduction written by hand, then ``MARKER``, then the generated part.
"""

from collections.abc import Callable
from pathlib import Path

from tests.reference.cli import describe_commands
from tests.reference.configuration import describe_configuration
from tests.reference.metrics import describe_metrics
from tests.reference.proto import describe_interface

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
MARKER = "<!-- The rest is generated from the code: run `make reference` after a change. -->"
GENERATORS: dict[str, Callable[[], str]] = {
    "cli.md": describe_commands,
    "configuration.md": describe_configuration,
    "grpc.md": describe_interface,
    "metrics.md": describe_metrics,
}


def generate_page(name: str) -> tuple[str, str]:
    """Return the committed text of a page, and the text that it should have.

    Raises:
        ValueError: The page has no marker, or several.
    """
    committed = (FOLDER / name).read_text(encoding="utf-8")
    introduction, *rest = committed.split(MARKER)
    if len(rest) != 1:
        raise ValueError(f"docs/reference/{name}: write this line once: {MARKER}")
    return committed, f"{introduction}{MARKER}\n\n{GENERATORS[name]().rstrip()}\n"
