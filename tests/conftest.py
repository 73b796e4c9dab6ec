"""Files of tests run beside each other: one thread each, or they get in each other's way."""

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See tests.small, which takes seconds to import."""
    from tests.small import write_small

    folder = tmp_path_factory.mktemp("small")
    write_small(folder)
    return folder
