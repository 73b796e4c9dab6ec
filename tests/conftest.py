"""Files of tests run beside each other: one thread each, or they get in each other's way."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
