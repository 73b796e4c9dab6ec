"""Who answers proposals with a plan. The decision is a pure function of all proposals and of the
cost table, which only the planner keeps."""

from collections.abc import Sequence

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
from decode_node.plan import Proposal, Report, StepKey, pass_width


class StepPlanner:
    """Decides by all ranks' proposals (runtime/lockstep.py: Decide). ``draft_length`` is a name
    (draft_length.py). ``measures``: what the cost table lacks is measured while nobody has work."""

    def __init__(
        self, buckets: Buckets, max_drafts: int, draft_length: str, measures: bool = False
    ) -> None:
        self._buckets = buckets
        self._length = LENGTHS[draft_length]
        self._costs = no_costs(max_drafts)
        self.measures = measures and self._length is by_load and max_drafts > 0

    def __call__(self, proposals: Sequence[Proposal]) -> StepKey | None:
        key, self._costs = plan_step(proposals, self._costs, self._buckets, self._length)
        if key is None and self.measures:
            key, self._costs = plan_trial(proposals, self._costs, self._buckets)
        return key


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
    plain = all(proposal.plain for proposal in proposals)
    return StepKey(num_rows, num_drafts, width, plain), costs


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
    return StepKey(num_rows, num_drafts, width, plain=True, trial=True), costs


def _reports(proposals: Sequence[Proposal]) -> list[Report]:
    return [proposal.report for proposal in proposals if proposal.report is not None]
