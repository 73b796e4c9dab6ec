"""In which form each program runs: the one table of it, which the planner keeps for all ranks."""

from collections import OrderedDict
from collections.abc import Iterable

from tandem.core.forms import CAPTURED, EAGER, CatchUp
from tandem.core.levels import Levels
from tandem.decode_node.planning.step_plan import MAKE, PLAIN, SAMPLED, SERVE, StepKey, StepPlan

MAX_KEPT = 256
"""Programs that ranks keep. The one unused for longest makes room for another."""
MOST_EAGER = 128
"""Steps for which a program is not made because somebody would wait. Making one takes about as long
as these lose."""
MOST_REFUSED = 3
"""Programs that cannot be made, after which no more are tried: each try in a gang ends a life."""


class Forms:
    """Programs by key. Where ranks record, the first step that wants a program makes it. Where they
    capture, programs are made by steps of their own: the ``usual`` ones and what was asked for
    while nobody has work, or else after MOST_EAGER steps without; until then their steps are
    eager. One that a rank refuses is eager for good, and changes nothing for the others.
    """

    def __init__(self, usual: Iterable[StepKey] = ()) -> None:
        self._asked = dict.fromkeys(usual, 0)
        """Not made yet, and for how many steps each was asked for."""
        self._numbers: OrderedDict[StepKey, int] = OrderedDict()
        """Of what ranks keep; the one unused for longest first."""
        self._free = list(range(MAX_KEPT - 1, -1, -1))
        self._refused: set[StepKey] = set()

    def refuse(self, keys: Iterable[StepKey]) -> None:
        """A rank could not make these."""
        for key in keys:
            self._refused.add(key)
            self._asked.pop(key, None)
            if key in self._numbers:
                self._free.append(self._numbers.pop(key))

    def plan(self, key: StepKey, form: str, use: str = SERVE) -> StepPlan:
        """That step where ``form`` is the best that all ranks can have, or what gets its program
        ready."""
        if key in self._numbers:
            self._numbers.move_to_end(key)
            return StepPlan(key, use, self._numbers[key])
        if form == EAGER or key in self._refused or not self._makes:
            return StepPlan(key, use)
        if form != CAPTURED:
            return StepPlan(key, use, self._number(key))
        num_asked = self._asked[key] = self._asked.get(key, 0) + 1
        return self._make(key) if num_asked > MOST_EAGER else StepPlan(key, use, is_settled=False)

    @property
    def lacks(self) -> bool:
        """Whether a program is to be made while nobody has work."""
        return bool(self._asked) and self._makes

    def make(self) -> StepPlan:
        """What gets the first of those ready."""
        return self._make(next(iter(self._asked)))

    @property
    def _makes(self) -> bool:
        return len(self._refused) < MOST_REFUSED

    def _make(self, key: StepKey) -> StepPlan:
        del self._asked[key]
        return StepPlan(key, MAKE, self._number(key))

    def _number(self, key: StepKey) -> int:
        number = self._free.pop() if self._free else self._numbers.popitem(last=False)[1]
        self._numbers[key] = number
        return number


def usual_keys(
    sizes: Iterable[int], levels: Levels, catch_up: CatchUp, least: int = 0
) -> list[StepKey]:
    """Of steps with nothing but greedy rows and of those with sampled ones, the largest first, of
    levels from ``least`` on."""
    return [
        StepKey(num_rows, level, amount, extras)
        for num_rows in sorted(sizes, reverse=True)
        for level in range(least, len(levels))
        for amount in catch_up.usual(levels[level].depth)
        for extras in (PLAIN, SAMPLED)
    ]
