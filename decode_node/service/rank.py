"""One decode rank as its callers see it: bytes in, bytes out, no Ray.

Lives on an asyncio loop; the engine computes on the engine loop's thread. A sequence goes
grant -> start (pull) -> activate -> frames; ``abort`` ends it in any of these, and so does the end
of its gateway's session.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from tandem.core.answer import TransferStats
from tandem.core.beat import Beat, Held
from tandem.core.control import Control, Methods, Service
from tandem.core.errors import HandoverError, RankDied, StepFailed, TandemError
from tandem.core.identity import Identity
from tandem.core.remembered import Remembered
from tandem.core.tasks import again, cancelled, resolve
from tandem.decode_node.engine import DecodeEngine
from tandem.decode_node.service.decode_calls import Grant, Start
from tandem.decode_node.service.publisher import FramePublisher
from tandem.decode_node.service.sessions import Sessions
from tandem.kv_transfer import sink
from tandem.kv_transfer.messages import Offer, Seal
from tandem.runtime.computed_rows import ComputedRows
from tandem.runtime.frames import FrameServer
from tandem.runtime.parts import RankParts

log = logging.getLogger(__name__)
REMEMBER_S = 600.0
"""How long an abort is remembered, so that what it overtook finds it."""


class Intake(Protocol):
    """How KV comes into granted pages: pulled from another rank, or already there."""

    async def pull(self, offer: Offer, control: Control, pages: Sequence[int]) -> sink.Pulled: ...

    def counts(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


class DecodeRank:
    """A decode rank; ``parts.loop`` is started by whoever made it, and ``stop`` ends both.

    Owns grants and pulls in flight, and the sessions they belong to; rows and pages are the
    engine's. ``find_owner`` gives the control of the life of a prefill rank that an offer names.
    """

    def __init__(
        self, parts: RankParts, intake: Intake, find_owner: Callable[[str, int], Control]
    ) -> None:
        lease_s = parts.config.kv_transfer.lease_s
        self.spec, self.pool, self.loop = parts.spec, parts.pool, parts.loop
        self.intake = intake
        self._asyncio = asyncio.get_running_loop()
        self.sessions = Sessions(lease_s, self._asyncio.time)
        self.frames = FramePublisher(self.sessions, self._beat)
        self.engine = DecodeEngine(parts, self.frames.publish, self._on_grant)
        self.info = parts.info()
        self._parts = parts
        self._rows = ComputedRows(parts.loop, parts.loaded.dispatch)
        self._find_owner = find_owner
        self._server = FrameServer(parts.spec.host, self.frames)
        self._granting: dict[Identity, asyncio.Future[None]] = {}
        self._arriving: dict[Identity, asyncio.Task[TransferStats]] = {}
        self._ended = Remembered[Identity, None](REMEMBER_S, self._asyncio.time)
        self._sweeper = self._asyncio.create_task(again(lease_s / 4, self._sweep))
        self.loop.on_failure(self._on_failure)
        self.loop.add(self.engine)
        methods: Methods = {
            "grant": (Grant, self._grant),
            "start": (Start, self._start),
            "abort": (Identity, self._end),
            "ping": (None, lambda _: self.loop.call(lambda: None)),
        }
        self.handle = Service(parts.spec.life, parts.spec.epoch, methods).handle

    @property
    def num_held(self) -> int:
        scheduler = self.engine.scheduler
        return len(scheduler.sequences) + scheduler.num_waiting

    async def listen(self) -> None:
        """Serve frames from now on; ``info`` says where."""
        self.info = replace(self.info, frames=await self._server.listen())

    async def stop(self) -> None:
        """Cancel every pull, close every channel, end the engine."""
        await cancelled(self._sweeper, *self._arriving.values())
        await self._server.stop()
        await self.intake.close()
        await asyncio.to_thread(self.loop.stop)

    async def _grant(self, asked: Grant) -> None:
        """Answered once a row and pages are held."""
        identity = asked.identity
        self._check_not_ended(identity)
        if self.sessions.owner(identity) is not None:
            raise HandoverError(f"{identity} is here already")
        self.sessions.hold(asked.session, identity)
        granted = self._granting[identity] = self._asyncio.create_future()
        try:
            # At once: whatever ends it is posted behind.
            asking = self.loop.post(lambda: self.engine.ask(identity, asked.size))
            await asyncio.gather(asyncio.wrap_future(asking), granted)
        except BaseException:
            self.sessions.let_go(identity)
            raise
        finally:
            del self._granting[identity]

    def _on_grant(self, identity: Identity) -> None:
        """A row and pages are held. Engine thread."""
        self._asyncio.call_soon_threadsafe(self._settle, identity, None)

    def _settle(self, identity: Identity, error: Exception | None) -> None:
        if identity in self._granting:
            resolve(self._granting[identity], error)

    async def _start(self, asked: Start) -> TransferStats:
        self._check_not_ended(asked.identity)
        if asked.identity in self._arriving:
            raise HandoverError(f"{asked.identity} arrives already")
        task = self._arriving[asked.identity] = asyncio.create_task(self._arrive(asked))
        task.add_done_callback(partial(self._arrived, asked.identity))
        await asyncio.wait([task])
        if task.cancelled():
            raise HandoverError(f"{asked.identity} was aborted while it arrived")
        return task.result()

    def _arrived(self, identity: Identity, task: "asyncio.Task[TransferStats]") -> None:
        """Retrieve the error too: the gateway may have cancelled its call because it knew of it."""
        del self._arriving[identity]
        if not task.cancelled():
            task.exception()

    async def _arrive(self, asked: Start) -> TransferStats:
        """Fetch the KV and start the sequence; a failure frees the row.

        Raises:
            HandoverError, StepFailed: The attempt failed; another one may succeed.
        """
        identity, offer = asked.identity, asked.offer
        row = await self.loop.call(lambda: self.engine.scheduler.held(identity))
        try:
            control = self._find_owner(offer.owner, offer.epoch)
            pulled = await self.intake.pull(offer, control, row.pages)
            await self.loop.call(lambda: self._activate(asked, pulled.seal))
        except (TandemError, ValueError):
            await self._drop(identity)
            raise
        except Exception as error:
            await self._drop(identity)
            raise HandoverError(f"{identity}: it did not arrive: {error!r}") from error
        return pulled.stats

    def _activate(self, asked: Start, seal: Seal) -> None:
        """Start the steps of a sequence whose cache is complete. Runs on the engine thread.

        Raises:
            HandoverError: The row was given up meanwhile.
            StepFailed: It could not be started, for instance for want of device memory.
        """
        try:
            self._start_steps(asked, seal)
        except TandemError:
            raise
        except Exception as error:
            raise StepFailed(f"{asked.identity}: it was not started: {error!r}") from error

    def _start_steps(self, asked: Start, seal: Seal) -> None:
        # Features go to the device with the rest of their row (Rows).
        features_F = None
        if seal.features is not None:
            dtype = getattr(torch, seal.features_dtype)
            features_F = torch.frombuffer(bytearray(seal.features), dtype=dtype)
        self.engine.activate(
            asked.identity, asked.request, seal.first_token, features_F, asked.is_suspect
        )

    async def _end(self, identity: Identity) -> None:
        """The pull ends first: only then may its pages be freed, however often this is asked. What
        was overtaken is refused."""
        self._ended.add(identity, None)
        self._settle(identity, HandoverError(f"{identity} was aborted while it waited"))
        if identity in self._arriving:
            await cancelled(self._arriving[identity])
        await self._drop(identity)

    async def _drop(self, identity: Identity) -> None:
        self.sessions.let_go(identity)
        await self.loop.call(lambda: self.engine.drop(identity))

    def _check_not_ended(self, identity: Identity) -> None:
        if identity in self._ended:
            raise HandoverError(f"{identity} was aborted before it came")

    async def _sweep(self) -> None:
        """Drop what belongs to gateways that are gone; forget what was aborted long ago."""
        for identity in self.sessions.sweep():
            log.warning("%s: the gateway of %s is gone", self.spec.gang, identity)
            await self._end(identity)
        self._ended.sweep()

    def _on_failure(self, error: BaseException) -> None:
        """Nobody waits for an engine that has stopped. Engine thread."""
        self._asyncio.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self.frames.fail(error)
        for identity in self._granting:
            self._settle(identity, RankDied(f"the engine stopped: {error!r}"))

    def _beat(self, alive: tuple[Identity, ...]) -> Beat:
        """Read without waiting for the engine: how far that is, is what it tells."""
        num_waiting = self.engine.scheduler.num_waiting
        return Beat(self.loop.watch.pace(), self._held(), num_waiting, alive=alive)

    def _held(self) -> Held:
        engine, counts = self.engine, self.intake.counts()
        steps = {name: getattr(engine, name) for name in ("num_steps", "step_s", "program_s")}
        return Held(
            num_active_rows=len(engine.scheduler.sequences),
            num_free_tokens=self.pool.num_free_tokens,
            num_open_leases=counts["pulls"],
            num_channels=counts["channels"],
            num_quarantined=counts.get("quarantined", 0),
            counters=steps | engine.programs.counts() | self._parts.counters,
            kernels=f"{self._parts.loaded.kernels.name}, {engine.programs.form}",
            rows_by_layer=self._rows.latest(),
        )


async def build(parts: RankParts, find_owner: Callable[[str, int], Control]) -> DecodeRank:
    """A rank that pulls, and serves frames. Raises ValueError where it cannot listen."""
    rank = DecodeRank(parts, sink.Sink(parts.spec.seat, parts.spec.epoch, parts.side()), find_owner)
    await rank.listen()
    return rank
