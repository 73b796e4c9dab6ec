"""A gang of one rank whose tokens are still dispatched: NCCL collectives inside captured steps.

Also tests the end of its epoch.
"""

import time
from dataclasses import replace
from itertools import chain

import torch.distributed as dist

from benchmarks.gpu.device import Device
from benchmarks.gpu.exact import answers, requests, same
from benchmarks.gpu.say import Say
from benchmarks.harness.engines import Bench, load
from tandem.core.config import TINY_MODEL
from tandem.core.placement import Placement
from tandem.model.loaded import LoadedModel
from tandem.model.network.dispatch.all_gather import AllGatherDispatch
from tandem.model.network.moe import MoE
from tandem.runtime.gang.collectives import Collectives, connect


def run(device: Device, say: Say) -> None:
    sets = [] if device.is_rehearsal else ["decode.device=cuda", "model.kernels=triton"]
    loaded, asked = load(TINY_MODEL, "model.dtype=bfloat16", *sets), requests(4)
    alone, _ = answers(loaded, asked, 3, is_captured=True)
    group = connect(dist.HashStore, 0, 1, device.kind, "127.0.0.1")
    spread = spread_over(group, loaded, device)
    eager, eager_bits = answers(spread, asked, 3, is_captured=False)
    captured, captured_bits = answers(spread, asked, 3, is_captured=not device.is_rehearsal)
    forms_equal = eager == captured and same(eager_bits, captured_bits)
    as_alone = sum(a == b for a, b in zip(eager, alone, strict=True)) / len(asked)
    right = forms_equal and (spread.exec_mode == loaded.exec_mode or device.is_rehearsal)
    say("bfloat16, n = 3", is_right=right, as_alone=as_alone, form=spread.exec_mode)
    bench = Bench(spread, num_drafts=3, max_rows=len(asked), page_size=64)
    while bench.decode.has_work():
        bench.decode.step()
    began_at = time.perf_counter()
    bench.decode.close()
    group.close()
    say("from the last step to the end of the group", s=time.perf_counter() - began_at)


def spread_over(group: Collectives, loaded: LoadedModel, device: Device) -> LoadedModel:
    """Return a model with the same weights, whose experts are reached through ``group``."""
    config, parts = loaded.config, [loaded.network, getattr(loaded.drafter, "_layer", None)]
    placement = Placement.in_order(config.num_moe_layers, config.n_routed_experts, group.num_ranks)
    dispatch = AllGatherDispatch(placement, group.rank, device.kind, is_static=True)
    dispatch.set_group(group)
    for module in chain.from_iterable(part.modules() for part in parts if part is not None):
        if isinstance(module, MoE):
            module.dispatch = dispatch
    return replace(loaded, dispatch=dispatch)
