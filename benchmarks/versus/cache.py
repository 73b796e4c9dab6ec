"""Where environments, checkpoints and logs of this benchmark are kept between runs."""

from pathlib import Path

from tandem.core.user_cache import user_cache

ROOT = Path(__file__).resolve().parents[2]
"""Root of the repository. Every engine's process runs here, so that it imports this copy."""


def default_cache() -> Path:
    return user_cache() / "tandem" / "versus"
