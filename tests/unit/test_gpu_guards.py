"""Check the launches of steps of published sizes, and their kernels compiled for Hopper.

Enough bytes must be in flight, loads and products must overlap, and no launch or byte may be added.
Nothing runs on a device. benchmarks/results/gpu.md has what one measured.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.kernels import IS_INTERPRETED

if IS_INTERPRETED:
    pytest.skip("nothing is compiled", allow_module_level=True)
pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402

from benchmarks.gpu import compiled  # noqa: E402
from benchmarks.gpu.compiled import Hopper, compiled_of  # noqa: E402
from benchmarks.gpu.ledger import MOST, Line, line_of, lines_of, step_of  # noqa: E402

HOT = {"_attend": 32, "_gate_up": 64, "_down": 64, "_product": 64}
"""Kernels that take most of a step, each with the minimum N of its wgmma instructions."""
ENOUGH = 0.8 * MOST
"""Minimum share of the memory's rate, which 24 KB in flight on each processor reach."""
At = tuple[str, int, int, int, bool]
"""Model, rows, context, drafts, and whether weights are FP8."""
STEPS: dict[At, tuple[int, float]] = {
    ("v2-lite", 1, 4096, 0, False): (478, 5.15),
    ("v2-lite", 1, 4096, 3, False): (620, 14.04),
    ("v2-lite", 32, 4096, 0, False): (504, 34.56),
    ("v2-lite", 32, 4096, 3, False): (649, 42.37),
    ("v3-slice", 32, 4096, 3, False): (268, 52.54),
    ("v3-slice", 1, 4096, 0, True): (133, 4.44),
    ("v3-slice", 32, 4096, 3, True): (299, 34.07),
}
"""Number of launches of each step, and the GB that they move."""
COMPILED = [at for at in STEPS if at[1] > 1 or at[4]]
OFTEN = ("v2-lite", 32, 4096, 3, False), ("v3-slice", 32, 4096, 3, True)
"""Steps that are checked in every run of the tests: both models, bf16 and FP8."""


def at_times(steps: Iterable[At]) -> list[Any]:
    """Return steps as parameters, marking those that are not in OFTEN as slow."""
    return [pytest.param(at, marks=() if at in OFTEN else pytest.mark.slow) for at in steps]


def faults(line: Line) -> list[str]:
    """Return the faults of a kernel that takes much of a step."""
    name, made = line.launch.name, line.compiled
    assert made is not None
    told = {
        "spills": made.num_spilled > 0,
        "wgmmas wait for one another": made.is_serialized,
        "loads and products take turns": made.num_buffers < 2,
        "loads of less than 16 bytes": made.load_bytes < 16,
        "too little in flight": line.of_memory < ENOUGH,
        "narrow products": 0 < made.wgmma_n < HOT[name],
    }
    return [f"{name}: {fault}: {made}" for fault, is_so in told.items() if is_so]


@pytest.mark.parametrize("at", at_times(STEPS), ids=str)
def test_no_launch_and_no_byte_is_added(at: At) -> None:
    """A change of the numbers changes STEPS, and benchmarks/results/gpu.md."""
    launches, work = step_of(*at)
    gigabytes = sum(one.num_bytes for one in work) / 1e9
    assert (len(launches), round(gigabytes, 2)) == STEPS[at]


@pytest.mark.parametrize("at", at_times(COMPILED), ids=str)
def test_kernels_that_take_most_of_a_step_keep_memory_and_products_busy(at: At) -> None:
    hot = {str(one): one for one in lines_of(*at, only=HOT)}
    assert len({one.launch.name for one in hot.values()}) >= 3
    assert not [fault for one in hot.values() for fault in faults(one)]


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        ("_attend", {"num_stages": 1}, "take turns"),
        pytest.param("_attend", {"BLOCK_S": 16}, "narrow products", marks=pytest.mark.slow),
        pytest.param("_attend", {"num_warps": 4}, "spills", marks=pytest.mark.slow),
        ("_attend", {"maxnreg": 168}, "wait for one another"),
        ("_down", {"F": 1407}, "less than 16 bytes"),
    ],
)
def test_guards_notice(name: str, options: dict[str, Any], fault: str) -> None:
    at = "v3-slice", 32, 4096, 3, False
    [(launch, work), *_] = [
        pair for pair in zip(*step_of(*at), strict=True) if pair[0].name == name
    ]
    found = faults(line_of(replace(launch, given=launch.given | options), work))
    assert any(fault in one for one in found), found
    few = replace(launch, grid=(16, 1))
    assert any("too little in flight" in one for one in faults(line_of(few, work)))


@pytest.mark.parametrize(
    "options", [{"num_stages": 1}, pytest.param({"BLOCK_S": 16}, marks=pytest.mark.slow)]
)
def test_what_guards_notice_takes_longer_by_the_ledgers_rule(options: dict[str, Any]) -> None:
    step = zip(*step_of("v3-slice", 32, 4096, 3, False), strict=True)
    launch, work = next(pair for pair in step if pair[0].name == "_attend")
    worse = replace(launch, given=launch.given | options)
    assert line_of(worse, work).seconds > 1.1 * line_of(launch, work).seconds


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compile for the GPU with this compute capability, with a separate cache."""
    capability: int = request.param
    monkeypatch.setattr(Hopper, "get_current_target", lambda _: GPUTarget("cuda", capability, 32))
    monkeypatch.setattr(Hopper, "get_current_device", lambda _: capability)
    monkeypatch.setattr(compiled, "figures", lambda made: made.metadata.shared)
    return capability


@pytest.mark.slow
@pytest.mark.parametrize("card", [89, 100], indirect=True)
def test_l4_and_b200_do_not_hold_what_hopper_does(card: int) -> None:
    """If you make the kernel fit, enable these GPUs in model/kernels/__init__.py."""
    launches = step_of("v3-slice", 32, 4096, 3, False)[0]
    needed = max(compiled_of(one) for one in launches if one.name == "_attend")
    assert needed > 1024 * {89: 99, 100: 227}[card]


@pytest.mark.slow
@pytest.mark.parametrize("card", [80], indirect=True)
def test_a100_has_no_fp8(card: int) -> None:
    launches = step_of("v3-slice", 1, 4096, 0, True)[0]
    for one in launches:
        if one.name == "_gate_up":
            with pytest.raises(CompilationError) as refused:
                compiled_of(one)
            assert "fp8e4nv not supported" in str(refused.value.__cause__ or refused.value)
