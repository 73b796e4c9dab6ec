"""Where what can be made again is kept between runs."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Of this user, as XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
