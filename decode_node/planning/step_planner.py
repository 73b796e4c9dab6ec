"""Who answers proposals with a plan. The decision is a pure function of all proposals, of the cost
table and of the table of forms, which only the planner keeps."""

from collections.abc import Iterable, Sequence

from core.config import TandemConfig
from core.forms import CAPTURED, EAGER, CatchUp
from decode_node.planning import lengths
from decode_node.planning.buckets import Buckets
from decode_node.planning.forms import Forms, usual_keys
from decode_node.planning.lengths import Costs, DraftLength
from decode_node.planning.step_plan import TRIAL, Proposal, StepKey, StepPlan, extras_of_all


class StepPlanner:
    """Decides by all ranks' proposals (runtime/lockstep.py: Decide). While nobody has or expects
    work, programs are made if ranks can (forms.py). Then, while nobody has work, what the cost
    table lacks is measured if it ``measures``.
    """

    def __init__(
        self,
        buckets: Buckets,
        max_drafts: int,
        length: DraftLength,
        catch_up: CatchUp,
        measures: bool = False,
        usual: Iterable[StepKey] = (),
    ) -> None:
        self._buckets, self._length, self._catch_up = buckets, length, catch_up
        self._costs = lengths.no_costs(max_drafts)
        self.measures = measures and length is lengths.by_load and max_drafts > 0
        self._forms = Forms(usual)

    @classmethod
    def of(cls, config: TandemConfig, max_drafts: int, catch_up: CatchUp) -> "StepPlanner":
        """As configured. Raises ValueError for batch sizes that are out of range."""
        decode, asked = config.decode, config.speculation
        buckets = Buckets.of(decode.batch_buckets, decode.max_rows, decode.device)
        least = max_drafts if asked.draft_length == lengths.FIXED else 0
        usual = usual_keys(buckets.sizes, range(least, max_drafts + 1), catch_up)
        length = lengths.LENGTHS[asked.draft_length]
        return cls(buckets, max_drafts, length, catch_up, asked.measure_at_start, usual)

    def __call__(self, proposals: Sequence[Proposal]) -> StepPlan | None:
        forms = {proposal.form for proposal in proposals}
        form = forms.pop() if len(forms) == 1 else EAGER
        told = self._costs, self._buckets, self._length, self._catch_up
        key, self._costs = plan_step(proposals, *told)
        for proposal in proposals:
            self._forms.refuse(proposal.refused)
        if key is not None:
            return self._forms.plan(key, form)
        if form == CAPTURED and self._forms.lacks:
            expects = any(proposal.expects for proposal in proposals)
            return None if expects else self._forms.make()
        if self.measures:
            key, self._costs = plan_trial(proposals, self._costs, self._buckets, self._catch_up)
        return None if key is None else self._forms.plan(key, form, TRIAL)


def plan_step(
    proposals: Sequence[Proposal],
    costs: Costs,
    buckets: Buckets,
    length: DraftLength,
    catch_up: CatchUp,
) -> tuple[StepKey | None, Costs]:
    """The step that suits all ranks, None if none has work; and the costs as known by now."""
    most = max(proposal.num_rows for proposal in proposals)
    if most == 0:
        return None, costs
    columns = zip(*(proposal.num_rows_by_limit for proposal in proposals), strict=True)
    num_rows = buckets.rows(most)
    num_drafts, costs = length(costs, _reports(proposals), num_rows, tuple(map(sum, columns)))
    amount = catch_up.amount(num_drafts, max(proposal.behind for proposal in proposals))
    extras = extras_of_all(proposal.extras for proposal in proposals if proposal.num_rows)
    return StepKey(num_rows, num_drafts, amount, extras), costs


def plan_trial(
    proposals: Sequence[Proposal], costs: Costs, buckets: Buckets, catch_up: CatchUp
) -> tuple[StepKey | None, Costs]:
    """A step that was not measured yet, None if all were; and the costs as known by now."""
    costs = lengths.all_recorded(costs, _reports(proposals))
    missing = lengths.untried(costs, buckets.sizes)
    if missing is None:
        return None, costs
    num_rows, num_drafts, costs = missing
    return StepKey(num_rows, num_drafts, catch_up.amount(num_drafts, catch_up.start)), costs


def _reports(proposals: Sequence[Proposal]) -> list[lengths.Report]:
    return [proposal.report for proposal in proposals if proposal.report is not None]
