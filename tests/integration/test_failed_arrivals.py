"""An error of a decode rank between pull and first step costs an attempt, never the answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engines import greedy
from tandem.core.errors import is_out_of_resources
from tests.rig import Rig, rig

ON_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4194304 bytes. Error code 12 (Cannot allocate memory)"
)
ON_GPU = RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total of ...")
BUG = KeyError("a fault of the rank's own")


def scatter(cluster: Rig) -> tuple[Any, str]:
    return cluster.decodes[0].kv_receiver._endpoint.caches, "scatter"


def begin(cluster: Rig) -> tuple[Any, str]:
    return cluster.decodes[0].engine._launcher.rows, "add_row"


def find_control(cluster: Rig) -> tuple[Any, str]:
    return cluster.decodes[0], "_find_control"


def failing_once(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    errors = [error]

    def called(*args: Any, **keywords: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*args, **keywords)

    return called


@pytest.mark.parametrize("error", [ON_CPU, ON_GPU, BUG], ids=["cpu", "gpu", "bug"])
@pytest.mark.parametrize("place", [scatter, begin, find_control])
async def test_one_error_between_pull_and_first_step_costs_no_answer(
    small_model: Path, place: Callable[[Rig], tuple[Any, str]], error: Exception
) -> None:
    async with rig(small_model, "kv.num_pages=100") as cluster:
        request = greedy("a", [5, 6, 7, 8], 12, ignore_eos=True)
        before, _, _ = await cluster.complete(request)
        owner, name = place(cluster)
        setattr(owner, name, failing_once(getattr(owner, name), error))
        after, _, _ = await cluster.complete(request)
        assert after == before
        assert sum(cluster.gateway.migrations.values()) == 1
        await cluster.check_empty()


def test_torchs_want_of_memory_is_want_of_a_resource() -> None:
    assert is_out_of_resources(ON_CPU)
    assert is_out_of_resources(ON_GPU)
    assert not is_out_of_resources(BUG)
    assert not is_out_of_resources(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
