"""One plan for all ranks, as a pure function of what they propose."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks.driven import tiny
from benchmarks.driven.engines import Bench, load
from decode_node.buckets import Buckets
from decode_node.draft_length import by_load, most_wanted, no_costs, recorded
from decode_node.plan import (
    MAKE,
    MAX_KEPT,
    PLAIN,
    SAMPLED,
    SERVE,
    Extras,
    Proposal,
    Report,
    StepKey,
    propose,
)
from decode_node.planner import MOST_EAGER, StepPlanner, plan_step
from model.loaded import LoadedModel
from runtime.lockstep import LocalPlanner

BUCKETS = Buckets((1, 2, 4, 8))
IDLE = propose([], 3, None)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    tiny.write_tiny(tmp_path, seed=21)
    return load(tmp_path, "model.kernels=native")


def rows(*limits: int, num_pending_most: int = 1, extras: Extras = PLAIN) -> Proposal:
    return Proposal(tuple(limits.count(k) for k in range(4)), num_pending_most, extras)


def planned(*proposals: Proposal) -> StepKey | None:
    key, _ = plan_step(proposals, no_costs(3), BUCKETS, most_wanted)
    return key


def test_nobody_launches_if_nobody_has_work() -> None:
    assert planned(IDLE) is None and planned(IDLE, IDLE) is None


def test_the_bucket_holds_the_fullest_rank_and_idle_ones_step_along() -> None:
    key = planned(IDLE, rows(3, 1, 0), rows(2))
    assert key == StepKey(num_rows=4, num_drafts=3, width=4)


@pytest.mark.parametrize(
    ("limit", "num_pending_most", "width"),
    [
        (3, 1, 4),
        (3, 4, 4),
        (3, 5, 16),
        (2, 3, 3),
        (2, 4, 4),
        (1, 3, 4),
        (1, 16, 16),
        (0, 1, 0),
        (0, 15, 0),
        (0, 16, 16),
    ],
)
def test_pass_one_takes_all_that_is_pending_and_without_drafts_it_waits(
    limit: int, num_pending_most: int, width: int
) -> None:
    key = planned(IDLE, rows(limit, num_pending_most=num_pending_most))
    assert key is not None and (key.num_drafts, key.width) == (limit, width)


def test_a_step_has_all_that_rows_of_any_rank_ask_for() -> None:
    """So every rank runs the same program; who has no row asks for nothing."""
    sampled = Extras(all_greedy=False, num_logprobs=2, kinds=("rejection",))
    ruled = Extras(has_rules=True, num_logprobs=5, kinds=("relaxed",))
    key = planned(rows(3, extras=sampled), IDLE, rows(2, extras=ruled))
    assert key is not None and key.extras == Extras(False, True, 5, ("rejection", "relaxed"))
    assert planned(rows(3, extras=sampled), IDLE) == StepKey(1, 3, 4, sampled)
    assert planned(rows(3), IDLE) == StepKey(1, 3, 4, PLAIN)


def test_of_too_many_programs_the_one_unused_for_longest_is_made_again(
    loaded: LoadedModel,
) -> None:
    """By the planner and by the rank that runs what it plans: they agree on which are kept."""
    kernels = copy(loaded.kernels)
    kernels.makes_ahead = True
    bench = Bench(replace(loaded, kernels=kernels), max_rows=1)
    program, index = bench.decode._launcher.program, torch.zeros(1, dtype=torch.long)
    repeated = Mock(side_effect=lambda function: Mock(is_ready=True, return_value=(index, index)))
    kernels.repeated = repeated  # type: ignore[method-assign]
    program._compute = Mock(return_value=(index, index))  # type: ignore[method-assign]
    planner = StepPlanner(Buckets((1,)), 3, "fixed")
    keys = [
        Extras(is_greedy, has_rules, num, kinds)
        for kinds in (("strict",), ("relaxed",), ("rejection",), ("relaxed", "strict"))
        for is_greedy in (True, False)
        for has_rules in (True, False)
        for num in range(17)
    ]

    def asked(extras: Extras) -> bool:
        """Whether it is made, as soon as nobody has work any more."""
        key = planner((replace(rows(3, extras=extras), can_make=True),))
        assert key is not None and key.use == SERVE
        program.run((key, None), index, index)
        made = planner((replace(IDLE, can_make=True),))
        if made is not None:
            assert made == replace(key, use=MAKE)
            program.make((key, None), index, index)
        return made is not None

    first, second, *others = keys
    assert len(keys) > MAX_KEPT + 2
    assert all(map(asked, keys[:MAX_KEPT]))
    assert not asked(first), "it is kept"
    assert asked(keys[MAX_KEPT]), "one more than are kept"
    assert not asked(first) and asked(second), "the one unused for longest was let go"
    assert len(program.kept) == MAX_KEPT == len(planner._made)
    assert [key for key, _ in program.kept] == list(planner._made)


def test_programs_are_made_while_nobody_has_work_if_every_rank_can() -> None:
    usual = [StepKey(2, 3, 4), StepKey(1, 3, 4)]
    planner = StepPlanner(BUCKETS, 3, "fixed", to_make=usual)
    idle = replace(IDLE, can_make=True)
    assert planner((idle, IDLE)) is None
    assert planner((idle, replace(idle, expects=True))) is None
    assert planner((idle, idle)) == StepKey(2, 3, 4, use=MAKE)
    ruled = replace(rows(3, extras=Extras(has_rules=True)), can_make=True)
    asked = [planner((ruled, idle)) for _ in range(3)]
    assert asked == [StepKey(1, 3, 4, Extras(has_rules=True))] * 3, "it is not waited for"
    left = [planner((idle, idle)) for _ in range(3)]
    assert left == [replace(usual[1], use=MAKE), replace(asked[0], use=MAKE), None]


def test_a_program_that_is_asked_for_again_and_again_is_made_though_somebody_waits() -> None:
    """Or who is never without work would be eager for ever."""
    planner = StepPlanner(BUCKETS, 3, "fixed", to_make=[StepKey(2, 3, 4)])
    sampled = replace(rows(3), extras=SAMPLED, can_make=True)
    keys = [planner((sampled,)) for _ in range(2 * MOST_EAGER)]
    key = StepKey(1, 3, 4, SAMPLED)
    assert keys == [key] * MOST_EAGER + [replace(key, use=MAKE)] + [key] * (MOST_EAGER - 1)
    assert planner((replace(IDLE, can_make=True),)) == StepKey(2, 3, 4, use=MAKE)
    assert [planner((replace(sampled, can_make=False),)) for _ in range(MOST_EAGER + 1)][-1] == key


def test_a_step_took_as_long_as_on_its_slowest_rank_and_all_rows_count() -> None:
    key = StepKey(4, 2, 3)
    reports = [Report(key, 0.1, (4, 3), (3, 1)), Report(key, 0.3, (2, 0), (0, 0))]
    together = recorded(no_costs(3), [Report(key, 0.3, (6, 3), (3, 1))])
    assert recorded(no_costs(3), reports) == together
    assert together.of_size(4).step_s[2] == 0.3 and together.of_size(8).step_s[2] == 0.0


def test_the_plan_is_a_function_of_proposals_and_costs() -> None:
    """The costs given are not touched, so planning twice gives the same."""
    costs = no_costs(3)
    report = Report(StepKey(2, 3, 4), 0.2, (2, 2, 1), (2, 1, 1))
    proposals = (Proposal((0, 0, 0, 2), 4, report=report), IDLE)
    for _ in range(200):
        first = plan_step(proposals, costs, BUCKETS, by_load)
        assert plan_step(proposals, costs, BUCKETS, by_load) == first
        _, costs = first


def test_ranks_may_report_different_steps() -> None:
    """An idle rank reads a step later than a busy one, or has read one of other shapes."""
    wide = Report(StepKey(2, 3, 4), 0.02, (2, 2, 2), (2, 2, 1))
    narrow = Report(StepKey(1, 1, 2), 0.01, (1,), (1,))
    proposals = [replace(rows(3), report=report) for report in (wide, narrow, wide)]
    _, costs = plan_step(proposals, no_costs(3), BUCKETS, by_load)
    apart = recorded(recorded(no_costs(3), [wide, wide]), [narrow])
    assert costs.tried == apart.tried and costs.accepted == apart.accepted


def test_steps_of_a_life_are_numbered() -> None:
    planner = LocalPlanner(StepPlanner(BUCKETS, 3, "fixed"))
    plans = [planner.plan(proposal) for proposal in (rows(1), IDLE, rows(1))]
    assert [plan.step for plan in plans] == [1, 2, 3]
    assert plans[1].key is None and plans[0].key == plans[2].key
