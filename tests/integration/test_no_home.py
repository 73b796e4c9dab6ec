"""``tandem`` as a user id that has neither a home folder nor a passwd entry, as on OpenShift."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.procs import python_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
    ),
]
STRANGER = 4242424
READS = "+dac_read_search"
"""Capability to read root's files, because Python itself may lie in a folder of root's."""
GENERATE = ("generate", "x", "--max-tokens", "4")


@pytest.mark.parametrize("home", [[], ["HOME=/"]])
def test_a_cluster_of_ones_own_serves_a_user_without_a_home(home: list[str]) -> None:
    own = Path(f"/tmp/tandem-{STRANGER}")
    shutil.rmtree(own, ignore_errors=True)
    command = [
        *("setpriv", f"--reuid={STRANGER}", "--regid=0", "--clear-groups"),
        *(f"--inh-caps={READS}", f"--ambient-caps={READS}"),
        *("env", "-u", "HOME", "-u", "XDG_CACHE_HOME", *home),
        *(sys.executable, "-c", "from tandem.cluster.cli import main; main()", *GENERATE),
    ]
    env = os.environ | {"PYTHONPATH": python_path(), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=600)
    try:
        assert done.returncode == 0 and done.stdout, done.stderr
        [library] = (own / ".cache" / "tandem" / "kernels").glob("*.so")
        assert library.stat().st_uid == STRANGER
    finally:
        shutil.rmtree(own, ignore_errors=True)
