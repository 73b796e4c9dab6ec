"""Error bounds of numerical tests, and a run of them with every instruction set of this machine.

A bound follows from the computation: the number of roundings behind a result, and the size of the
rounded numbers. Roundings are nearly independent, so the error of n of them grows like sqrt(n), not
like n (Higham and Mary, https://doi.org/10.1137/18M1226312).

``python -m tests.numerics [--write]`` runs the tests of FILES once for each instruction set of this
processor. PyTorch's kernels and ours are both restricted to it. The largest error of each test is
printed as a share of its bound.

No bound may exceed MAX_SLACK times the largest error seen on any processor. ``data/errors.json``
holds these errors, and ``--write`` adds larger ones. An instruction set that is missing there was
never measured. Before you change a bound, remove its test from that file.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
SEEN = Path(__file__).with_name("data") / "errors.json"
UNIT = {kind: torch.finfo(kind).eps / 2 for kind in (torch.float32, torch.float16, torch.bfloat16)}
"""Largest relative error of one rounding."""
NUM_LANES = 8
"""Minimum number of accumulators over which our kernels and PyTorch's split a sum whose order is
free."""
NUM_SUMS = 6
"""Number of sums of a layer's width: queries, keys, scores, values, hidden and output."""
MAX_SLACK = 4.0
LOG = "TANDEM_NUMERICS_LOG"
"""Environment variable with the file to which each comparison appends its test and its share."""
MARCH = {"default": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}
"""Values of ATEN_CPU_CAPABILITY, and the compiler's names for the same instructions."""
NEEDED = {
    "default": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
}
"""Flags of /proc/cpuinfo that each instruction set requires."""
FILES = tuple(
    f"tests/unit/test_{name}.py"
    for name in (
        *("acceptance_engine", "bf16", "dispatch", "drawing", "eagle", "eagle_training", "family"),
        *("gqa", "kernels", "logprobs", "medusa", "mtp_trees", "oracle", "packing", "penalties"),
        *("recorded", "router_ties", "sampling", "tree_oracle", "tuning", "typical", "vanilla"),
    )
)


def rounding(length: float, size: float, dtype: torch.dtype = torch.float32) -> float:
    """Bound the error of a number that is the result of ``length`` roundings of numbers of
    ``size``."""
    return math.sqrt(length) * UNIT[dtype] * size


def network_rounding(num_layers: int, width: int, size: float, growth: float = 1.0) -> float:
    """Bound the error of outputs of ``size`` of a network in fp32.

    ``growth`` is the factor by which norms and experts amplify errors. It depends on the weights:
    near 1 for trained ones, much more for random norms. So it is measured; all else is derived.
    """
    return growth * rounding(NUM_SUMS * num_layers * width / NUM_LANES, size)


def assert_near(got: Tensor, wanted: Tensor, bound: "float | Tensor") -> None:
    """Check that two tensors differ by no more than ``bound``, a number or one for each element.

    Infinities must be equal.
    """
    assert got.shape == wanted.shape
    finite = wanted.isfinite()
    assert torch.equal(got[~finite].double(), wanted[~finite].double())
    shares = ((got.double() - wanted.double()).abs() / bound)[finite]
    share = float(shares.max()) if shares.numel() else 0.0
    _note(share)
    assert share <= 1, f"the error is {share:.3g} times its bound"


def _note(share: float) -> None:
    if path := os.environ.get(LOG):
        test = os.environ["PYTEST_CURRENT_TEST"].partition("[")[0].partition(" ")[0]
        with open(path, "a") as log:
            log.write(json.dumps([test, share]) + "\n")


def capabilities() -> list[str]:
    """Return the values of ATEN_CPU_CAPABILITY that this processor can execute."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return [name for name, needed in NEEDED.items() if needed <= flags]


def compiler_for(capability: str, folder: Path) -> Path:
    """Write a compiler wrapper that is restricted to these instructions. Its version names them, so
    that the cache of compiled kernels keeps them apart."""
    script = folder / f"g++-{capability}"
    real = shutil.which(os.environ.get("CXX", "g++"))
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo {capability}\n'
        f'exec {real} "$@" -march={MARCH[capability]}\n'
    )
    script.chmod(0o755)
    return script


def run(capability: str) -> dict[str, float]:
    """Run the tests with one instruction set and return the largest share of each.

    Raises:
        SystemExit: A test has failed.
    """
    print(f"ATEN_CPU_CAPABILITY={capability}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"ATEN_CPU_CAPABILITY": capability, LOG: f"{folder}/shares"}
        if platform.machine() == "x86_64":
            env["CXX"] = str(compiler_for(capability, Path(folder)))
        command = [sys.executable, "-m", "pytest", "-n", "2", *FILES]
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            raise SystemExit(f"numerical tests fail with ATEN_CPU_CAPABILITY={capability}")
        largest: dict[str, float] = defaultdict(float)
        for line in Path(env[LOG]).read_text().splitlines():
            test, share = json.loads(line)
            largest[test] = max(largest[test], share)
    return largest


def loose(seen: dict[str, dict[str, float]]) -> list[str]:
    """Return the tests whose bound is more than MAX_SLACK times the largest error seen. Tests
    without a recorded error are skipped."""
    return [test for test, shares in seen.items() if 0 < max(shares.values()) < 1 / MAX_SLACK]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.numerics", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep errors that are larger")
    args = parser.parse_args()
    seen: dict[str, dict[str, float]] = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    found = {capability: run(capability) for capability in capabilities()}
    tests = sorted({test for shares in found.values() for test in shares})
    merged = {test: dict(seen.get(test, {})) for test in tests}
    for capability, shares in found.items():
        for test, share in shares.items():
            merged[test][capability] = max(round(share, 3), merged[test].get(capability, 0.0))
    for test in tests:
        print(*(f"{found[name].get(test, 0):8.3f}" for name in found), test)
    if args.write:
        SEEN.write_text(json.dumps(merged, indent=1) + "\n")
    if too_loose := loose(merged):
        raise SystemExit("bounds that are too loose: " + ", ".join(too_loose))


if __name__ == "__main__":
    main()
