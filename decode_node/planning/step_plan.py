"""What a step shall be. Every rank of a gang makes a Proposal, one planner answers all of them with
one StepPlan, and what a rank then launches derives from that alone (design.md, Parallelism). Plain
Python.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.forms import EAGER
from tandem.core.request import ACCEPTANCES, STRICT
from tandem.decode_node.planning.rungs import Came, Rungs
from tandem.decode_node.planning.states import Running


@dataclass(frozen=True, slots=True)
class Extras:
    """What rows of any rank ask for that is not plain.

    ``has_rules``: some row adjusts its logits. ``kinds`` are kinds of acceptance (``kinds_of``).
    """

    all_greedy: bool = True
    has_rules: bool = False
    kinds: tuple[str, ...] = (STRICT,)


PLAIN, SAMPLED = Extras(), Extras(all_greedy=False)
MOST_EXTRAS = 48
"""There are so many: programs of one size and length are no more than these times amounts."""


def kinds_of(asked: Iterable[str]) -> tuple[str, ...]:
    """The kinds that a program judges by: those asked for, or all where several are beside strict
    rows, so that few programs serve all mixtures."""
    kinds = {*asked} or {STRICT}
    return tuple(sorted(ACCEPTANCES if len(kinds - {STRICT}) > 1 else kinds))


def extras_of_all(extras: Iterable[Extras]) -> Extras:
    """What these ask for together."""
    found = list(extras)
    return Extras(
        all(one.all_greedy for one in found),
        any(one.has_rules for one in found),
        kinds_of(kind for one in found for kind in one.kinds),
    )


@dataclass(frozen=True, slots=True)
class StepKey:
    """All that decides on a step's program, the same on every rank: so captured collectives are
    replayed by all ranks or by none (NCCL user guide, Using NCCL with CUDA Graphs).

    ``num_rows`` is the bucket, padding included; ``level`` how much is drafted (core/levels.py),
    ``catch_up`` what the drafter adds (core/forms.py).
    """

    num_rows: int
    level: int
    catch_up: int
    extras: Extras = PLAIN


SERVE, TRIAL, MAKE = "serve", "trial", "make"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step of all ranks. ``use`` is SERVE but for steps of nobody's rows: in a TRIAL all
    ranks run made-up ones, to learn what such a step costs; MAKE gets the program ready.

    ``number`` is the program's in the table of forms (forms.py), None for eager steps, which
    are ``is_settled`` if no better form will follow. ``num_context`` is the most that a proposal
    had.
    """

    key: StepKey
    use: str = SERVE
    number: int | None = None
    is_settled: bool = True
    num_context: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A step that was read: how long its program ran on this rank, and how many of the rank's rows
    came to each rung and went on (rungs.py). If it is not ``is_usual``, its next one will take less
    time. ``num_context`` is that of its plan."""

    key: StepKey
    program_s: float
    tried: tuple[int, ...]
    accepted: tuple[int, ...]
    is_usual: bool = True
    num_context: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """``num_rows_by_limit[k]`` of the rank's rows accept at most k drafts a step, and no row is
    further ``behind`` (core/forms.py); ``extras`` are those of its rows. ``form`` is the best that
    its programs can have; those of the keys ``refused`` cannot be made. It ``expects`` work while a
    prompt is being read. ``report`` is of the step read last, None if it was told already.
    ``num_context`` tokens are known of a row on average."""

    num_rows_by_limit: tuple[int, ...]
    behind: int = 0
    extras: Extras = PLAIN
    form: str = EAGER
    refused: tuple[StepKey, ...] = ()
    expects: bool = False
    report: Report | None = None
    num_context: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_by_limit)


def wishes_of(sequences: Sequence[Running], most_depth: int, **rest: Any) -> Proposal:
    """What follows from its rows, which may be none, and the ``rest`` of a Proposal."""
    limits = [sequence.limit for sequence in sequences]
    settings = [one.request.sampling for one in sequences]
    extras = Extras(
        all_greedy=all(one.temperature == 0 for one in settings),
        has_rules=any(one.adjusts_logits for one in settings),
        kinds=kinds_of(one.request.speculation.acceptance for one in sequences),
    )
    behind = max((one.behind for one in sequences), default=0)
    num_context = sum(one.num_known for one in sequences) // max(1, len(sequences))
    wanted = tuple(map(limits.count, range(most_depth + 1)))
    return Proposal(wanted, behind, extras, num_context=num_context, **rest)


def report_of(
    rungs: Rungs, plan: StepPlan, program_s: float, rows: Sequence[Came], is_usual: bool = True
) -> Report:
    """Of a step that brought its ``rows`` so far."""
    told = rungs.count(plan.key.level, rows)
    return Report(plan.key, program_s, *told, is_usual, plan.num_context)
