"""Decode steps of published dimensions compared with their floors, eager and captured."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import floors
from benchmarks.gpu.ceilings import rates
from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import random_model
from benchmarks.harness.engines import greedy
from tandem.core.identity import Identity
from tandem.decode_node.planning.states import RequestLimits, RequestSize, RunningSequence
from tandem.decode_node.planning.step_plan import (
    CAPTURE,
    GREEDY_TRAITS,
    SAMPLED_TRAITS,
    StepKey,
    StepPlan,
)
from tandem.decode_node.program.programs import PreparedStep, Programs
from tandem.decode_node.program.rows import Rows
from tandem.kv_transfer.pages import PagePool
from tandem.model.drafters.none import NoDrafter
from tandem.model.loaded import LoadedModel

PAGE_SIZE = 64
ROOM = 1024
"""Tokens that a row may emit while it is timed."""
MOST_TOKENS = 32 * 32768
NUM_DRAFTS = 3
DRAWN_AT = 1024
MODELS = (("v2-lite", False), ("v3-slice", False), ("v3-slice", True))
"""Names, and whether weights are FP8."""


def run(device: Device, say: Say) -> None:
    models = [("small", False)] if device.is_rehearsal else MODELS
    for name, in_fp8 in models:
        told = f"{name}{', FP8' * in_fp8}"
        loaded = random_model(name, device.kind, torch.bfloat16, with_mtp=True, in_fp8=in_fp8)
        for num_rows in (1, 2) if device.is_rehearsal else (1, 8, 32, 64, 128):
            for context in (100,) if device.is_rehearsal else (1024, 4096, 32768):
                if num_rows * context <= MOST_TOKENS:
                    with torch.inference_mode():
                        _at(device, say, told, loaded, num_rows, context, 1 if in_fp8 else 2)
            if num_rows in (1, 32):
                with torch.inference_mode():
                    _drawn(device, say, told, loaded, num_rows, DRAWN_AT)
        del loaded
        device.free()


def _drawn(
    device: Device, say: Say, name: str, loaded: LoadedModel, num_rows: int, context: int
) -> None:
    """Time steps that sample, relative to steps that take the most likely tokens."""
    for n in (0, NUM_DRAFTS):
        drafting, times = loaded if n else replace(loaded, drafter=NoDrafter()), []
        for sampling in ({}, {"temperature": 1.0, "top_p": 0.95}):
            batch = Steps(drafting, num_rows, context, n, **sampling)
            batch.step()
            batch.capture()
            times.append(device.time_s(batch.step))
            del batch
            device.free()
        what = f"{name}, {num_rows} rows of {context}, n = {n}, top-p 0.95"
        say(what, ms=1e3 * times[1], of_greedy=times[1] / times[0])


def _at(
    device: Device,
    say: Say,
    name: str,
    loaded: LoadedModel,
    num_rows: int,
    context: int,
    item_bytes: int,
) -> None:
    for n in (0, NUM_DRAFTS):
        drafting = loaded if n else replace(loaded, drafter=NoDrafter())
        batch = Steps(drafting, num_rows, context, n)
        with experts_hit(loaded) as hit:
            batch.step()
        by_drafts, by_layers = hit[:n], hit[n:]
        eager = device.time_s(batch.step, 5)
        host_eager = device.host_s(batch.step, 5)
        batch.capture()
        captured, host = device.time_s(batch.step), device.host_s(batch.step)
        hits = by_drafts, by_layers
        work = floors.decode_step(loaded.config, num_rows, n, context, *hits, item_bytes)
        floor = work.floor_s(rates())
        say(
            f"{name}, {num_rows} rows of {context}, n = {n}",
            ms=1e3 * captured,
            floor_ms=1e3 * floor,
            of_floor=floor / captured,
            eager_ms=1e3 * eager,
            host_ms=1e3 * host,
            host_eager_ms=1e3 * host_eager,
            experts_hit=statistics.mean(by_layers),
        )
        del batch
        device.free()


class Steps:
    """Rows of equal contexts on separate pages, whose latents are random."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_rows: int,
        context: int,
        num_drafts: int,
        **sampling: float,
    ) -> None:
        per_row = -(-(context + ROOM) // PAGE_SIZE)
        pool = PagePool(1 + num_rows * per_row, PAGE_SIZE)
        self.caches = loaded.allocate_caches(pool.num_pages, PAGE_SIZE)
        for cache in (one for group in self.caches.values() for one in group):
            cache.normal_()
        self.rows = Rows(loaded, num_rows, num_drafts, pool, per_row)
        request = greedy("r", (5,) * context, ROOM, ignore_eos=True, **sampling)
        for i in range(num_rows):
            pages = list(range(1 + i * per_row, 1 + (i + 1) * per_row))
            places = i, pages, RequestLimits(RequestSize(context, 0, ROOM), per_row, ROOM), 1
            settings = request, frozenset[int](), num_drafts, num_drafts
            one = RunningSequence(Identity(f"r{i}"), *places, *settings)
            hidden = torch.randn(loaded.config.hidden_size, device=loaded.device)
            self.rows.add_row(one, 7 + i, hidden.to(loaded.dtype))
        levels = loaded.drafter.draft_shapes(num_drafts)
        self._programs = Programs(loaded, self.caches, self.rows, levels)
        catch_up = loaded.drafter.catch_up(num_drafts)
        amount = catch_up.catch_up_width(num_drafts, catch_up.initial_backlog)
        key = StepKey(num_rows, num_drafts, amount, SAMPLED_TRAITS if sampling else GREEDY_TRAITS)
        self._plan = StepPlan(key)
        self._index = self.rows.row_indices(list(range(num_rows)), num_rows)

    def step(self) -> Any:
        return self._programs.run(PreparedStep((), self._plan, None, *self._index))

    def capture(self) -> None:
        self._plan = StepPlan(self._plan.key, CAPTURE, program_id=0)
        index = self.rows.row_indices([], self._plan.key.num_rows, is_profile=True)
        self._programs.capture_program(PreparedStep((), self._plan, None, *index))


@contextmanager
def experts_hit(loaded: LoadedModel) -> Iterator[list[int]]:
    """Count the distinct experts that each MoE layer chooses during the block, in layer order."""
    found: list[int] = []
    route = loaded.kernels.route

    def counting(**inputs: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(**inputs)
        found.append(len(ids.unique()))
        return ids, weights

    kernels: Any = loaded.kernels
    kernels.route = counting
    try:
        yield found
    finally:
        del kernels.route
