"""How long nodes still hold a request after its client ended it, measured at their controls."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tandem.cluster.gateway.handles import RankHandle
from tandem.core.control import Control, Empty
from tandem.core.errors import TandemError
from tandem.core.identity import Identity
from tandem.core.schema import decode, pack, unpack
from tandem.core.tasks import Tasks
from tandem.prefill_node.prefill_calls import Prefill

POLL_S = 0.002
BOUND_MS = 100
"""Target for Tandem itself, counted from the next step."""


class Freed:
    """Measures the time from a client's drop or abort until a node holds nothing of the request.

    A node answers ``status`` between two steps, so a status call shows when the next step has
    ended. A decode node answers ``abort`` when row and pages are free. A prefill node refuses to
    renew a lease that has ended, and answers a later status when the pages are free. Nodes that
    hold nothing of a request yet, as while it is queued, are left out.
    """

    def __init__(self, handles: Sequence[RankHandle]) -> None:
        self._controls: dict[str, Control] = {}
        self._ended_at: dict[str, float] = {}
        self._stepped_at: dict[tuple[str, str], float] = {}
        self._freed_at: list[tuple[str, str, float]] = []
        self._leases: dict[str, dict[Identity, str]] = {}
        self._tasks = Tasks()
        for handle in handles:
            self._controls[handle.info.spec.label] = handle.control
            handle.control = _Watched(handle, self)

    def ended(self, name: str) -> None:
        """Record that the client ends this request now."""
        self._ended_at[name] = time.monotonic()
        for node in self._controls:
            self._tasks.start(self._next_step(name, node))
        for identity, node in self._leases.get(name, {}).items():
            self._tasks.start(self._release(name, node, identity))

    def offered(self, node: str, identity: Identity) -> None:
        """Record that a prefill node gets a prompt, which it will hold under a lease."""
        self._leases.setdefault(identity.request_id, {})[identity] = node

    def freed(self, name: str, node: str) -> None:
        """Record that the node holds nothing of the request, if its client has ended it."""
        if name in self._ended_at:
            self._freed_at.append((name, node, time.monotonic()))

    async def _next_step(self, name: str, node: str) -> None:
        await self._controls[node].call("ping", b"")
        self._stepped_at[name, node] = time.monotonic()

    async def _release(self, name: str, node: str, identity: Identity) -> None:
        control = self._controls[node]
        try:
            while decode(Empty, await control.call("renew", pack(identity))):
                await asyncio.sleep(POLL_S)
        except TandemError:
            await control.call("ping", b"")
            self.freed(name, node)

    async def summary(self) -> dict[str, Any]:
        """Return the milliseconds since the end, and since the step after it, for each node."""
        await self._tasks.finish()
        found: dict[str, Any] = {}
        for node in self._controls:
            freed = [(name, at) for name, where, at in self._freed_at if where == node]
            after_s = [at - self._ended_at[name] for name, at in freed]
            after_step_s = [at - self._stepped_at[name, node] for name, at in freed]
            found[f"{node}, since the end"] = _quantiles(after_s)
            found[f"{node}, since the next step"] = _quantiles(after_step_s)
        return found


class _Watched(Control):
    def __init__(self, handle: RankHandle, freed: Freed) -> None:
        self._node = handle.info.spec.label
        self._control = handle.control
        self._freed = freed

    async def call(self, method: str, payload: bytes) -> bytes:
        if method == "prefill":
            self._freed.offered(self._node, unpack(Prefill, payload).identity)
        answer = await self._control.call(method, payload)
        if method == "abort":
            self._freed.freed(unpack(Identity, payload).request_id, self._node)
        return answer


def _quantiles(values_s: list[float]) -> dict[str, float]:
    if len(values_s) < 2:
        return {"num": len(values_s)}
    values_ms = [max(0.0, value) * 1e3 for value in values_s]
    cuts = statistics.quantiles(values_ms, n=100, method="inclusive")
    return {
        "num": len(values_ms),
        f"num_over_{BOUND_MS}_ms": sum(value > BOUND_MS for value in values_ms),
        "p50_ms": round(cuts[49], 1),
        "p99_ms": round(cuts[98], 1),
        "max_ms": round(max(values_ms), 1),
    }
