"""Rounds of proposals and plans. In any order of messages, all ranks take the same steps and none
waits indefinitely."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.runtime.gang.proposal_rounds import ProposalRounds


def total(proposals: list[int]) -> int | None:
    return sum(proposals) or None


def test_a_plan_waits_for_everybody_and_the_silent_are_asked_once() -> None:
    rounds = ProposalRounds[int, int](3, total)
    assert rounds.ranks_to_poll() == [] and rounds.plan() is None, (
        "nobody is asked while nobody has work"
    )
    rounds.propose(1, 1, 5)
    assert rounds.ranks_to_poll() == [0, 2] and rounds.ranks_to_poll() == []
    rounds.propose(0, 1, 0)
    assert rounds.plan() is None and rounds.ranks_to_poll() == []
    rounds.propose(2, 1, 2)
    assert rounds.plan() == (1, 7) and rounds.plan() is None
    assert rounds.ranks_to_poll() == [], "parked"


def test_entering_is_idempotent_and_remembered_if_early() -> None:
    rounds = ProposalRounds[int, int](2, total)
    rounds.propose(0, 1, 3)
    rounds.propose(0, 1, 3)
    rounds.propose(0, 2, 4)
    assert rounds.ranks_to_poll() == [1]
    rounds.propose(1, 1, 1)
    assert rounds.plan() == (1, 4)
    rounds.propose(1, 1, 9)
    assert rounds.ranks_to_poll() == [1], "what came early wants the next step"
    rounds.propose(1, 2, 0)
    assert rounds.plan() == (2, 4)


def test_a_step_that_nobody_has_work_for_is_planned_as_none() -> None:
    rounds = ProposalRounds[int, int](2, total)
    rounds.propose(0, 1, 0)
    rounds.propose(1, 1, 0)
    assert rounds.plan() == (1, None)


class Ranks:
    """Ranks that behave as their engines do: a rank proposes if it has work or was polled."""

    def __init__(self, work: list[list[int]]) -> None:
        self.work = work
        self.rounds = ProposalRounds[int, int](len(work), total)
        self.next = [1] * len(work)
        self.asked = [0] * len(work)
        self.waiting = [False] * len(work)
        self.told: list[list[tuple[int, int | None]]] = [[] for _ in work]
        self.sent: list[tuple[int, int, int]] = []

    def wants(self, rank: int) -> bool:
        return bool(self.work[rank]) or self.asked[rank] >= self.next[rank]

    def can_enter(self) -> list[int]:
        return [r for r in range(len(self.work)) if not self.waiting[r] and self.wants(r)]

    def enter(self, rank: int) -> None:
        num = self.work[rank].pop(0) if self.work[rank] else 0
        self.sent.append((rank, self.next[rank], num))
        self.waiting[rank] = True

    def deliver(self, index: int) -> None:
        self.rounds.propose(*self.sent.pop(index))
        self._ask()
        while (planned := self.rounds.plan()) is not None:
            for rank, told in enumerate(self.told):
                told.append(planned)
                self.waiting[rank] = False
                self.next[rank] = planned[0] + 1
            self._ask()

    def _ask(self) -> None:
        for rank in self.rounds.ranks_to_poll():
            self.asked[rank] = self.rounds.step


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4),
    data=st.data(),
)
def test_whatever_the_order_all_take_the_same_steps_and_all_work_is_done(
    work: list[list[int]], data: st.DataObject
) -> None:
    ranks = Ranks([list(one) for one in work])
    while True:
        moves = [("enter", rank) for rank in ranks.can_enter()]
        moves += [("deliver", index) for index in range(len(ranks.sent))]
        if not moves:
            break
        kind, which = data.draw(st.sampled_from(moves))
        getattr(ranks, kind)(which)
    assert not any(ranks.work) and not any(ranks.waiting), "somebody waits for ever"
    assert all(told == ranks.told[0] for told in ranks.told)
    assert [step for step, _ in ranks.told[0]] == list(range(1, len(ranks.told[0]) + 1))
    assert sum(key or 0 for _, key in ranks.told[0]) == sum(map(sum, work))
