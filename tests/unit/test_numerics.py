"""Bounds of numerical tests (tests/numerics.py) hold, are not loose, and are derived rather than
chosen."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.numerics import (
    FILES,
    LOG,
    MARCH,
    NEEDED,
    ROOT,
    SEEN,
    UNIT,
    assert_near,
    capabilities,
    compiler_for,
    loose,
    rounding,
)

SHARES: dict[str, dict[str, float]] = json.loads(SEEN.read_text())


@pytest.mark.parametrize("length", [64, 1000, 100_000])
def test_sums_one_after_the_other_stay_within_their_bound(length: int) -> None:
    """More accumulators only make the error smaller."""
    terms_NL = torch.randn(20, length, generator=torch.Generator().manual_seed(length))
    for num_lanes in (1, 8, 16):
        added_NL = terms_NL[:, : length // num_lanes * num_lanes].unflatten(1, (-1, num_lanes))
        partial = added_NL.cumsum(1, dtype=torch.float32)
        size = float(partial.abs().max())
        exact = added_NL.double().sum(1)
        assert_near(partial[:, -1], exact, rounding(length / num_lanes, size))


def test_what_is_off_by_more_than_its_bound_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    wanted = torch.tensor([1.0, float("-inf"), 3.0])
    assert_near(wanted + torch.tensor([0.5, 0.0, -0.25]), wanted, 1.0)
    [line] = (tmp_path / "log").read_text().splitlines()
    test, share = json.loads(line)
    assert test.endswith("test_what_is_off_by_more_than_its_bound_is_noticed") and share == 0.5
    for wrong in ([1.0, 5.0, 3.0], [1.0, float("-inf"), 4.5], [float("nan"), float("-inf"), 3.0]):
        with pytest.raises(AssertionError):
            assert_near(torch.tensor(wrong), wanted, 1.0)


def test_no_bound_is_loose() -> None:
    assert not loose(SHARES)
    assert all(share <= 1 for shares in SHARES.values() for share in shares.values())
    assert loose({"a": {"default": 0.2, "avx2": 0.24}, "b": {"avx2": 0.0}}) == ["a"]


def test_every_numerical_test_is_measured() -> None:
    for test in SHARES:
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), test
    for path in sorted((ROOT / "tests" / "unit").glob("test_*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if "assert_near(" in text and path != Path(__file__) and "IS_INTERPRETED:" not in text:
            assert name in FILES, f"{name}: add it to FILES in tests/numerics.py"


def test_no_tolerance_is_chosen_by_hand() -> None:
    chosen = re.compile(r"assert_close\(|allclose\(|\batol=|\brtol=")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path != Path(__file__):
            found = chosen.search(path.read_text())
            assert found is None, f"{path.name}: {found}: use assert_near of tests/numerics.py"


def test_kernels_are_compiled_for_the_instructions_that_pytorch_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The wrapper passes the real compiler these arguments last, because the last ones count."""
    real = tmp_path / "real"
    real.write_text('#!/bin/sh\necho "$@"\n')
    real.chmod(0o755)
    monkeypatch.setenv("CXX", str(real))
    versions = set()
    for name, march in MARCH.items():
        compiler = compiler_for(name, tmp_path)
        said = [
            subprocess.run([compiler, *args], capture_output=True, text=True, check=True).stdout
            for args in (("-march=native", "a.cpp"), ("--version",))
        ]
        assert said[0].split() == ["-march=native", "a.cpp", f"-march={march}"]
        versions.add(said[1])
    assert len(versions) == len(MARCH) == len(NEEDED)
    assert capabilities()[0] == "default"


def test_the_units_are_those_of_the_types() -> None:
    """The largest relative error of a rounded number is half of the last place."""
    numbers = torch.rand(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for kind, unit in UNIT.items():
        errors = (numbers.to(kind).double() - numbers).abs() / numbers
        assert unit / 2 < float(errors.max()) <= unit
