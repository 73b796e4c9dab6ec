"""Load generator: sends requests and records when each message arrived."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tandem.cluster.bench.node_use import NodeUsage
from tandem.cluster.bench.workload import Job
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.client.options import GenerateOptions
from tandem.cluster.client.stream import InferenceError
from tandem.cluster.entrypoints.status_codes import status_of
from tandem.core.answer import Finished
from tandem.core.request import ABORT, ERROR


@dataclass(frozen=True, slots=True)
class Record:
    """Timeline of one request, in seconds after the start of its run.

    Attributes:
        due_s: When the request should have been sent: its scheduled arrival in an open loop, else
            ``sent_s``.
        sent_s: When the request was sent.
        end_s: When its stream ended.
        messages: Arrival time and number of tokens of each message.
        finished: Last piece; None if the call failed.
        error: ``CODE: details``; None on success.
    """

    due_s: float
    sent_s: float
    end_s: float
    messages: tuple[tuple[float, int], ...] = ()
    finished: Finished | None = None
    error: str | None = None

    @property
    def code(self) -> str | None:
        """gRPC code of the error; None on success."""
        return None if self.error is None else self.error.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one uninterrupted run.

    Attributes:
        records: Requests that were sent.
        num_not_sent: Number of jobs that were not sent before the time was up.
        use: Use of the decode nodes during the run.
    """

    records: tuple[Record, ...]
    num_not_sent: int
    use: NodeUsage = NodeUsage()

    @property
    def duration_s(self) -> float:
        """Seconds from the start until the last request ended."""
        return max((record.end_s for record in self.records), default=0.0)


class LoadGenerator:
    """Puts load on one server, for one run. ``on_end`` is called after every request."""

    def __init__(
        self, client: AsyncClient, options: GenerateOptions, on_end: Callable[[], None]
    ) -> None:
        self._client = client
        self._options = options
        self._on_end = on_end
        self._started_at = time.perf_counter()

    async def open_loop(self, jobs: Sequence[Job], due_s: Sequence[float], stop_s: float) -> Run:
        """Send each job when it is due, even if earlier requests are still running.

        ``due_s`` and ``stop_s`` are seconds after the start. Jobs due after ``stop_s`` are not
        sent.
        """
        tasks: list[asyncio.Task[Record]] = []
        async with asyncio.TaskGroup() as group:
            for job, due in zip(jobs, due_s, strict=True):
                if due > stop_s:
                    break
                await asyncio.sleep(max(0.0, due - self._now_s()))
                tasks.append(group.create_task(self._send(job, len(tasks), due)))
        return Run(tuple(task.result() for task in tasks), len(jobs) - len(tasks))

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int, stop_s: float) -> Run:
        """Keep ``concurrency`` requests running until no job is left.

        No request is sent later than ``stop_s`` seconds after the start.
        """
        records: list[Record] = []
        queue = iter(enumerate(jobs))

        async def work() -> None:
            while self._now_s() < stop_s and (entry := next(queue, None)) is not None:
                records.append(await self._send(entry[1], entry[0]))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
        return Run(tuple(records), len(jobs) - len(records))

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_at

    async def _send(self, job: Job, index: int, due_s: float | None = None) -> Record:
        sent_s = self._now_s()
        messages: list[tuple[float, int]] = []
        finished, error = await self._receive(job, index, messages)
        end_s = self._now_s()
        self._on_end()
        due = sent_s if due_s is None else due_s
        return Record(
            due_s=due,
            sent_s=sent_s,
            end_s=end_s,
            messages=tuple(messages),
            finished=finished,
            error=error,
        )

    async def _receive(
        self, job: Job, index: int, messages: list[tuple[float, int]]
    ) -> tuple[Finished | None, str | None]:
        options = GenerateOptions(**self._options)
        options["max_tokens"] = job.max_tokens
        options["seed"] = (self._options.get("seed") or 0) + index
        try:
            async with aclosing(self._client.generate(job.prompt, **options)) as stream:
                async for piece in stream:
                    if isinstance(piece, Finished):
                        return piece, _problem(piece)
                    if piece.token_ids:
                        messages.append((self._now_s(), len(piece.token_ids)))
        except InferenceError as failure:
            return None, f"{failure.code.name}: {failure.details}"
        except Exception as failure:
            status = status_of(failure)
            return None, f"{status.code.name}: {status.details}"
        raise AssertionError("a stream must end with a Finished piece or an error")


def _problem(finished: Finished) -> str | None:
    if finished.finish_reason == ABORT:
        return "ABORTED: the request was aborted"
    if finished.finish_reason == ERROR:
        return f"INTERNAL: {finished.error}"
    return None
