"""All ranks get one plan, which is a pure function of their proposals."""

from copy import deepcopy
from dataclasses import replace
from itertools import combinations

import pytest

from tandem.core.draft_shapes import chain_shapes
from tandem.core.execution import CAPTURED, EAGER, RECORDED
from tandem.core.request import ACCEPTANCES
from tandem.decode_node.planning.draft_length import (
    StepCostModel,
    adaptive,
    choose_largest,
    record_reports,
)
from tandem.decode_node.planning.program_table import (
    MAX_EAGER_STEPS,
    MAX_PROGRAMS,
    MAX_UNCAPTURABLE,
    ProgramTable,
    common_step_keys,
)
from tandem.decode_node.planning.step_plan import (
    CAPTURE,
    GREEDY_TRAITS,
    MAX_SAMPLING_TRAITS,
    SAMPLED_TRAITS,
    SamplingTraits,
    StepKey,
    StepPlan,
    StepProposal,
    StepReport,
    merge_traits,
    program_rule_names,
    proposal_for,
)
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.model.drafters.mtp_rows import MtpCatchUp
from tandem.runtime.lockstep import LocalPlanner

BUCKETS, CATCH_UP = (1, 2, 4, 8), MtpCatchUp(3)
IDLE = proposal_for([], 3)
IDLE_CAPTURING = replace(IDLE, exec_mode=CAPTURED)


def rows(
    *limits: int, backlog: int = 1, traits: SamplingTraits = GREEDY_TRAITS, exec_mode: str = EAGER
) -> StepProposal:
    return StepProposal(tuple(limits.count(k) for k in range(4)), backlog, traits, exec_mode)


def planned(*proposals: StepProposal) -> StepKey | None:
    plan = fixed()(proposals)
    return None if plan is None else plan.key


def fixed(*usual: StepKey) -> StepPlanner:
    return StepPlanner(BUCKETS, chain_shapes(3), choose_largest, CATCH_UP, common_keys=usual)


def test_nobody_launches_if_nobody_has_work() -> None:
    assert planned(IDLE) is None and planned(IDLE, IDLE) is None


def test_the_bucket_holds_the_fullest_rank_and_idle_ones_step_along() -> None:
    key = planned(IDLE, rows(3, 1, 0), rows(2))
    assert key == StepKey(num_rows=4, shape_index=3, catch_up=4)


@pytest.mark.parametrize(
    ("limit", "backlog", "amount"),
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
    limit: int, backlog: int, amount: int
) -> None:
    key = planned(IDLE, rows(limit, backlog=backlog))
    assert key is not None and (key.shape_index, key.catch_up) == (limit, amount)


def test_a_step_has_all_that_rows_of_any_rank_ask_for() -> None:
    """A step has the traits that rows of any rank need, so that all ranks run the same program. A
    rank without rows needs none."""
    sampled = SamplingTraits(all_greedy=False, rule_names=("rejection",))
    ruled = SamplingTraits(has_logit_rules=True, rule_names=("strict",))
    key = planned(rows(3, traits=sampled), IDLE, rows(2, traits=ruled))
    assert key is not None and key.traits == SamplingTraits(False, True, ("rejection", "strict"))
    assert planned(rows(3, traits=sampled), IDLE) == StepKey(1, 3, 4, sampled)
    assert planned(rows(3), IDLE) == StepKey(1, 3, 4, GREEDY_TRAITS)


def test_extras_are_few_whatever_rows_ask_for() -> None:
    """Rows cause only few combinations of traits, which bounds the programs of each batch size and
    draft shape."""
    mixtures = [set(kinds) for n in range(1, 7) for kinds in combinations(ACCEPTANCES, n)]
    found = {
        merge_traits([SamplingTraits(is_greedy, has_logit_rules, program_rule_names(kinds))])
        for kinds in mixtures
        for is_greedy in (True, False)
        for has_logit_rules in (True, False)
    }
    assert len(mixtures) == 63 and len(found) == MAX_SAMPLING_TRAITS
    assert all(kinds <= {*program_rule_names(kinds)} for kinds in mixtures)
    for n in range(4):
        amounts = {
            CATCH_UP.catch_up_width(n, backlog) for backlog in range(1, CATCH_UP.max_width + 1)
        }
        assert len(amounts) <= 3


def keys(num: int) -> list[StepKey]:
    return [StepKey(num_rows, 3, 4) for num_rows in range(1, num + 1)]


def test_of_too_many_programs_the_one_unused_for_longest_makes_room() -> None:
    """If there are too many programs, the one unused for longest is released and its number reused.
    It is made again when it is needed."""
    forms = ProgramTable()
    kept = [forms.plan(key, RECORDED) for key in keys(MAX_PROGRAMS)]
    numbers = [plan.program_id for plan in kept]
    assert len({*numbers}) == MAX_PROGRAMS and None not in numbers
    first, second, *_ = keys(2)
    assert forms.plan(first, RECORDED) == kept[0], "it is kept"
    *_, another = keys(MAX_PROGRAMS + 1)
    assert forms.plan(another, RECORDED).program_id == kept[1].program_id, (
        "the one unused for longest"
    )
    assert forms.plan(first, RECORDED) == kept[0]
    assert forms.plan(second, RECORDED).program_id == kept[2].program_id


def test_of_too_many_captured_ones_too() -> None:
    forms = ProgramTable(keys(MAX_PROGRAMS + 1))
    made = [forms.next_capture() for _ in keys(MAX_PROGRAMS + 1)]
    assert not forms.has_pending_captures and made[-1].program_id == made[0].program_id
    first, second, *_ = keys(2)
    assert (
        forms.plan(first, CAPTURED) == StepPlan(first, is_final_mode=False)
        and forms.has_pending_captures
    )
    assert forms.plan(second, CAPTURED) == replace(made[1], purpose="serve")
    assert forms.next_capture() == StepPlan(first, CAPTURE, made[2].program_id)


def test_where_ranks_record_the_first_step_that_wants_a_program_makes_it() -> None:
    planner = fixed(*common_step_keys((1, 2), chain_shapes(3), CATCH_UP, 3))
    plans = [planner((rows(3, exec_mode=RECORDED),)) for _ in range(3)]
    assert plans == [StepPlan(StepKey(1, 3, 4), program_id=0)] * 3
    assert planner((rows(3, exec_mode=RECORDED), rows(3))) == plans[0], "it is there already"
    assert planner((rows(3, 3, exec_mode=RECORDED), rows(3))) == StepPlan(StepKey(2, 3, 4))


def test_programs_are_made_while_nobody_has_work_if_every_rank_can() -> None:
    usual = [StepKey(2, 3, 4), StepKey(1, 3, 4)]
    planner, idle = fixed(*usual), IDLE_CAPTURING
    assert planner((idle, IDLE)) is None
    assert planner((idle, replace(idle, has_pending_work=True))) is None
    assert planner((idle, idle)) == StepPlan(usual[0], CAPTURE, 0)
    ruled = rows(3, traits=SamplingTraits(has_logit_rules=True), exec_mode=CAPTURED)
    asked = [planner((ruled, idle)) for _ in range(3)]
    key = StepKey(1, 3, 4, SamplingTraits(has_logit_rules=True))
    assert asked == [StepPlan(key, is_final_mode=False)] * 3, "it is not waited for"
    left = [planner((idle, idle)) for _ in range(3)]
    assert left == [StepPlan(usual[1], CAPTURE, 1), StepPlan(key, CAPTURE, 2), None]
    assert planner((ruled, idle)) == StepPlan(key, program_id=2)


def test_a_program_that_is_asked_for_again_and_again_is_made_though_somebody_waits() -> None:
    """A program that is needed repeatedly is made even if rows wait. Otherwise a rank that is
    always busy would stay eager indefinitely."""
    planner = fixed(StepKey(2, 3, 4))
    sampled = rows(3, traits=SAMPLED_TRAITS, exec_mode=CAPTURED)
    plans = [planner((sampled,)) for _ in range(2 * MAX_EAGER_STEPS)]
    key = StepKey(1, 3, 4, SAMPLED_TRAITS)
    assert plans[:MAX_EAGER_STEPS] == [StepPlan(key, is_final_mode=False)] * MAX_EAGER_STEPS
    assert plans[MAX_EAGER_STEPS] == StepPlan(key, CAPTURE, 0)
    assert plans[MAX_EAGER_STEPS + 1 :] == [StepPlan(key, program_id=0)] * (MAX_EAGER_STEPS - 1)
    assert planner((IDLE_CAPTURING,)) == StepPlan(StepKey(2, 3, 4), CAPTURE, 1)


@pytest.mark.parametrize("exec_mode", [RECORDED, CAPTURED])
def test_one_that_cannot_be_made_is_eager_and_leaves_the_others_what_they_are(
    exec_mode: str,
) -> None:
    forms = ProgramTable(keys(2))
    good, bad, *_ = keys(2)
    if exec_mode == CAPTURED:
        forms.next_capture(), forms.next_capture()
    kept = forms.plan(good, exec_mode)
    assert kept.program_id is not None and forms.plan(bad, exec_mode).program_id is not None
    forms.mark_uncapturable([bad])
    assert forms.plan(bad, exec_mode) == StepPlan(bad) and forms.plan(good, exec_mode) == kept
    *_, later = keys(3)
    assert forms.plan(later, RECORDED).program_id == 1, "its number is free again"


def test_after_some_that_could_not_be_made_no_more_are_tried() -> None:
    forms = ProgramTable(keys(9))
    kept = forms.next_capture()
    forms.mark_uncapturable(keys(9)[-MAX_UNCAPTURABLE:])
    assert not forms.has_pending_captures
    assert forms.plan(kept.key, CAPTURED) == replace(kept, purpose="serve")
    later = keys(2)[1]
    assert forms.plan(later, CAPTURED) == StepPlan(later), "and it is settled"


def test_a_step_took_as_long_as_on_its_slowest_rank_and_all_rows_count() -> None:
    key = StepKey(4, 2, 3)
    reports = [StepReport(key, 0.1, (4, 3), (3, 1)), StepReport(key, 0.3, (2, 0), (0, 0))]
    together, apart = (
        StepCostModel.unprofiled(chain_shapes(3)),
        StepCostModel.unprofiled(chain_shapes(3)),
    )
    record_reports(together, [StepReport(key, 0.3, (6, 3), (3, 1))])
    record_reports(apart, reports)
    assert apart == together
    assert together.bucket_costs(4).step_s[2] == 0.3 and together.bucket_costs(8).step_s[2] == 0.0


def test_the_plan_is_a_function_of_proposals_and_costs() -> None:
    """Planning twice from the same costs gives the same plan and the same costs afterwards."""
    planner = StepPlanner(BUCKETS, chain_shapes(3), adaptive, CATCH_UP)
    report = StepReport(StepKey(2, 3, 4), 0.2, (2, 2, 1), (2, 1, 1))
    proposals = (StepProposal((0, 0, 0, 2), 4, report=report), IDLE)
    for _ in range(200):
        again = deepcopy(planner)
        assert planner(proposals) == again(proposals) and planner._costs == again._costs


def test_the_last_step_before_nobody_has_work_is_learnt_of_too() -> None:
    planner = StepPlanner(BUCKETS, chain_shapes(3), adaptive, CATCH_UP)
    report = StepReport(StepKey(1, 3, 4), 0.2, (1, 1, 1), (1, 1, 1))
    assert planner([replace(IDLE, report=report)]) is None
    assert planner._costs.bucket_costs(1).step_s == [0.0, 0.0, 0.0, 0.2]


def test_ranks_may_report_different_steps() -> None:
    """An idle rank reads a step later than a busy one, or has read a step of another shape."""
    wide = StepReport(StepKey(2, 3, 4), 0.02, (2, 2, 2), (2, 2, 1))
    narrow = StepReport(StepKey(1, 1, 2), 0.01, (1,), (1,))
    proposals = [replace(rows(3), report=report) for report in (wide, narrow, wide)]
    planner = StepPlanner(BUCKETS, chain_shapes(3), adaptive, CATCH_UP)
    planner(proposals)
    costs, apart = planner._costs, StepCostModel.unprofiled(chain_shapes(3))
    record_reports(apart, [wide, wide])
    record_reports(apart, [narrow])
    assert (
        costs.num_attempts == apart.num_attempts
        and costs.acceptance_rates == apart.acceptance_rates
    )


def test_steps_of_a_life_are_numbered() -> None:
    planner = LocalPlanner(fixed())
    plans = [planner.plan(proposal) for proposal in (rows(1), IDLE, rows(1))]
    assert [plan.step for plan in plans] == [1, 2, 3]
    assert plans[1].key is None and plans[0].key == plans[2].key
