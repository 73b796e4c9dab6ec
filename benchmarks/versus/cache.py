"""Where environments, checkpoints and logs of this benchmark are kept between runs."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the repository: every engine's process runs here, so that it imports this copy."""


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "versus"
