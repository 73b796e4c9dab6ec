"""Drafters that run outside a step's program: their drafts have the same bits as within it. An
error in such a drafter costs drafts and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.draft_shapes import DraftShape
from tandem.core.request import REJECTION, REJECTION_GREEDY, Request, Speculation
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import Caches
from tests.drafters import Again, Failing, FedMtp
from tests.unit.test_recorded import everything, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fed")
    tiny.write_tiny(folder, seed=21)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return replace(load(folder, "model.kernels=native"), think_ids=(3, 4))


@pytest.mark.parametrize("overlap", [False, True])
def test_mtp_gives_the_same_bits_within_the_program_and_before_it(
    loaded: LoadedModel, overlap: bool
) -> None:
    """Rows use all sampling options; the distributions that drafts were drawn from are compared
    too."""
    assert isinstance(loaded.drafter, MtpDrafter)
    fed = FedMtp(loaded.drafter._network, loaded.drafter._layer)
    fed_told, fed_caches, fed_bench = run(replace(loaded, drafter=fed), overlap, 3)
    told, caches, bench = run(loaded, overlap, 3)
    assert told == fed_told and bench.decode.num_steps == fed_bench.decode.num_steps
    assert all(map(torch.equal, caches, fed_caches))
    played = [
        [one.operators for _, one in each.decode.programs.functions.values()]
        for each in (bench, fed_bench)
    ]
    assert max(map(len, played[1])) < max(map(len, played[0])), "its program has no drafter in it"


def answers(loaded: LoadedModel, num_drafts: int, asked: list[Request]) -> tuple[list, Bench]:
    bench = Bench(loaded, num_drafts=num_drafts, max_rows=6)
    told = bench.generate(*asked)
    bench.check_empty()
    return told, bench


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_costs_the_drafts_of_one_step(loaded: LoadedModel, overlap: bool) -> None:
    """An error of the drafter costs the drafts of one step, but no row and no token."""
    asked = [greedy(f"r{i}", list(range(5 + i, 25)), 20, ignore_eos=True) for i in range(4)]
    expected, _ = answers(loaded, 0, asked)
    drafter = Failing()
    bench = Bench(replace(loaded, drafter=drafter), num_drafts=2, max_rows=6, overlap=overlap)
    assert bench.generate(*asked) == expected
    bench.check_empty()
    assert bench.decode.programs._host_drafts.num_draftless_steps == 1 and drafter.num_calls > 8
    assert bench.decode.programs.exec_mode_status.endswith(
        ", 1 steps without drafts (drafting failed)"
    )


class Wrong(Again):
    """Returns an invalid result in every step with a real row."""

    name, runs_on_host = "wrong", True

    def __init__(self, wrong: Callable[[Tensor, int], Drafts]) -> None:
        self.wrong = wrong

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        if context.real_B.any():
            return self.wrong(context.last_B1, draft_shape.depth)
        return super().draft(state, context, draft_shape, catch_up_width, caches)


def _broken(last_B1: Tensor, num_drafts: int) -> Drafts:
    raise AssertionError("an invariant of its own")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (_broken, "an invariant of its own"),
        (lambda last_B1, n: Drafts(last_B1), "the drafter returned shapes"),
        (lambda last_B1, n: Drafts(last_B1.repeat(1, n), last_B1), "the drafter returned shapes"),
        (
            lambda last_B1, n: Drafts(last_B1.repeat(1, n), None, last_B1 / 1),
            "the drafter returned shapes",
        ),
        (lambda last_B1, n: last_B1.repeat(1, n), "tokens_BN"),
        (lambda last_B1, n: None, "tokens_BN"),
    ],
)
def test_what_is_no_draft_costs_drafts_only(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture, wrong: Callable, told: str
) -> None:
    """A result that is no draft costs only drafts. Rows and the rank continue, and the log names
    the error."""
    asked = [greedy(f"r{i}", list(range(5 + i, 25)), 9, ignore_eos=True) for i in range(4)]
    expected, _ = answers(loaded, 0, asked)
    given, bench = answers(replace(loaded, drafter=Wrong(wrong)), 2, asked)
    assert given == expected and bench.decode.programs._host_drafts.num_draftless_steps == 8
    assert told in caplog.text and caplog.text.count("without drafts") == 4


@pytest.mark.parametrize("token", [-7, 10**9])
@pytest.mark.parametrize("num", [-3, 10**6])
def test_ids_that_are_no_tokens_are_drafts_that_fail(
    loaded: LoadedModel, token: int, num: int
) -> None:
    """Draft ids that are no tokens are rejected. On a GPU they would be read outside of the
    embedding."""
    asked = [greedy(f"r{i}", list(range(5 + i, 25)), 9, ignore_eos=True) for i in range(3)]
    sampled = replace(asked[2].sampling, temperature=0.8, seed=3)
    speculation = Speculation(2, REJECTION)
    asked[2] = replace(asked[2], sampling=sampled, speculation=speculation)
    expected, _ = answers(loaded, 0, asked[:2])

    def wrong(last_B1: Tensor, n: int) -> Drafts:
        drafts_BN = torch.full_like(last_B1, token).repeat(1, n)
        return Drafts(drafts_BN.int(), torch.full_like(drafts_BN[:, 0], num))

    given, bench = answers(replace(loaded, drafter=Wrong(wrong)), 2, asked)
    assert given[:2] == expected and len(given[2][0]) == 9
    assert bench.decode.programs._host_drafts.num_draftless_steps == 0


def test_rows_without_drafts_of_their_own_use_none(loaded: LoadedModel) -> None:
    """Every second row has one draft fewer and accepts no more."""
    asked = [greedy(f"r{i}", [7, 7, 7 + i], 30 - 9 * i, ignore_eos=True) for i in range(2)]
    expected, _ = answers(loaded, 0, asked)
    told, bench = answers(replace(loaded, drafter=Failing()), 1, asked)
    assert told == expected
    second, _ = [one.counts for one in bench.updates() if one.counts is not None]
    assert second.num_accepted == 0 and second.num_drafted == second.num_steps


def test_a_drafter_that_knows_no_distribution_is_a_point_mass(loaded: LoadedModel) -> None:
    """A drafter without a distribution counts as a point mass, for every kind of acceptance."""
    asked = everything()
    told, _ = answers(replace(loaded, drafter=_fed_again()), 2, asked)
    point = replace(asked[3], speculation=Speculation(2, REJECTION_GREEDY))
    as_point, _ = answers(replace(loaded, drafter=_fed_again()), 2, [*asked[:3], point, *asked[4:]])
    assert told == as_point


def _fed_again() -> Again:
    drafter = Again()
    drafter.runs_on_host = True  # type: ignore[misc]
    return drafter


def test_a_class_of_ones_own_drafts(folder: Path) -> None:
    loaded = load(folder, "speculation.drafter=tests.drafters:Again")
    assert loaded.drafter.name == "again" and [group.name for group in loaded.cache_groups] == [
        "main"
    ]
    asked = [greedy("r", [5, 6, 7], 20, ignore_eos=True)]
    assert answers(loaded, 3, asked)[0] == answers(loaded, 0, asked)[0]


@pytest.mark.parametrize(
    "name", ["hydra", "nowhere:Drafter", "tests.drafters:Nobody", "tests.drafters:NoDrafter"]
)
def test_a_drafter_that_is_not_there_is_refused_by_name(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}' cannot be loaded .*use auto"):
        load(folder, f"speculation.drafter={name}")
