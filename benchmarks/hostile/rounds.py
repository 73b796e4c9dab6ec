"""Rounds of honest requests with a hostile client, and with an equal load of CPU time."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.procs import ROOT, Serving, cpu_s, rss_mb
from benchmarks.hostile.burner import burning
from benchmarks.hostile.honest import Figures, measure, streams
from tandem import AsyncClient

MAX_ROUND_S = 180.0
LOOK_S = 0.2
END_S = 20.0
FIRST_ROUND, LAST_ROUND = 1, 4
"""Rounds between which a gateway's memory may grow by 20 MB: the second and the fifth."""


@dataclass
class Measured:
    """Rounds with one kind of hostile client, and rounds of the control.

    Attributes:
        rss_mb: Minimum of the gateway's resident memory in each round. It leaves out texts being
            tokenised, which take hundreds of MB for a moment.
        peaks_mb: Maximum of it in each round.
        hostile_rates: CPU seconds per second of the hostile client in each round.
        gateway_rates: The same of the gateway, beyond what honest requests cost it.
        counts: Outcomes of the hostile client's calls.
        lost: The gateway's log lines about lost ranks, and ranks that have restarted.
    """

    kind: str
    hostile: Figures = field(default_factory=Figures)
    control: Figures = field(default_factory=Figures)
    rss_mb: list[float] = field(default_factory=list)
    peaks_mb: list[float] = field(default_factory=list)
    hostile_rates: list[float] = field(default_factory=list)
    gateway_rates: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)

    @property
    def grown_mb(self) -> float:
        """Growth of the gateway from the second to the fifth round, 0 where there are fewer."""
        return self.rss_mb[LAST_ROUND] - self.rss_mb[FIRST_ROUND] if len(self.rss_mb) > 4 else 0.0


@contextmanager
def hostile_client(kind: str, server: Serving, http: str) -> Iterator[tuple[int, Counter[str]]]:
    """Run a hostile client during the block. Yields its pid and its counts, which are complete
    after the block."""
    words = ["--kind", kind, "--grpc", server.address, "--http", http, "--seconds", "600"]
    command = [sys.executable, "-m", "benchmarks.hostile.client", *words]
    counts = Counter[str]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the hostile client failed"
            yield process.pid, counts
            process.terminate()
            told, _ = process.communicate(timeout=END_S)
            counts.update(json.loads(told.splitlines()[-1]))
        finally:
            process.kill()


class Rounds:
    """Rounds on one server: each sends all ``texts`` over connections that stay open."""

    def __init__(
        self, server: Serving, http: str, clients: Sequence[AsyncClient], texts: Sequence[str]
    ) -> None:
        self._server = server
        self._http = http
        self._clients = clients
        self._texts = texts
        self._request_cpu_s = 0.0

    async def calibrate(self) -> Figures:
        """Measure requests alone, and what each costs the gateway in CPU time."""
        await self._round()
        before = cpu_s(self._server.process.pid)
        found = await self._round()
        spent = cpu_s(self._server.process.pid) - before
        self._request_cpu_s = spent / len(self._texts)
        return found

    async def measure(self, kind: str, num_rounds: int, on_round: Callable[[], None]) -> Measured:
        """Alternate between rounds with the hostile client and rounds of the control."""
        found = Measured(kind)
        num_logged, born = len(self._server.log), await self._lives()
        for _ in range(num_rounds):
            await self._beside_hostile(found)
            on_round()
            with burning(found.hostile_rates[-1], found.gateway_rates[-1]):
                found.control.add(await self._round())
            on_round()
        found.lost += [line for line in self._server.log[num_logged:] if " is lost " in line]
        lives = await self._lives()
        found.lost += [name for name in born if lives.get(name) != born[name]]
        return found

    async def _beside_hostile(self, found: Measured) -> None:
        gateway = self._server.process.pid
        with hostile_client(found.kind, self._server, self._http) as (pid, counts):
            before = cpu_s(pid), cpu_s(gateway), time.monotonic()
            samples: list[float] = []
            sampling = asyncio.create_task(_sample(gateway, samples))
            found.hostile.add(await self._round())
            sampling.cancel()
            after = cpu_s(pid), cpu_s(gateway), time.monotonic()
        passed_s = after[2] - before[2]
        spent_s = after[1] - before[1] - self._request_cpu_s * len(self._texts)
        found.hostile_rates.append((after[0] - before[0]) / passed_s)
        found.gateway_rates.append(max(0.0, spent_s / passed_s))
        found.rss_mb.append(min(samples))
        found.peaks_mb.append(max(samples))
        found.counts += counts

    async def _round(self) -> Figures:
        async with asyncio.timeout(MAX_ROUND_S):
            return await measure(self._clients, self._texts, (self._server.address, self._http))

    async def _lives(self) -> dict[str, Any]:
        """Return each rank's epoch, the epoch of its process, and its liveness, by name."""
        status = await self._clients[0].status()
        return {rank.name: (rank.epoch, rank.process_epoch, rank.alive) for rank in status.ranks}


async def _sample(pid: int, samples: list[float]) -> None:
    while True:
        samples.append(rss_mb(pid))
        await asyncio.sleep(LOOK_S)


async def run_all(
    server: Serving,
    http: str,
    kinds: Sequence[str],
    texts: Sequence[str],
    num_streams: int,
    num_rounds: int,
    on_round: Callable[[], None],
) -> tuple[Figures, list[Measured]]:
    """Measure requests alone, then with each kind."""
    async with streams(server.address, num_streams) as clients:
        rounds = Rounds(server, http, clients, texts)
        alone = await rounds.calibrate()
        return alone, [await rounds.measure(kind, num_rounds, on_round) for kind in kinds]
