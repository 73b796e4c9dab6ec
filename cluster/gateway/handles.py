"""A gateway's handles of ranks: calls, inboxes for updates, and load estimates."""

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
"""Seconds after which a rank counts as silent in a status, or a suspect as unreachable."""
RELEASE_TIMEOUT_S = 5.0


class LoadEstimate:
    """Estimate of a rank's load.

    Attributes:
        num_sent: Prompts that this gateway has ever sent to the rank.
        num_tokens: Tokens of this gateway's prompts that the rank has not computed yet.
        num_other_tokens: Tokens of other gateways' prompts that the rank has not computed yet, as
            of the latest heartbeat.
        num_other_rows: Sequences of other gateways, as of the latest heartbeat.
        num_free_tokens: Free cache in tokens, as of the latest heartbeat.
    """

    def __init__(self, num_free_tokens: int) -> None:
        self.num_free_tokens = num_free_tokens
        self.num_tokens = self.num_other_tokens = self.num_other_rows = self.num_sent = 0

    def track_prompt(self, num_tokens: int) -> ExitStack:
        """Count a prompt of ``num_tokens`` that is sent to the rank.

        The caller closes the result once the prompt is computed or its attempt has failed.
        """
        self.num_tokens += num_tokens
        self.num_sent += 1
        sent = ExitStack()
        sent.callback(self._untrack_prompt, num_tokens)
        return sent

    def _untrack_prompt(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    def update(self, heartbeat: Heartbeat) -> None:
        """Update the estimate from a heartbeat."""
        self.num_other_rows = max(
            0, heartbeat.load.num_active_rows + heartbeat.num_waiting - len(heartbeat.alive)
        )
        self.num_other_tokens = max(0, heartbeat.num_tokens_left - self.num_tokens)
        self.num_free_tokens = heartbeat.load.num_free_tokens


class Inboxes:
    """Queues of the updates for this gateway's sequences on one decode rank.

    Attributes:
        queues: Open inboxes, by identity.
        granted: Sequences whose grant the rank has confirmed.
    """

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self.queues: dict[Identity, asyncio.Queue[SequenceUpdate]] = {}
        self.granted: dict[Identity, None] = {}
        self._orphans: dict[Identity, None] = {}
        """Sequences in the latest heartbeat that have no inbox."""

    def open(self, identity: Identity) -> "asyncio.Queue[SequenceUpdate]":
        """Open the inbox of a sequence."""
        inbox = self.queues[identity] = asyncio.Queue()
        return inbox

    def close(self, identity: Identity) -> None:
        """Close the inbox of a sequence. Later updates for it are dropped."""
        del self.queues[identity]
        self.granted.pop(identity, None)

    def deliver(self, updates: Iterable[SequenceUpdate]) -> None:
        """Put updates into their inboxes. Updates without an open inbox are dropped."""
        for update in updates:
            if update.identity in self.queues:
                self.queues[update.identity].put_nowait(update)

    def reconcile(self, alive: Iterable[Identity], expected: Iterable[Identity]) -> list[Identity]:
        """Compare a heartbeat with the open inboxes.

        Sequences that the rank no longer holds get a RankLost update.

        Args:
            alive: Sequences that the rank holds for this gateway.
            expected: Sequences that were granted when the heartbeat was sent.

        Returns:
            Sequences that two consecutive heartbeats list but this gateway does not know. The
            caller aborts them again.
        """
        alive_identities = dict.fromkeys(alive)
        for identity in [identity for identity in expected if identity not in alive_identities]:
            lost = Failure("RankLost", f"decode rank {self._rank} no longer holds {identity}")
            self.deliver([SequenceUpdate(identity, (), ERROR, failure=lost)])
        orphans_before = self._orphans
        self._orphans = dict.fromkeys(
            identity for identity in alive_identities if identity not in self.queues
        )
        return [identity for identity in self._orphans if identity in orphans_before]


class RankHandle:
    """A rank in one epoch, as seen by one gateway.

    Attributes:
        heartbeat: Latest heartbeat; None before the first.
        heartbeat_requested: While set, the next heartbeat is sent early.
        pending_heartbeats: Unanswered heartbeats of this connection. Each has the sequences that
            were granted when it was sent, and an event that its answer sets.
        releases: Background tasks of release calls. The fleet owns and finishes them.
    """

    def __init__(self, info: RankInfo, control: Control, releases: Tasks) -> None:
        self.info = info
        self.control = control
        self.epoch_name = info.spec.epoch_name
        self.load, self.inboxes = LoadEstimate(info.max_tokens), Inboxes(self.epoch_name)
        self.liveness = Liveness(self.epoch_name)
        self._releases = releases
        self.heartbeat: Heartbeat | None = None
        self.heartbeat_requested = asyncio.Event()
        self.pending_heartbeats = deque[tuple[tuple[Identity, ...], asyncio.Event]]()
        self._next_heartbeat_done = asyncio.Event()

    def on_heartbeat_sent(self) -> None:
        """Record that a heartbeat is being sent."""
        self.pending_heartbeats.append((tuple(self.inboxes.granted), self._next_heartbeat_done))
        self._next_heartbeat_done = asyncio.Event()
        self.heartbeat_requested.clear()

    def on_heartbeat(self, heartbeat: Heartbeat) -> float:
        """Process the answer to a heartbeat.

        Returns:
            Seconds without an answer after which the rank counts as lost.

        Raises:
            RankLost: The rank's engine is stalled.
        """
        granted, answered = self.pending_heartbeats.popleft()
        self.heartbeat = heartbeat
        self.load.update(heartbeat)
        for identity in self.inboxes.reconcile(heartbeat.alive, granted):
            self.release("abort", identity)
        if heartbeat.engine_progress.is_stalled:
            raise RankLost(f"{self.epoch_name}: the engine has been {heartbeat.engine_progress}")
        if self.liveness.apply_event(LivenessEvent.HEARTBEAT):
            log.warning("%s answers heartbeats again; it gets requests again", self.epoch_name)
        answered.set()
        return heartbeat.engine_progress.stall_threshold_s

    async def status(self) -> RankStatus:
        """Return the rank's status from its answer to the next heartbeat, which all callers share.

        If the rank is lost or does not answer in time, ``alive`` is False and nothing else is
        known.
        """
        spec = self.info.spec
        answered = self._next_heartbeat_done
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
            process_epoch=spec.process_epoch or spec.epoch,
            **asdict(self.heartbeat.load),
        )

    async def is_reachable(self) -> bool:
        """Return whether the rank answers a call.

        The call needs a turn of the rank's engine thread.
        """
        try:
            await call_rank(
                control=self.control,
                method="ping",
                message=None,
                reply=Empty,
                timeout_s=STATUS_TIMEOUT_S,
            )
            return True
        except Exception as error:
            log.warning("%s does not answer: %r", self.epoch_name, error)
            return False

    def release(self, method: str, identity: Identity) -> "asyncio.Task[Empty]":
        """Start a call that makes the rank release a sequence.

        A failed call needs no retry here: the rank is dead, its lease expires, or later heartbeats
        still list the sequence.
        """
        return self._releases.start(
            call_rank(
                control=self.control,
                method=method,
                message=identity,
                reply=Empty,
                timeout_s=RELEASE_TIMEOUT_S,
            )
        )


@dataclass(frozen=True, slots=True)
class AttemptRoute:
    """Ranks and identity of one attempt. In colocated mode both are the same rank.

    ``is_suspect``: the sequence starts in isolated steps, because it may have crashed a rank.
    """

    prefill: RankHandle
    decode: RankHandle
    identity: Identity
    is_suspect: bool = False

    async def close(self, is_decoded: bool) -> None:
        """End the attempt and release its resources on both ranks.

        No release is needed if the decode rank has finished the sequence (``is_decoded``). Lost
        ranks are called too, but their replies are not awaited.
        """
        self.decode.inboxes.close(self.identity)
        if not is_decoded:
            releases = (self.decode, "abort"), (self.prefill, "cancel")
            releases_by_rank = [
                (rank, rank.release(method, self.identity)) for rank, method in releases
            ]
            waited_for = (
                asyncio.shield(release)
                for rank, release in releases_by_rank
                if rank.liveness.answering.is_set()
            )
            await asyncio.gather(*waited_for, return_exceptions=True)
