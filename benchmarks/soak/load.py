"""The load: a fixed number of requests in flight, until enough were sent or the time is up."""

import asyncio
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.freed import Freed
from benchmarks.soak.plans import ABORT, DEADLINE, DROP, Plan
from tandem import AsyncClient, InferenceError
from tandem.core.answer import Delta, Finished, TokenLogprobs

FIRST_TYPICAL_S = 1.0
MIN_DEADLINE_S = 0.01


@dataclass
class Answer:
    """Output of one of a request's answers; ``reason`` is empty if it did not end."""

    plan: Plan
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str = ""

    def take(self, piece: Delta | Finished) -> None:
        self.token_ids += piece.token_ids
        self.text += piece.text
        if isinstance(piece, Delta):
            self.logprobs += piece.logprobs
        else:
            self.reason = piece.finish_reason


@dataclass
class Tally:
    """Outcomes of all requests. ``ends`` counts by kind, and cancellations by phase.

    An abort is missed if its request has just ended or is not admitted yet.
    """

    ends: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    num_tokens: int = 0
    num_aborts_missed: int = 0

    def typical_s(self) -> float:
        """Return the median duration of recent whole answers in seconds."""
        return statistics.median(self.durations_s) if self.durations_s else FIRST_TYPICAL_S


class Load:
    """Sends requests. ``on_end`` is called after every request, however it ends."""

    def __init__(
        self, client: AsyncClient, freed: Freed, on_end: Callable[[Tally], None], hang_s: float
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._freed = freed
        self._on_end = on_end
        self._hang_s = hang_s
        self._progress_at: dict[str, float] = {}

    async def run(self, plans: Iterator[Plan], in_flight: int, until: float) -> Tally:
        """Send requests until ``plans`` end or the monotonic time ``until``; a hang ends it too."""
        workers = [asyncio.create_task(self._work(plans, until)) for _ in range(in_flight)]
        watchdog = asyncio.create_task(self._watch(workers))
        await asyncio.gather(*workers, return_exceptions=True)
        watchdog.cancel()
        for worker in workers:
            if not worker.cancelled():
                worker.result()
        return self.tally

    async def _watch(self, workers: list["asyncio.Task[None]"]) -> None:
        """End the load if a stream makes no progress for too long."""
        stuck: list[str] = []
        while not stuck:
            await asyncio.sleep(min(1.0, self._hang_s))
            limit = time.monotonic() - self._hang_s
            stuck = [name for name, at in self._progress_at.items() if at < limit]
        self.tally.errors.append(f"hang: no progress for {self._hang_s:g} s of {stuck}")
        for worker in workers:
            worker.cancel()

    async def _work(self, plans: Iterator[Plan], until: float) -> None:
        while time.monotonic() < until and (plan := next(plans, None)) is not None:
            self._progress_at[plan.name] = time.monotonic()
            await self._ask(plan)
            del self._progress_at[plan.name]
            self._on_end(self.tally)

    async def _ask(self, plan: Plan) -> None:
        """Run one request to its planned end, or to an earlier one."""
        answers = [Answer(plan, i) for i in range(plan.options.get("n", 1))]
        after_s, began_at = plan.moment * self.tally.typical_s(), time.monotonic()
        options = plan.options | {"request_id": plan.name}
        if plan.ending == DEADLINE:
            options["timeout_s"] = max(MIN_DEADLINE_S, after_s)
        stream = asyncio.create_task(self._follow(plan, options, answers))
        try:
            if plan.ending in (DROP, ABORT):
                await self._end_after(after_s, plan, stream)
            await asyncio.wait([stream])
        finally:
            stream.cancel()
        kind = self._kind(plan, stream)
        if kind == "finished":
            self.tally.durations_s.append(time.monotonic() - began_at)
        else:
            kind += " after its first token" if answers[0].token_ids else " before its first token"
        self.tally.ends[kind] += 1
        self.tally.answers += [answer for answer in answers if answer.token_ids]

    async def _end_after(self, after_s: float, plan: Plan, stream: "asyncio.Task[str]") -> None:
        done, _ = await asyncio.wait([stream], timeout=after_s)
        if done:
            return
        self._freed.ended(plan.name)
        if plan.ending == DROP:
            stream.cancel()
        elif not await self._client.abort(plan.name):
            self.tally.num_aborts_missed += 1

    def _kind(self, plan: Plan, stream: "asyncio.Task[str]") -> str:
        if stream.cancelled():
            return "dropped"
        error = stream.exception()
        if error is None and stream.result() in ("stop", "length"):
            return "finished"
        if error is None and stream.result() == "abort" and plan.ending == ABORT:
            return "aborted"
        code = error.code.name if isinstance(error, InferenceError) else ""
        if code == "DEADLINE_EXCEEDED" and plan.ending == DEADLINE:
            return "expired"
        what = repr(error) if error is not None else f"ended with {stream.result()!r}"
        self.tally.errors.append(f"{plan.name}, {len(plan.ids)} tokens, {plan.options}: {what}")
        return "failed"

    async def _follow(self, plan: Plan, options: dict[str, Any], answers: list[Answer]) -> str:
        """Read the stream; return the last finish reason."""
        async with aclosing(self._client.generate(plan.ids, **options)) as pieces:
            async for piece in pieces:
                answers[piece.index].take(piece)
                self.tally.num_tokens += len(piece.token_ids)
                self._progress_at[plan.name] = time.monotonic()
        return answers[piece.index].reason


async def run_alone(client: AsyncClient, plan: Plan, changes: dict[str, Any]) -> Answer:
    """Return one answer to the plan's request with some options changed, while nothing else
    runs."""
    answer = Answer(plan, 0)
    async for piece in client.generate(plan.ids, **(plan.options | changes)):
        answer.take(piece)
    return answer


async def nothing_left(client: AsyncClient, timeout_s: float = 10.0) -> bool:
    """Return whether the nodes hold nothing of any request, waiting at most ``timeout_s``."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        status = await client.status()
        held = status.num_running + sum(
            n.max_tokens - n.num_free_tokens + n.num_open_leases + n.num_active_rows
            for n in status.ranks
        )
        if not held:
            return True
        await asyncio.sleep(0.1)
    return False
