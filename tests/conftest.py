"""Fixtures of all tests, and one thread for each process when files run in parallel."""

import os
import sys
from pathlib import Path

import pytest

# If this were not set, Ray would start a cluster inside a test process that has not joined one.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Seed PyTorch before each test, so that a bound holds in every run or in none."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint of tests.small, which is imported here because its import takes
    seconds."""
    from tests.small import write_small

    folder = tmp_path_factory.mktemp("small")
    write_small(folder)
    return folder
