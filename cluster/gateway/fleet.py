"""The ranks that a gateway uses: always those of the latest membership, nothing else.

New ranks are warmed before they get requests, those found lost are left out until they answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.gateway.frame_reader import FrameReader
from cluster.gateway.handles import DecodeHandle, Handle, PrefillHandle
from core.control import Control
from core.identity import Identity
from core.info import COLOCATED, DECODE, PREFILL, NodeStatus
from core.membership import Member, Membership
from core.schema import decode

log = logging.getLogger(__name__)
PROBE_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Members(Protocol):
    """The cluster's membership as a gateway follows it (cluster/control/members.py)."""

    @property
    def membership(self) -> Membership:
        """The latest snapshot; it serves on while there is no controller."""

    async def changed(self, after: tuple[int, int]) -> Membership:
        """The next snapshot of a version above ``after``."""

    def control(self, member: Member) -> Control:
        """Calls to this life of a rank."""

    def report(self, gang: str, epoch: int, reason: str) -> None:
        """Tell the controller of a suspicion."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Where an attempt runs; the same rank twice in colocated mode."""

    prefill: PrefillHandle
    decode: DecodeHandle
    identity: Identity


class Fleet:
    """Owned by one asyncio loop. ``warm`` sends a request over a new pair."""

    def __init__(
        self,
        members: Members,
        session: int,
        beat_s: float,
        warm: Callable[[Pair], Awaitable[None]],
    ) -> None:
        self.session = session
        self.prefills: dict[str, PrefillHandle] = {}
        self.decodes: dict[str, DecodeHandle] = {}
        self._members = members
        self._beat_s = beat_s
        self._warm = warm
        self._readers: dict[str, FrameReader] = {}
        self._warming: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._apply(members.membership)
        self._follower = asyncio.create_task(self._follow(), name="membership")

    async def ready(self) -> None:
        """Every pair of today's ranks is warm. Raises what kept one from it."""
        await asyncio.gather(*self._warming.values())

    async def stop(self) -> None:
        tasks = [self._follower, *self._warming.values(), *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for reader in self._readers.values():
            await reader.stop()

    def usable(self) -> list[tuple[PrefillHandle, DecodeHandle]]:
        """Warm pairs of ranks that cache alike and are not lost."""
        return [
            (self.prefills[p], self.decodes[d])
            for (p, d), task in self._warming.items()
            if _has_succeeded(task)
            and not (self.prefills[p].is_out or self.decodes[d].is_out)
            and self._readers[d].opened.is_set()
        ]

    def handles(self) -> list[Handle]:
        return list({**self.prefills, **self.decodes}.values())

    def lose(self, handle: Handle, error: BaseException) -> None:
        """It was found lost: left out until it answers, and asked from now on."""
        name = handle.name
        if handle.is_out or name not in {**self.prefills, **self.decodes}:
            return
        log.warning("%s is lost and gets no requests until it answers: %s", name, error)
        handle.is_out = True
        spec = handle.member.spec
        self._members.report(spec.gang, spec.epoch, str(error))
        self._probes[name] = asyncio.create_task(self._probe(handle), name=f"probe-{name}")

    async def _probe(self, handle: Handle) -> None:
        pause_s = FIRST_PAUSE_S
        while handle.is_out:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    decode(NodeStatus, await handle.control.call("status", b""))
                handle.is_out = False
                log.warning("%s answers again and gets requests", handle.name)
            except Exception as error:
                log.debug("%s does not answer: %r", handle.name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _follow(self) -> None:
        while True:
            self._apply(await self._members.changed(self._version))

    def _apply(self, now: Membership) -> None:
        """Let go of ranks that are no more, take in new ones, warm new pairs."""
        self._version = now.version
        prefills = {m.spec.name: m for m in now.ready(PREFILL, COLOCATED)}
        decodes = {m.spec.name: m for m in now.ready(DECODE, COLOCATED)}
        for name in (self.prefills.keys() | self.decodes.keys()) - (prefills.keys() | decodes):
            self._let_go(name)
        for name in prefills.keys() - self.prefills.keys():
            self.prefills[name] = PrefillHandle(
                prefills[name], self._members.control(prefills[name])
            )
        for name in decodes.keys() - self.decodes.keys():
            handle = DecodeHandle(decodes[name], self._members.control(decodes[name]))
            self.decodes[name] = handle
            self._readers[name] = FrameReader(handle, self.session, self._beat_s, self.lose)
        for p in self.prefills.values():
            for d in self.decodes.values():
                self._take_in(p, d)

    def _let_go(self, name: str) -> None:
        self.prefills.pop(name, None)
        self.decodes.pop(name, None)
        reader, probe = self._readers.pop(name, None), self._probes.pop(name, None)
        for pair in [pair for pair in self._warming if name in pair]:
            self._warming.pop(pair).cancel()
        if probe is not None:
            probe.cancel()
        if reader is not None:
            asyncio.create_task(reader.stop(), name=f"stop-{name}")

    def _take_in(self, p: PrefillHandle, d: DecodeHandle) -> None:
        is_colocated = COLOCATED in (p.info.kind, d.info.kind)
        if p.info.fingerprint != d.info.fingerprint or (is_colocated and p.name != d.name):
            return
        if (p.name, d.name) not in self._warming:
            task = asyncio.create_task(self._warm_up(p, d), name=f"warm-{p.name}-{d.name}")
            self._warming[p.name, d.name] = task

    async def _warm_up(self, p: PrefillHandle, d: DecodeHandle) -> None:
        """Channels and first calls are slow, and no user shall wait for them."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._readers[d.name].opened.wait()
                await self._warm(Pair(p, d, Identity("warm-up")))
                return
            except ValueError:
                raise
            except Exception as error:
                log.warning("%s and %s do not work together yet: %s", p.name, d.name, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _has_succeeded(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
