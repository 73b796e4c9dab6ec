"""What a step shall be. Every rank of a gang makes a Proposal, one planner answers all of them with
one Plan, and what a rank then launches derives from the plan alone (design.md, Parallelism).
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeVar

from core.request import STRICT
from decode_node.sequence import Sequence

MAX_KEPT = 256
"""Programs beyond them are made again when they are asked for: those not used for longest."""
Name = TypeVar("Name")
Kept = TypeVar("Kept")


def keep(kept: OrderedDict[Name, Kept], name: Name, what: Kept) -> None:
    """It was used or made now. The planner and every rank, which do so in the same order, let go of
    the same ones."""
    kept[name] = what
    kept.move_to_end(name)
    if len(kept) > MAX_KEPT:
        kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Extras:
    """What rows of any rank ask for that is not plain.

    ``has_rules``: some row adjusts its logits. ``num_logprobs`` is the most that any row asks
    for, None if none does. ``kinds`` are the kinds of acceptance of all rows, sorted.
    """

    all_greedy: bool = True
    has_rules: bool = False
    num_logprobs: int | None = None
    kinds: tuple[str, ...] = (STRICT,)


PLAIN, SAMPLED = Extras(), Extras(all_greedy=False)
SERVE, TRIAL, MAKE = "serve", "trial", "make"


@dataclass(frozen=True, slots=True)
class StepKey:
    """All that decides on a step's program, the same on every rank: so captured collectives are
    replayed by all ranks or by none (NCCL user guide, Using NCCL with CUDA Graphs).

    ``num_rows`` is the bucket, padding included; ``width`` how many tokens of a row the drafter's
    pass 1 catches up with, 0 if that is put off. ``use`` is SERVE but for steps of nobody's rows:
    in a TRIAL all ranks run made-up ones, to learn what such a step costs; MAKE gets the program
    ready.
    """

    num_rows: int
    num_drafts: int
    width: int
    extras: Extras = PLAIN
    use: str = SERVE


MOST_PENDING = 16
"""Tokens of a row that a drafter can catch up with at once. Without drafts it is called every so
many steps: the more can wait, the less each costs, and the longer is the one that catches up."""


def row_width(max_drafts: int) -> int:
    """How many tokens of a row can be pending."""
    return max(max_drafts + 1, MOST_PENDING) if max_drafts else 1


def pass_width(num_drafts: int, num_pending: int, max_drafts: int) -> int:
    """Of a step's pass 1. Without drafts it waits until no more can be pending."""
    widest = row_width(max_drafts)
    if num_drafts == 0 and num_pending < widest:
        return 0
    return next(w for w in (num_drafts + 1, max_drafts + 1, widest) if num_pending <= w)


def usual_programs(sizes: Items[int], max_drafts: int, is_fixed: bool) -> list[StepKey]:
    """Of steps with nothing but greedy rows and of those with sampled ones, the largest first;
    ``is_fixed``: always with as many drafts."""
    widest, found = row_width(max_drafts), list[StepKey]()
    for num_rows in sorted(sizes, reverse=True):
        for n in [max_drafts] if is_fixed else range(max_drafts + 1):
            for num_pending in (1,) if n else (1, widest):
                width = pass_width(n, num_pending, max_drafts)
                found += [StepKey(num_rows, n, width, extras) for extras in (PLAIN, SAMPLED)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Report:
    """A step that was read: how long its program ran on this rank, how many of the rank's rows
    tried draft k + 1 (those before it were accepted), and how many of these accepted it. If it is
    not ``is_usual``, its next one will take less time."""

    key: StepKey
    program_s: float
    tried: tuple[int, ...]
    accepted: tuple[int, ...]
    is_usual: bool = True


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank wants of the next step. ``num_rows_by_limit[k]`` of its rows use at most k
    drafts, up to n_max; no row has more than ``num_pending_most`` tokens that are new to the
    drafter. ``extras`` are those of its rows. Programs are made only if every rank ``can_make``
    them, and seldom where one ``expects`` work: a prompt is being read. ``report`` is of the step
    read last, None if it was told already."""

    num_rows_by_limit: tuple[int, ...]
    num_pending_most: int
    extras: Extras = PLAIN
    can_make: bool = False
    expects: bool = False
    report: Report | None = None

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_by_limit)


def propose(
    sequences: Items[Sequence],
    max_drafts: int,
    report: Report | None,
    can_make: bool = False,
    expects: bool = False,
) -> Proposal:
    """A step of ``sequences``, which may be none."""
    num_rows_by_limit = [0] * (max_drafts + 1)
    for sequence in sequences:
        num_rows_by_limit[sequence.limit] += 1
    return Proposal(
        num_rows_by_limit=tuple(num_rows_by_limit),
        num_pending_most=max((one.num_pending_most for one in sequences), default=1),
        extras=extras_of(sequences),
        can_make=can_make,
        expects=expects,
        report=report,
    )


def extras_of(sequences: Items[Sequence]) -> Extras:
    settings = [sequence.request.sampling for sequence in sequences]
    asked = [one.logprobs for one in settings if one.logprobs is not None]
    kinds = {sequence.request.speculation.acceptance for sequence in sequences}
    return Extras(
        all_greedy=all(one.temperature == 0 for one in settings),
        has_rules=any(one.adjusts_logits for one in settings),
        num_logprobs=max(asked, default=None),
        kinds=tuple(sorted(kinds)) or PLAIN.kinds,
    )


def extras_of_all(extras: Iterable[Extras]) -> Extras:
    """What these, of one at least, ask for together."""
    first, *others = extras
    for one in others:
        nums = [num for num in (first.num_logprobs, one.num_logprobs) if num is not None]
        first = Extras(
            first.all_greedy and one.all_greedy,
            first.has_rules or one.has_rules,
            max(nums, default=None),
            tuple(sorted({*first.kinds, *one.kinds})),
        )
    return first


def report_of(
    key: StepKey, program_s: float, rows: Items[tuple[int, int]], is_usual: bool = True
) -> Report:
    """``rows`` are each row's limit and how many drafts it accepted."""
    places = range(key.num_drafts)
    return Report(
        key,
        program_s,
        tried=tuple(sum(limit > k and num >= k for limit, num in rows) for k in places),
        accepted=tuple(sum(num > k for _, num in rows) for k in places),
        is_usual=is_usual,
    )
