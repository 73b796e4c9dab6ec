"""No program of a step waits for the host or has value-dependent shapes, with the GPU kernels. Runs
on fake tensors, for all drafters and all sampling options."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tests.kernels import IS_INTERPRETED

if IS_INTERPRETED:
    pytest.skip("launches are noted, not made", allow_module_level=True)
pytest.importorskip("triton")

from benchmarks.gpu.device import Device  # noqa: E402
from benchmarks.gpu.gang import spread_over  # noqa: E402
from benchmarks.gpu.launches import Noted, noted  # noqa: E402
from benchmarks.harness.engines import Bench, load  # noqa: E402
from tandem.core.config import TINY_MODEL  # noqa: E402
from tandem.core.request import ACCEPTANCES  # noqa: E402
from tandem.decode_node.planning.program_table import common_step_keys  # noqa: E402
from tandem.decode_node.planning.step_plan import GREEDY_TRAITS, SamplingTraits, StepKey  # noqa: E402
from tandem.model.loaded import LoadedModel  # noqa: E402
from tests.conformance import DRAFTERS, bench_of  # noqa: E402
from tests.often import often  # noqa: E402

ON_DEVICE = [name for name in DRAFTERS if not name.startswith("class")]
"""All drafters except user-defined classes, which run in Python between two steps."""
OFTEN = "mtp tree", "eagle3 tree", "ngram+mtp"
EVERYTHING = SamplingTraits(
    all_greedy=False, has_logit_rules=True, rule_names=tuple(sorted(ACCEPTANCES))
)


@pytest.fixture
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.model.loaded.create_kernels", lambda *told, **more: Noted())


def loaded_with(name: str) -> LoadedModel:
    return load(TINY_MODEL, "model.dtype=bfloat16", *DRAFTERS[name])


def keys_of(loaded: LoadedModel, bench: Bench) -> list[StepKey]:
    """Return keys of greedy steps with the most drafts, and of one with all sampling options. Steps
    without drafts are the same for all drafters, so only "mtp" includes them."""
    catch_up, levels = loaded.drafter.catch_up(bench.num_drafts), loaded.drafter.draft_shapes
    usual = common_step_keys((3,), levels(bench.num_drafts), catch_up)
    greedy = [key for key in usual if key.traits == GREEDY_TRAITS]
    highest = max(key.shape_index for key in greedy)
    ends = (0, highest) if loaded.drafter.name == "mtp" else (highest,)
    largest = max(greedy, key=lambda key: (key.shape_index, key.catch_up))
    return [key for key in greedy if key.shape_index in ends] + [
        replace(largest, traits=EVERYTHING)
    ]


def computed(loaded: LoadedModel, name: str) -> int:
    """Return the number of launches of all programs, computed on dummy rows."""
    bench, num = bench_of(loaded, name), 0
    rows, programs = bench.decode._launcher.rows, bench.decode.programs
    rows.allocate_logit_rules()
    for key in keys_of(loaded, bench):
        index = rows.row_indices([], key.num_rows, is_profile=True)
        values = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.inference_mode(), values, noted(loaded.kernels) as found:  # type: ignore[arg-type]
            programs._compute(key, None, *index)
        num += len(found)
        assert any(one.kernel is not None for one in found)
    return num


@pytest.mark.parametrize("name", often(ON_DEVICE, OFTEN))
def test_no_program_of_a_drafter_depends_on_values(_noted: None, name: str) -> None:
    assert computed(loaded_with(name), name) > 300


def test_nor_one_whose_experts_are_behind_a_gang(_noted: None) -> None:
    loaded = loaded_with("mtp")
    group: Any = SimpleNamespace(num_ranks=2, rank=0, all_gather=twice, all_to_all=torch.empty_like)
    spread = spread_over(group, loaded, Device(is_rehearsal=True))
    alone = computed(loaded_with("mtp"), "mtp")
    assert computed(spread, "mtp") > alone


def twice(x: Tensor) -> Tensor:
    return x.new_empty(2, *x.shape)


@pytest.mark.parametrize(
    ("wait", "error"),
    [("item", DataDependentOutputException), ("nonzero", DynamicOutputShapeException)],
)
def test_a_wait_for_the_host_would_be_found(
    _noted: None, monkeypatch: pytest.MonkeyPatch, wait: str, error: type[Exception]
) -> None:
    loaded = loaded_with("mtp")
    compute = loaded.network.logits

    def waiting(hidden: Tensor) -> Tensor:
        getattr(hidden.float().sum(), wait)()
        return compute(hidden)

    monkeypatch.setattr(loaded.network, "logits", waiting)
    with pytest.raises(error):
        computed(loaded, "mtp")
