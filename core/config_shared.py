"""Configuration shared between processes: parsing, digest and differences."""

import hashlib
import json
from operator import attrgetter

from tandem.core.config import TandemConfig, iter_keys, validate_config


def parse_shared_config(config_json: str) -> TandemConfig:
    """Parse a config that another Tandem process has already validated.

    Raises ValueError if that process runs another release of Tandem.
    """
    try:
        return validate_config(json.loads(config_json))
    except ValueError as error:
        raise ValueError(
            f"config: comes from another release of Tandem ({error}); a Ray cluster can run only "
            "one release: stop the running cluster with `tandem stop`, or use another Ray cluster"
        ) from error


def shared_digest(config: TandemConfig) -> str:
    """Return a digest of all keys that gateways of one cluster share."""
    values = [(key, str(attrgetter(key)(config))) for key in _shared_keys()]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def config_differences(mine: TandemConfig, other: TandemConfig) -> list[str]:
    """Describe each shared key whose two values differ. Each description has both values."""
    values_by_key = ((key, attrgetter(key)(mine), attrgetter(key)(other)) for key in _shared_keys())
    return [f"{key} is {b!r}, but {a!r} in the cluster" for key, a, b in values_by_key if a != b]


def _shared_keys() -> list[str]:
    return [key for key, _ in iter_keys() if not key.startswith("server.")]
