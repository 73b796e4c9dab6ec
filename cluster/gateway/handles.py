"""A gateway's view of the ranks: how to call them, and how much it has sent to each."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from tandem.cluster.gateway.liveness import Liveness, LivenessEvent, LivenessPhase
from tandem.core.control import Control, Empty, call_rank
from tandem.core.errors import RankLost
from tandem.core.heartbeat import Heartbeat
from tandem.core.identity import Identity
from tandem.core.info import RankStatus
from tandem.core.membership import RankInfo
from tandem.core.request import ERROR, SequenceUpdate
from tandem.core.schema import Failure
from tandem.core.tasks import Tasks

log = logging.getLogger(__name__)
STATUS_TIMEOUT_S = 2.0
"""Time after which a rank counts as silent in a status, or a suspect as unreachable."""
RELEASE_TIMEOUT_S = 5.0


class LoadEstimate:
    """What a rank has to do. ``num_sent`` texts were ever sent there, of ``num_tokens`` those that
    it has not computed yet. What other gateways sent, ``num_other_tokens`` and ``num_other_rows``,
    and ``num_free_tokens`` are as of its last beat."""

    def __init__(self, num_free_tokens: int) -> None:
        self.num_free_tokens = num_free_tokens
        self.num_tokens = self.num_other_tokens = self.num_other_rows = self.num_sent = 0

    def track_prompt(self, num_tokens: int) -> ExitStack:
        """A text of so many tokens is sent there; close it when they are computed, or in vain."""
        self.num_tokens += num_tokens
        self.num_sent += 1
        sent = ExitStack()
        sent.callback(self._untrack_prompt, num_tokens)
        return sent

    def _untrack_prompt(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    def update(self, heartbeat: Heartbeat) -> None:
        self.num_other_rows = max(
            0, heartbeat.load.num_active_rows + heartbeat.num_waiting - len(heartbeat.alive)
        )
        self.num_other_tokens = max(0, heartbeat.num_tokens_left - self.num_tokens)
        self.num_free_tokens = heartbeat.load.num_free_tokens


class Inboxes:
    """Where the updates of this gateway's sequences on a decode rank arrive. ``granted`` are those
    that the rank was heard to hold."""

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self.queues: dict[Identity, asyncio.Queue[SequenceUpdate]] = {}
        self.granted: dict[Identity, None] = {}
        self._orphans: dict[Identity, None] = {}
        """Held there in the last beat, and nobody's here."""

    def open(self, identity: Identity) -> "asyncio.Queue[SequenceUpdate]":
        inbox = self.queues[identity] = asyncio.Queue()
        return inbox

    def close(self, identity: Identity) -> None:
        del self.queues[identity]
        self.granted.pop(identity, None)

    def deliver(self, updates: Iterable[SequenceUpdate]) -> None:
        """What nobody waits for is dropped."""
        for update in updates:
            if update.identity in self.queues:
                self.queues[update.identity].put_nowait(update)

    def reconcile(self, alive: Iterable[Identity], expected: Iterable[Identity]) -> list[Identity]:
        """A beat says which the rank still holds of those ``expected`` when it was asked for.
        What two beats in a row name and nobody here knows, which is to be aborted again."""
        held = dict.fromkeys(alive)
        for identity in [one for one in expected if one not in held]:
            lost = Failure("RankLost", f"decode rank {self._rank} no longer holds {identity}")
            self.deliver([SequenceUpdate(identity, (), ERROR, failure=lost)])
        before, self._orphans = self._orphans, {one: None for one in held if one not in self.queues}
        return [one for one in self._orphans if one in before]


class RankHandle:
    """One life of a rank, and its latest ``heartbeat``. ``releases`` are its owner's, who finishes
    them. While ``heartbeat_requested`` is set, the next heartbeat is due early.
    ``pending_heartbeats`` are those of this connection that are not answered yet: what was granted
    when each was sent, and what its answer sets."""

    def __init__(self, info: RankInfo, control: Control, releases: Tasks) -> None:
        self.info, self.control, self.epoch_name = info, control, info.spec.epoch_name
        self.load, self.inboxes = LoadEstimate(info.max_tokens), Inboxes(self.epoch_name)
        self.liveness, self._releases = Liveness(self.epoch_name), releases
        self.heartbeat: Heartbeat | None = None
        self.heartbeat_requested = asyncio.Event()
        self.pending_heartbeats = deque[tuple[tuple[Identity, ...], asyncio.Event]]()
        self._next_heartbeat_done = asyncio.Event()

    def on_heartbeat_sent(self) -> None:
        """Note that a heartbeat is sent now."""
        self.pending_heartbeats.append((tuple(self.inboxes.granted), self._next_heartbeat_done))
        self._next_heartbeat_done = asyncio.Event()
        self.heartbeat_requested.clear()

    def on_heartbeat(self, heartbeat: Heartbeat) -> float:
        """Take in the answer to a heartbeat; how long it may be silent from now on. Raises RankLost
        if its engine does not go on."""
        granted, answered = self.pending_heartbeats.popleft()
        self.heartbeat = heartbeat
        self.load.update(heartbeat)
        for identity in self.inboxes.reconcile(heartbeat.alive, granted):
            self.release("abort", identity)
        if heartbeat.engine_progress.is_stalled:
            raise RankLost(f"its engine is {heartbeat.engine_progress}")
        if self.liveness.apply_event(LivenessEvent.HEARTBEAT):
            log.warning("%s is heard again and gets requests", self.epoch_name)
        answered.set()
        return heartbeat.engine_progress.stall_threshold_s

    async def status(self) -> RankStatus:
        """Return what the rank's answer to the next heartbeat says; all callers share that one.

        ``alive`` is False, and nothing else known, if the rank is lost or gives no answer in time.
        """
        spec, answered = self.info.spec, self._next_heartbeat_done
        self.heartbeat_requested.set()
        if self.liveness.phase is not LivenessPhase.OUT:
            with suppress(TimeoutError, RankLost):
                async with asyncio.timeout(STATUS_TIMEOUT_S), self.liveness.cancelled_if_lost():
                    await answered.wait()
        if self.heartbeat is None or not answered.is_set():
            return RankStatus(spec.label, spec.kind, spec.epoch, alive=False)
        return RankStatus(
            spec.label,
            spec.kind,
            spec.epoch,
            max_tokens=self.info.max_tokens,
            cause="draining" if self.liveness.is_draining else "",
            born=spec.process_epoch or spec.epoch,
            **asdict(self.heartbeat.load),
        )

    async def is_reachable(self) -> bool:
        """Return whether the rank answers a call, and its engine thread takes turns."""
        try:
            await call_rank(self.control, "ping", None, Empty, STATUS_TIMEOUT_S)
            return True
        except Exception as error:
            log.warning("%s does not answer: %r", self.epoch_name, error)
            return False

    def release(self, method: str, identity: Identity) -> "asyncio.Task[Empty]":
        """Have it let go of a sequence. One that cannot be told is dead, or its lease runs out, or
        its beats name what it still holds."""
        return self._releases.start(
            call_rank(self.control, method, identity, Empty, RELEASE_TIMEOUT_S)
        )


@dataclass(frozen=True, slots=True)
class AttemptRoute:
    """Where an attempt runs; the same rank twice in colocated mode. One that ``is_suspect`` begins
    in steps of its own."""

    prefill: RankHandle
    decode: RankHandle
    identity: Identity
    is_suspect: bool = False

    async def close(self, is_decoded: bool) -> None:
        """The attempt is over. Unless the decode rank has ended it both are free; one that is lost
        is told too, but nobody waits for that."""
        self.decode.inboxes.close(self.identity)
        if not is_decoded:
            releases = (self.decode, "abort"), (self.prefill, "cancel")
            releases_by_rank = [
                (rank, rank.release(method, self.identity)) for rank, method in releases
            ]
            waited_for = (
                asyncio.shield(one)
                for rank, one in releases_by_rank
                if rank.liveness.answering.is_set()
            )
            await asyncio.gather(*waited_for, return_exceptions=True)
