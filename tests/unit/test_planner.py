"""One plan for all ranks, as a pure function of what they propose."""

from copy import deepcopy
from dataclasses import replace
from itertools import combinations

import pytest

from tandem.core.forms import CAPTURED, EAGER, RECORDED
from tandem.core.levels import chains
from tandem.core.request import ACCEPTANCES
from tandem.decode_node.planning.forms import MAX_KEPT, MOST_EAGER, MOST_REFUSED, Forms, usual_keys
from tandem.decode_node.planning.lengths import Costs, adaptive, most_wanted, record
from tandem.decode_node.planning.step_plan import (
    MAKE,
    MOST_EXTRAS,
    PLAIN,
    SAMPLED,
    Extras,
    Proposal,
    Report,
    StepKey,
    StepPlan,
    extras_of_all,
    kinds_of,
    wishes_of,
)
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.model.drafters.mtp_rows import Pending
from tandem.runtime.lockstep import LocalPlanner

BUCKETS, CATCH_UP = (1, 2, 4, 8), Pending(3)
IDLE = wishes_of([], 3)
IDLE_CAPTURING = replace(IDLE, form=CAPTURED)


def rows(*limits: int, behind: int = 1, extras: Extras = PLAIN, form: str = EAGER) -> Proposal:
    return Proposal(tuple(limits.count(k) for k in range(4)), behind, extras, form)


def planned(*proposals: Proposal) -> StepKey | None:
    plan = fixed()(proposals)
    return None if plan is None else plan.key


def fixed(*usual: StepKey) -> StepPlanner:
    return StepPlanner(BUCKETS, chains(3), most_wanted, CATCH_UP, usual=usual)


def test_nobody_launches_if_nobody_has_work() -> None:
    assert planned(IDLE) is None and planned(IDLE, IDLE) is None


def test_the_bucket_holds_the_fullest_rank_and_idle_ones_step_along() -> None:
    key = planned(IDLE, rows(3, 1, 0), rows(2))
    assert key == StepKey(num_rows=4, level=3, catch_up=4)


@pytest.mark.parametrize(
    ("limit", "behind", "amount"),
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
    limit: int, behind: int, amount: int
) -> None:
    key = planned(IDLE, rows(limit, behind=behind))
    assert key is not None and (key.level, key.catch_up) == (limit, amount)


def test_a_step_has_all_that_rows_of_any_rank_ask_for() -> None:
    """So every rank runs the same program; who has no row asks for nothing."""
    sampled = Extras(all_greedy=False, kinds=("rejection",))
    ruled = Extras(has_rules=True, kinds=("strict",))
    key = planned(rows(3, extras=sampled), IDLE, rows(2, extras=ruled))
    assert key is not None and key.extras == Extras(False, True, ("rejection", "strict"))
    assert planned(rows(3, extras=sampled), IDLE) == StepKey(1, 3, 4, sampled)
    assert planned(rows(3), IDLE) == StepKey(1, 3, 4, PLAIN)


def test_extras_are_few_whatever_rows_ask_for() -> None:
    """So a size and a length has no more programs than these times what is caught up with."""
    mixtures = [set(kinds) for n in range(1, 7) for kinds in combinations(ACCEPTANCES, n)]
    found = {
        extras_of_all([Extras(is_greedy, has_rules, kinds_of(kinds))])
        for kinds in mixtures
        for is_greedy in (True, False)
        for has_rules in (True, False)
    }
    assert len(mixtures) == 63 and len(found) == MOST_EXTRAS
    assert all(kinds <= {*kinds_of(kinds)} for kinds in mixtures)
    for n in range(4):
        amounts = {CATCH_UP.amount(n, behind) for behind in range(1, CATCH_UP.most + 1)}
        assert len(amounts) <= 3


def keys(num: int) -> list[StepKey]:
    return [StepKey(num_rows, 3, 4) for num_rows in range(1, num + 1)]


def test_of_too_many_programs_the_one_unused_for_longest_makes_room() -> None:
    """Its number is another's, so ranks let go of it; asked for again, it is made again."""
    forms = Forms()
    kept = [forms.plan(key, RECORDED) for key in keys(MAX_KEPT)]
    numbers = [plan.number for plan in kept]
    assert len({*numbers}) == MAX_KEPT and None not in numbers
    first, second, *_ = keys(2)
    assert forms.plan(first, RECORDED) == kept[0], "it is kept"
    *_, another = keys(MAX_KEPT + 1)
    assert forms.plan(another, RECORDED).number == kept[1].number, "the one unused for longest"
    assert forms.plan(first, RECORDED) == kept[0]
    assert forms.plan(second, RECORDED).number == kept[2].number


def test_of_too_many_captured_ones_too() -> None:
    forms = Forms(keys(MAX_KEPT + 1))
    made = [forms.make() for _ in keys(MAX_KEPT + 1)]
    assert not forms.lacks and made[-1].number == made[0].number
    first, second, *_ = keys(2)
    assert forms.plan(first, CAPTURED) == StepPlan(first, is_settled=False) and forms.lacks
    assert forms.plan(second, CAPTURED) == replace(made[1], use="serve")
    assert forms.make() == StepPlan(first, MAKE, made[2].number)


def test_where_ranks_record_the_first_step_that_wants_a_program_makes_it() -> None:
    planner = fixed(*usual_keys((1, 2), chains(3), CATCH_UP, 3))
    plans = [planner((rows(3, form=RECORDED),)) for _ in range(3)]
    assert plans == [StepPlan(StepKey(1, 3, 4), number=0)] * 3
    assert planner((rows(3, form=RECORDED), rows(3))) == plans[0], "it is there already"
    assert planner((rows(3, 3, form=RECORDED), rows(3))) == StepPlan(StepKey(2, 3, 4))


def test_programs_are_made_while_nobody_has_work_if_every_rank_can() -> None:
    usual = [StepKey(2, 3, 4), StepKey(1, 3, 4)]
    planner, idle = fixed(*usual), IDLE_CAPTURING
    assert planner((idle, IDLE)) is None
    assert planner((idle, replace(idle, expects=True))) is None
    assert planner((idle, idle)) == StepPlan(usual[0], MAKE, 0)
    ruled = rows(3, extras=Extras(has_rules=True), form=CAPTURED)
    asked = [planner((ruled, idle)) for _ in range(3)]
    key = StepKey(1, 3, 4, Extras(has_rules=True))
    assert asked == [StepPlan(key, is_settled=False)] * 3, "it is not waited for"
    left = [planner((idle, idle)) for _ in range(3)]
    assert left == [StepPlan(usual[1], MAKE, 1), StepPlan(key, MAKE, 2), None]
    assert planner((ruled, idle)) == StepPlan(key, number=2)


def test_a_program_that_is_asked_for_again_and_again_is_made_though_somebody_waits() -> None:
    """Or who is never without work would be eager for ever."""
    planner = fixed(StepKey(2, 3, 4))
    sampled = rows(3, extras=SAMPLED, form=CAPTURED)
    plans = [planner((sampled,)) for _ in range(2 * MOST_EAGER)]
    key = StepKey(1, 3, 4, SAMPLED)
    assert plans[:MOST_EAGER] == [StepPlan(key, is_settled=False)] * MOST_EAGER
    assert plans[MOST_EAGER] == StepPlan(key, MAKE, 0)
    assert plans[MOST_EAGER + 1 :] == [StepPlan(key, number=0)] * (MOST_EAGER - 1)
    assert planner((IDLE_CAPTURING,)) == StepPlan(StepKey(2, 3, 4), MAKE, 1)


@pytest.mark.parametrize("form", [RECORDED, CAPTURED])
def test_one_that_cannot_be_made_is_eager_and_leaves_the_others_what_they_are(form: str) -> None:
    forms = Forms(keys(2))
    good, bad, *_ = keys(2)
    if form == CAPTURED:
        forms.make(), forms.make()
    kept = forms.plan(good, form)
    assert kept.number is not None and forms.plan(bad, form).number is not None
    forms.refuse([bad])
    assert forms.plan(bad, form) == StepPlan(bad) and forms.plan(good, form) == kept
    *_, later = keys(3)
    assert forms.plan(later, RECORDED).number == 1, "its number is free again"


def test_after_some_that_could_not_be_made_no_more_are_tried() -> None:
    forms = Forms(keys(9))
    kept = forms.make()
    forms.refuse(keys(9)[-MOST_REFUSED:])
    assert not forms.lacks
    assert forms.plan(kept.key, CAPTURED) == replace(kept, use="serve")
    later = keys(2)[1]
    assert forms.plan(later, CAPTURED) == StepPlan(later), "and it is settled"


def test_a_step_took_as_long_as_on_its_slowest_rank_and_all_rows_count() -> None:
    key = StepKey(4, 2, 3)
    reports = [Report(key, 0.1, (4, 3), (3, 1)), Report(key, 0.3, (2, 0), (0, 0))]
    together, apart = Costs.unknown(chains(3)), Costs.unknown(chains(3))
    record(together, [Report(key, 0.3, (6, 3), (3, 1))])
    record(apart, reports)
    assert apart == together
    assert together.of_size(4).step_s[2] == 0.3 and together.of_size(8).step_s[2] == 0.0


def test_the_plan_is_a_function_of_proposals_and_costs() -> None:
    """So planning twice from the same costs gives the same, and the same costs after it."""
    planner = StepPlanner(BUCKETS, chains(3), adaptive, CATCH_UP)
    report = Report(StepKey(2, 3, 4), 0.2, (2, 2, 1), (2, 1, 1))
    proposals = (Proposal((0, 0, 0, 2), 4, report=report), IDLE)
    for _ in range(200):
        again = deepcopy(planner)
        assert planner(proposals) == again(proposals) and planner._costs == again._costs


def test_the_last_step_before_nobody_has_work_is_learnt_of_too() -> None:
    planner = StepPlanner(BUCKETS, chains(3), adaptive, CATCH_UP)
    report = Report(StepKey(1, 3, 4), 0.2, (1, 1, 1), (1, 1, 1))
    assert planner([replace(IDLE, report=report)]) is None
    assert planner._costs.of_size(1).step_s == [0.0, 0.0, 0.0, 0.2]


def test_ranks_may_report_different_steps() -> None:
    """An idle rank reads a step later than a busy one, or has read one of other shapes."""
    wide = Report(StepKey(2, 3, 4), 0.02, (2, 2, 2), (2, 2, 1))
    narrow = Report(StepKey(1, 1, 2), 0.01, (1,), (1,))
    proposals = [replace(rows(3), report=report) for report in (wide, narrow, wide)]
    planner = StepPlanner(BUCKETS, chains(3), adaptive, CATCH_UP)
    planner(proposals)
    costs, apart = planner._costs, Costs.unknown(chains(3))
    record(apart, [wide, wide])
    record(apart, [narrow])
    assert costs.tried == apart.tried and costs.shares == apart.shares


def test_steps_of_a_life_are_numbered() -> None:
    planner = LocalPlanner(fixed())
    plans = [planner.plan(proposal) for proposal in (rows(1), IDLE, rows(1))]
    assert [plan.step for plan in plans] == [1, 2, 3]
    assert plans[1].key is None and plans[0].key == plans[2].key
