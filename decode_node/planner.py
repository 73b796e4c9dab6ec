"""Who answers proposals with a plan. The decision is a pure function of all proposals and of the
cost table, which only the planner keeps."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from decode_node.buckets import Buckets
from decode_node.draft_length import (
    LENGTHS,
    Costs,
    DraftLength,
    all_recorded,
    by_load,
    no_costs,
    untried,
)
from decode_node.plan import (
    MAKE,
    SERVE,
    TRIAL,
    Proposal,
    Report,
    StepKey,
    extras_of_all,
    keep,
    pass_width,
)

MOST_EAGER = 128
"""Steps for which a program is not made because somebody would wait. Making one takes about as long
as these lose."""


class StepPlanner:
    """Decides by all ranks' proposals (runtime/lockstep.py: Decide). ``draft_length`` is a name
    (draft_length.py). While nobody has or expects work, programs are made if ranks can: those
    ``to_make``, and then others that were asked for. Then, while nobody has work, what the cost
    table lacks is measured if it ``measures``.
    """

    def __init__(
        self,
        buckets: Buckets,
        max_drafts: int,
        draft_length: str,
        measures: bool = False,
        to_make: Iterable[StepKey] = (),
    ) -> None:
        self._buckets = buckets
        self._length = LENGTHS[draft_length]
        self._costs = no_costs(max_drafts)
        self.measures = measures and self._length is by_load and max_drafts > 0
        self._to_make = dict.fromkeys(to_make, 0)
        """And for how many steps each was asked for."""
        self._made: OrderedDict[StepKey, None] = OrderedDict()
        """What ranks keep (program.py)."""

    def __call__(self, proposals: Sequence[Proposal]) -> StepKey | None:
        key, self._costs = plan_step(proposals, self._costs, self._buckets, self._length)
        can_make = all(proposal.can_make for proposal in proposals)
        if key is not None:
            return self._program(key) if can_make else key
        if can_make and self._to_make:
            expects = any(proposal.expects for proposal in proposals)
            return None if expects else self._make(next(iter(self._to_make)))
        if self.measures:
            key, self._costs = plan_trial(proposals, self._costs, self._buckets)
            if key is not None:
                self._is_made(replace(key, use=SERVE))
        return key

    def _is_made(self, key: StepKey) -> bool:
        if key not in self._made:
            return False
        keep(self._made, key, None)
        return True

    def _program(self, key: StepKey) -> StepKey:
        """That step, or what gets its program ready."""
        if self._is_made(key):
            return key
        num_asked = self._to_make[key] = self._to_make.get(key, 0) + 1
        return self._make(key) if num_asked > MOST_EAGER else key

    def _make(self, key: StepKey) -> StepKey:
        del self._to_make[key]
        keep(self._made, key, None)
        return replace(key, use=MAKE)


def plan_step(
    proposals: Sequence[Proposal], costs: Costs, buckets: Buckets, length: DraftLength
) -> tuple[StepKey | None, Costs]:
    """The step that suits all ranks, None if none has work; and the costs as known by now."""
    most = max(proposal.num_rows for proposal in proposals)
    if most == 0:
        return None, costs
    columns = zip(*(proposal.num_rows_by_limit for proposal in proposals), strict=True)
    wanted = tuple(map(sum, columns))
    num_rows = buckets.rows(most)
    num_drafts, costs = length(costs, _reports(proposals), num_rows, wanted)
    num_pending = max(proposal.num_pending_most for proposal in proposals)
    width = pass_width(num_drafts, num_pending, len(wanted) - 1)
    extras = extras_of_all(proposal.extras for proposal in proposals if proposal.num_rows)
    return StepKey(num_rows, num_drafts, width, extras), costs


def plan_trial(
    proposals: Sequence[Proposal], costs: Costs, buckets: Buckets
) -> tuple[StepKey | None, Costs]:
    """A step that was not measured yet, None if all were; and the costs as known by now."""
    costs = all_recorded(costs, _reports(proposals))
    missing = untried(costs, buckets.sizes)
    if missing is None:
        return None, costs
    num_rows, num_drafts = missing
    width = pass_width(num_drafts, 1, len(proposals[0].num_rows_by_limit) - 1)
    return StepKey(num_rows, num_drafts, width, use=TRIAL), costs


def _reports(proposals: Sequence[Proposal]) -> list[Report]:
    return [proposal.report for proposal in proposals if proposal.report is not None]
