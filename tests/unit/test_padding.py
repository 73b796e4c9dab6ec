"""Steps that are planned wider than a rank's rows, also for a rank without rows. Padding runs every
pass, emits nothing and changes no other row."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load, planner_of
from tandem.core.draft_shapes import DraftShape, chain_shapes
from tandem.core.request import Request
from tandem.decode_node.planning.draft_length import choose_largest
from tandem.decode_node.planning.step_plan import StepKey, StepPlan, StepProposal
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.model.checkpoint.tensors import map_tensors, select_rows
from tandem.model.drafters.base import DraftContext, DrafterState, Drafts
from tandem.model.drafters.mtp import MtpLayer
from tandem.model.drafters.mtp_rows import MtpCatchUp
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch
from tandem.model.network.cache import Caches
from tandem.runtime.lockstep import LocalPlanner, Plan
from tests.unit.test_drafts import Spy

NUM_ROWS, NUM_DRAFTS = 4, 2
KEY = StepKey(NUM_ROWS, NUM_DRAFTS, NUM_DRAFTS + 1)
BUCKETS = (NUM_ROWS,)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("padding")
    tiny.write_tiny(folder, seed=21)
    return load(folder)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[tuple[list[int], str]]:
    """Answers of a rank whose steps are as wide as its rows."""
    return bench_of(loaded).generate(*requests())


class BusyGang(LocalPlanner):
    """Plans full buckets. While other ranks are busy, a step is planned whatever this rank
    proposes."""

    def __init__(self, *, is_busy: bool = True) -> None:
        super().__init__(
            StepPlanner(BUCKETS, chain_shapes(NUM_DRAFTS), choose_largest, MtpCatchUp(NUM_DRAFTS))
        )
        self.is_step_requested = is_busy

    def plan(self, proposal: StepProposal) -> Plan:
        plan = super().plan(proposal)
        return (
            replace(plan, key=StepPlan(KEY))
            if plan.key is None and self.is_step_requested
            else plan
        )


class Witness(Spy):
    """Records which rows the drafter receives as real."""

    def __init__(self, inner: object) -> None:
        super().__init__(inner)
        self.real: list[list[bool]] = []

    def draft(
        self,
        state: DrafterState,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        self.real.append(context.real_B.tolist())
        return super().draft(state, context, draft_shape, catch_up_width, caches)


def requests() -> list[Request]:
    """Return requests with logit rules, sampling and greedy decoding; the last row ends first."""
    asked = [greedy(f"r{i}", list(range(5 + i, 25)), 30 - 8 * i, ignore_eos=True) for i in range(3)]
    hot = replace(asked[0].sampling, temperature=0.8, seed=5, presence_penalty=0.5)
    return [replace(asked[0], sampling=hot), *asked[1:]]


def bench_of(loaded: LoadedModel, **more: object) -> Bench:
    return Bench(loaded, num_drafts=NUM_DRAFTS, max_rows=NUM_ROWS, **more)  # type: ignore[arg-type]


def pages_of(bench: Bench) -> list[Tensor]:
    """Return a copy of all cache pages except the dummy page."""
    return [cache[1:].clone() for cache in bench.all_caches()]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_without_rows_runs_the_planned_step_and_emits_nothing(
    loaded: LoadedModel, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass runs at the planned shape. Caches, rows and pages stay as before."""
    spy, batches, passes = Witness(loaded.drafter), [], []
    tapped, predict, write = (
        type(loaded.network).forward_with_taps,
        MtpLayer.predict,
        MtpLayer.write_cache,
    )

    def recording(network: object, batch: Batch, *rest: object, **named: object) -> object:
        batches.append(batch)
        return tapped(network, batch, *rest, **named)

    def recording_predict(
        layer: object, z_XD: Tensor, batch: Batch, *rest: object, **named: object
    ) -> Tensor:
        passes.append(batch)
        return predict(layer, z_XD, batch, *rest, **named)

    def recording_write(
        layer: object, z_XD: Tensor, batch: Batch, *rest: object, **named: object
    ) -> None:
        passes.append(batch)
        write(layer, z_XD, batch, *rest, **named)

    monkeypatch.setattr(type(loaded.network), "forward_with_taps", recording)
    monkeypatch.setattr(MtpLayer, "predict", recording_predict)
    monkeypatch.setattr(MtpLayer, "write_cache", recording_write)
    bench = bench_of(replace(loaded, drafter=spy), overlap=overlap, planner=BusyGang())
    everyone = torch.arange(NUM_ROWS + 1)
    rows = map_tensors(Tensor.clone, select_rows(bench.decode._launcher.rows._table, everyone))
    before = pages_of(bench)
    for _ in range(5):
        bench.decode.step()
    assert len(batches) == len(spy.drafts) == 5
    for batch, drafts, real in zip(batches, spy.drafts, spy.real, strict=True):
        assert batch.token_ids_BQ.shape == (NUM_ROWS, NUM_DRAFTS + 1)
        assert batch.real_BQ is not None and not batch.real_BQ.any() and not any(real)
        assert torch.tensor(drafts).shape == (NUM_ROWS, NUM_DRAFTS)
    widths = [batch.token_ids_BQ.shape for batch in passes]
    assert widths == [(NUM_ROWS, NUM_DRAFTS + 1), (NUM_ROWS, 1), (NUM_ROWS, 1)] * 5
    assert not any(batch.real_BQ.any() for batch in passes)
    assert len(bench.frames) == 5 and not bench.updates()
    assert all(map(torch.equal, before, pages_of(bench)))
    check_equal(rows, select_rows(bench.decode._launcher.rows._table, everyone))
    bench.decode.scheduler.check_integrity()
    assert bench.decode.program_s > 0


def check_equal(rows: object, others: object) -> None:
    def check(one: Tensor, other: Tensor) -> Tensor:
        assert torch.equal(one, other)
        return one

    map_tensors(check, rows, others)


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_between_dummy_steps_are_those_of_a_rank_alone(
    loaded: LoadedModel, alone: list[tuple[list[int], str]], overlap: bool
) -> None:
    gang = BusyGang()
    bench = bench_of(loaded, overlap=overlap, planner=gang)
    for _ in range(2):
        gang.is_step_requested = True
        for _ in range(7):
            bench.decode.step()
        gang.is_step_requested = False
        assert bench.generate(*requests()) == alone
    bench.check_empty()


@pytest.mark.parametrize("poison", [1e4, -1e4])
def test_whatever_padding_holds_no_real_row_changes(
    loaded: LoadedModel, alone: list[tuple[list[int], str]], poison: float
) -> None:
    spy = Witness(loaded.drafter)
    bench = bench_of(replace(loaded, drafter=spy), planner=BusyGang(is_busy=False))
    state = bench.decode._launcher.rows._table.state.drafter
    state.hidden_BMD[NUM_ROWS:] = poison
    state.tokens_BM[NUM_ROWS:] = 77
    assert bench.generate(*requests()) == alone
    assert sorted(set(map(sum, spy.real))) == [1, 2, 3]
    assert all(real == sorted(real, reverse=True) for real in spy.real)


def test_the_row_that_padding_is_read_from_never_changes(loaded: LoadedModel) -> None:
    bench = bench_of(loaded, planner=BusyGang(is_busy=False))
    table, padding = bench.decode._launcher.rows._table, torch.tensor([NUM_ROWS])
    before = map_tensors(Tensor.clone, select_rows(table, padding))
    bench.generate(*requests())
    check_equal(before, select_rows(table, padding))
    assert int(before.state.num_known_B) == 2 and not before.real_B.any()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_ends_after_it_was_proposed_turns_into_padding(
    loaded: LoadedModel, alone: list[tuple[list[int], str]], overlap: bool
) -> None:
    """The plan stays as it is, and the other rows do not change."""

    class SparseWindow(LocalPlanner):
        def plan(self, proposal: StepProposal) -> Plan:
            plan = super().plan(proposal)
            if plan.step == 4:
                assert plan.key is not None and plan.key.key.num_rows == 3
                assert bench.drop("r1")
            return plan

    planner = SparseWindow(planner_of(loaded, NUM_DRAFTS, choose_largest))
    bench = bench_of(loaded, overlap=overlap, planner=planner)
    answers = bench.generate(*requests())
    assert answers[0] == alone[0] and answers[2] == alone[2]
    assert answers[1][1] is None and answers[1][0] == alone[1][0][: len(answers[1][0])]
    bench.check_empty()
