"""Recorded functions replay any operator that was recorded. The cost of a recorded step is
bounded."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, is_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import TINY_MODEL
from tandem.core.draft_shapes import chain_shapes
from tandem.core.execution import CAPTURED
from tandem.core.request import REJECTION, RELAXED, Request, Speculation
from tandem.decode_node.planning.draft_length import StepCostModel, record_reports
from tandem.decode_node.planning.program_table import MAX_UNCAPTURABLE
from tandem.decode_node.planning.step_plan import GREEDY_TRAITS, SAMPLED_TRAITS, StepKey, StepReport
from tandem.decode_node.program import programs as programs_module
from tandem.decode_node.program.launcher import Launcher
from tandem.decode_node.program.programs import PreparedStep
from tandem.model.kernels.recorded import Recorded
from tandem.model.kernels.replayable import Eager
from tandem.model.loaded import LoadedModel
from tests.counted import step_of
from tests.kernels import ours

WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero")
"""Operators that copy values to the host."""


def recorded(function: Any) -> Recorded:
    ours()
    return Recorded(function)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_lists_views_in_place_writes_and_what_gives_back_its_input() -> None:
    table, counts = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)

    def function(x_BD: Tensor, rows_B: Tensor) -> tuple[Tensor, ...]:
        counts[rows_B] += 1
        first, *others = x_BD.contiguous().split(1, 1)
        sum_B1 = torch.cat([first, others[0] * 2, others[1].to(torch.float32)], 1).sum(1, True)
        table.index_copy_(0, rows_B, x_BD + sum_B1)
        top = table.sort(dim=0, descending=True, stable=True)
        return top.values, top.indices, table[rows_B, rows_B % 3], table.flatten()[:4].clone()

    play, generator = recorded(function), torch.Generator().manual_seed(1)
    kept = []
    for _ in range(4):
        x_BD, rows_B = torch.randn(2, 3, generator=generator), torch.randperm(5)[:2]
        before = table.clone(), counts.clone()
        outputs = play(x_BD, rows_B)
        after = table.clone(), counts.clone()
        table.copy_(before[0]), counts.copy_(before[1])
        expected = function(x_BD, rows_B)
        for one, other in zip((*outputs, *after), (*expected, table, counts), strict=True):
            assert torch.equal(one, other)
        kept.append((outputs, [one.clone() for one in outputs]))
    assert counts.sum() == 8 and "aten::contiguous" not in play.operators
    for outputs, copies in kept:
        assert all(map(torch.equal, outputs, copies)), "what was returned is the caller's"


def test_what_fails_while_it_is_recorded_is_recorded_the_next_time() -> None:
    is_broken = True

    def function(x: Tensor) -> tuple[Tensor]:
        y = x + 1
        if is_broken:
            raise MemoryError
        return (y,)

    play = recorded(function)
    with pytest.raises(MemoryError):
        play(torch.zeros(2))
    is_broken = False
    assert [play(torch.full((2,), float(i)))[0][0] for i in range(3)] == [1, 2, 3]
    assert play.operators == ["aten::add"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * x[0].item(),),
        lambda x: (x + 1 if x[0] > 0 else x - 1,),
        lambda x: (x + torch.tensor([1.0, 2.0]),),
        lambda x: (torch.empty(2).copy_(x),),
        lambda x: (x + x.nonzero().shape[0],),
        lambda x: (x[x > 0].sum() + len(x[x > 0]),),
        lambda x: (x + x.unique().numel(),),
        lambda x: (x.masked_select(x > 0).sum() * x,),
        lambda x: (x + sum(x.tolist()),),
    ],
)
def test_values_that_pass_through_the_host_are_refused(function: Any) -> None:
    with pytest.raises(RuntimeError, match="cannot be recorded: its values are the host's"):
        recorded(function)(torch.ones(2))


def test_nothing_of_a_recording_is_kept_but_what_it_reads_each_time() -> None:
    table, made = torch.ones(3, 1000), list[StorageWeakRef]()

    def function(x_B: Tensor) -> tuple[Tensor, ...]:
        wide = x_B[:, None] * table
        parts = [wide[:, :500] + 1, wide[:, 500:].clone()]
        made.extend(StorageWeakRef(one.untyped_storage()) for one in (wide, *parts))
        return (torch.cat(parts, 1).sum(1),)

    play = recorded(function)
    play(torch.ones(3))
    assert len(made) == 3 and all(one.expired() for one in made)
    assert play(torch.full((3,), 2.0))[0].tolist() == [2500.0] * 3
    play.forget()
    assert not play.is_ready


def test_what_cannot_be_played_is_refused() -> None:
    constant = torch.zeros(2)
    with pytest.raises(RuntimeError, match="an output must come from a recorded operator"):
        recorded(lambda x: (constant,))(torch.zeros(2))
    play, nested = recorded(lambda x: (x * 2,)), recorded(lambda x: (x + 1,))
    with pytest.raises(RuntimeError, match="one at a time"):
        recorded(lambda x: nested(x))(torch.zeros(2))
    play(torch.zeros(2))
    with pytest.raises(AssertionError, match="recorded for other input shapes"):
        play(torch.zeros(3))
    bad = recorded(lambda x, rows: (x[rows],))
    bad(torch.zeros(2), torch.tensor([1]))
    with pytest.raises(IndexError):
        bad(torch.zeros(2), torch.tensor([5]))
    assert bad(torch.ones(2), torch.tensor([0]))[0] == 1


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("recorded")
    tiny.write_tiny(folder, seed=21)
    return replace(load(folder, "model.kernels=native"), think_ids=(3, 4))


def everything() -> list[Request]:
    """Return requests that together use all sampling options, and plain ones."""
    asked = [greedy(f"r{i}", list(range(5 + i, 25)), 40, ignore_eos=True) for i in range(6)]
    hot = replace(asked[0].sampling, temperature=0.8, top_p=0.9, seed=5)
    ruled = replace(asked[0].sampling, presence_penalty=0.5, min_tokens=8, logprobs=2)
    asked[1] = replace(asked[1], sampling=replace(hot, logprobs=0))
    asked[2] = replace(asked[2], sampling=ruled)
    asked[3] = replace(asked[3], sampling=hot, speculation=Speculation(2, REJECTION))
    asked[4] = replace(asked[4], speculation=Speculation(3, RELAXED, 5, 0.5))
    return asked


def run(loaded: LoadedModel, overlap: bool, num_drafts: int) -> tuple[list, list[Tensor], Bench]:
    """Run all requests. Rows leave one after another, which gives many different step keys."""
    bench = Bench(loaded, num_drafts=num_drafts, max_rows=6, overlap=overlap)
    for request in everything():
        bench.start(request)
    for i in range(6):
        for _ in range(4):
            bench.decode.step()
        bench.drop(f"r{i}")
    while bench.decode.has_work():
        bench.decode.step()
    told = [(u.identity.request_id, u.token_ids, u.logprobs) for u in bench.updates()]
    return told, bench.all_caches(), bench


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_recorded_steps_are_eager_ones_to_the_last_bit(
    loaded: LoadedModel, overlap: bool, num_drafts: int
) -> None:
    assert loaded.exec_mode == "recorded"
    kernels = type(loaded.kernels)
    told, caches, bench = run(loaded, overlap, num_drafts)
    played = [one for _, one in bench.decode.programs.functions.values() if one.operators]
    assert len(played) >= 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "make_replayable", lambda self, function: Eager(function))
        eager, eager_caches, _ = run(loaded, overlap, num_drafts)
    assert told == eager
    assert all(map(torch.equal, caches, eager_caches))


@pytest.mark.parametrize("fails", [False, True])
def test_the_step_that_records_is_told_and_not_timed(loaded: LoadedModel, fails: bool) -> None:
    """The step that records a program is reported and not timed. A step that failed while it
    recorded is recorded again."""
    bench = Bench(loaded, num_drafts=0)
    bench.start(greedy("r", [5, 6, 7], 40, ignore_eos=True))
    if fails:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(programs_module, "decode_step", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                bench.decode.step()
    usual = []
    for _ in range(3):
        bench.decode.step()
        report = bench.decode._report
        assert report is not None
        usual.append(report.is_steady_state)
    assert usual == [False, True, True]
    costs = StepCostModel.unprofiled(chain_shapes(3))
    record_reports(costs, [report_at(1.0, is_steady_state=False)])
    assert costs.bucket_costs(1).step_s == [0.0] * 4 and costs.num_attempts[0] > 1
    record_reports(costs, [report_at(1.0, is_steady_state=True)])
    assert costs.bucket_costs(1).step_s[2] == 1.0


def report_at(program_s: float, is_steady_state: bool) -> StepReport:
    return StepReport(StepKey(1, 2, 3), program_s, (1, 1), (1, 0), is_steady_state)


def test_kernels_of_torch_are_called_eagerly_and_every_step_of_theirs_counts() -> None:
    plain = load(TINY_MODEL, "model.kernels=torch")
    assert plain.exec_mode == "eager"
    bench = Bench(plain, num_drafts=1)
    bench.start(greedy("r", [5, 6, 7], 40, ignore_eos=True))
    bench.decode.step()
    assert bench.decode._report is not None and bench.decode._report.is_steady_state
    assert not bench.decode.programs.functions


def test_a_program_that_was_dropped_is_recorded_again(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = everything()
    answers = Bench(loaded, max_rows=6).generate(*asked)
    monkeypatch.setattr("tandem.decode_node.planning.program_table.MAX_PROGRAMS", 1)
    bench = Bench(loaded, max_rows=6)
    assert bench.generate(*asked) == answers
    assert len(bench.decode.programs.functions) == 1


def test_programs_that_are_made_ahead_serve_and_others_are_eager(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that were captured in advance, on dummy rows while the rank was idle, serve later
    steps. Other steps are eager."""
    asked = everything()
    answers = Bench(loaded, max_rows=6).generate(*asked)
    monkeypatch.setattr(type(loaded.kernels), "exec_mode", CAPTURED)
    bench = Bench(loaded, max_rows=6, draft_length="adaptive", buckets=(2, 4, 6))
    made = bench.decode.programs.functions
    caches = [cache.clone() for cache in bench.all_caches()]
    while bench.decode.has_work():
        bench.decode.step()
    assert len(made) == 3 * 5 * 2 and all(function.is_ready for _, function in made.values())
    for cache, clean in zip(bench.all_caches(), caches, strict=True):
        assert torch.equal(cache[1:], clean[1:]), "only the dummy page may be written"
    known, make = {key for key, _ in made.values()}, Launcher.capture_program

    def make_alone(launcher: Launcher, step: PreparedStep) -> None:
        assert not bench.decode.scheduler.sequences, "nobody waits for a program"
        make(launcher, step)

    monkeypatch.setattr(Launcher, "capture_program", make_alone)
    assert bench.generate(*asked) == answers and not bench.decode.has_work()
    met = {key for key, _ in made.values()} - known
    assert met and all(key.traits not in (GREEDY_TRAITS, SAMPLED_TRAITS) for key in met)
    bench.check_empty()


def test_a_program_that_cannot_be_made_leaves_the_others_and_steps_go_on(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that cannot be made, such as a graph too large for the memory, does not affect
    others or later steps."""
    asked = everything()
    answers = Bench(loaded, max_rows=6).generate(*asked)
    kernels = copy(loaded.kernels)
    kernels.exec_mode = CAPTURED
    bench = Bench(replace(loaded, kernels=kernels, uncapturable={}), max_rows=6, buckets=(2, 4, 6))
    for _ in range(3):
        bench.decode.step()
    error = RuntimeError("out of memory")
    with monkeypatch.context() as patch:
        patch.setattr("tandem.decode_node.program.programs.decode_step", Mock(side_effect=error))
        with pytest.raises(RuntimeError):
            bench.decode.step()
    bench.decode.fail(error)
    made, [refused] = bench.decode.programs.functions, bench.decode.programs.uncapturable
    assert not bench.decode.has_work() and "out of memory" in bench.decode.programs.exec_mode_status
    known = {key for key, function in made.values() if function.is_ready}
    assert len(known) == 3 and refused not in known
    assert bench.generate(*asked) == answers
    now = {key for key, function in made.values() if function.is_ready}
    assert known < now and refused not in now, "others were made later"
    bench.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_program_is_made_between_steps_if_nobody_is_ever_without_work(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, fails: bool, overlap: bool
) -> None:
    """A program is made between steps if the rank is never idle. If that fails, no request is
    affected."""
    asked = everything()
    answers = Bench(loaded, max_rows=6).generate(*asked)
    kernels = copy(loaded.kernels)
    kernels.exec_mode = CAPTURED
    if fails:
        broken = Mock(is_ready=False, side_effect=RuntimeError("out of memory"))
        monkeypatch.setattr(kernels, "make_replayable", lambda function: broken)
    monkeypatch.setattr("tandem.decode_node.planning.program_table.MAX_EAGER_STEPS", 2)
    monkeypatch.setattr(
        "tandem.decode_node.planning.step_planner.common_step_keys", lambda **named: []
    )
    bench = Bench(replace(loaded, kernels=kernels, uncapturable={}), max_rows=6, overlap=overlap)
    step, busy = bench.decode.step, list[int]()

    def guarded() -> None:
        try:
            step()
        except RuntimeError as error:
            busy.append(len(bench.decode.scheduler.sequences))
            bench.decode.fail(error)

    monkeypatch.setattr(bench.decode, "step", guarded)
    assert bench.generate(*asked) == answers
    assert bool(busy) == fails and len(busy) <= MAX_UNCAPTURABLE
    assert not busy or busy[0] > 0
    made = [key for key, function in bench.decode.programs.functions.values() if function.is_ready]
    assert bool(made) != fails
    bench.check_empty()


class Made(TorchDispatchMode):
    """Counts the memory that operators allocated, and the part that is still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        held = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if is_tensor(one)}
        for one in filter(is_tensor, tree_leaves(out)):
            if one.untyped_storage().data_ptr() not in held:
                storage = one.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes allocated and the bytes still held."""
        held = sum(size for one, size in self._sizes.items() if not one.expired())
        return sum(self._sizes.values()), held


def test_a_program_keeps_next_to_nothing(loaded: LoadedModel) -> None:
    bench = Bench(loaded, num_drafts=2, max_rows=6)
    for request in everything():
        bench.start(request)
    with Made() as made:
        bench.decode.step()
    assert len(bench.decode.programs.functions) == 1
    taken, held = made.num_bytes()
    assert taken > 1_000_000 and held < 5_000, (taken, held)


def test_what_a_step_calls_allocates_and_copies() -> None:
    """No call waits for the host. More rows or a longer context need no more calls. The figures
    themselves are in test_golden.py."""
    one, _ = step_of(1, 0, 70)
    drafting, _ = step_of(1, 3, 70)
    for counts in (one, drafting):
        assert not {*WAITS} & set(counts.calls)
    many, _ = step_of(8, 0, 70)
    assert many.calls == one.calls, "more rows are not more calls"
    assert many.num_bytes <= 8 * one.num_bytes
    longer, _ = step_of(1, 0, 300)
    assert longer.calls == one.calls and longer.num_bytes == one.num_bytes, "nothing copies context"
