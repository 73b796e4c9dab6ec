"""The decode side of hand-overs: pulls a sequence's KV into pages the engine allocated."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from core.control import Control
from core.errors import HandoverError, LayoutMismatch, TandemError
from core.tasks import Tasks
from kv_transfer import messages as m
from kv_transfer.base import ChannelMaker
from kv_transfer.caches import Caches, check_chunks, chunks
from kv_transfer.engine_thread import EngineThread
from kv_transfer.layout import PROTOCOL
from kv_transfer.links import Link
from kv_transfer.options import TransferOptions
from kv_transfer.progress import Progress
from kv_transfer.receiver import Job, Receiver
from kv_transfer.staging import StagingPool

log = logging.getLogger(__name__)
MAX_CHUNKS_IN_FLIGHT = 2
"""Per pull: one on the wire while another is scattered; others get their turn in between."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought. ``num_bytes`` crossed the channel, which took ``wire_s`` of the
    ``seconds`` from call to commit; waiting for prefill is in ``seconds`` only."""

    seal: m.Seal
    num_tokens: int
    num_bytes: int
    num_chunks: int
    seconds: float
    wire_s: float
    backend: str


class Sink:
    """One decode rank's side. ``name`` must differ between ranks and their lives.

    Belongs to one asyncio loop; tensors are touched on the engine thread only.
    """

    def __init__(
        self,
        name: str,
        caches: Caches,
        engine: EngineThread,
        maker: ChannelMaker,
        options: TransferOptions,
    ) -> None:
        check_chunks(caches.layout, options.chunk_bytes)
        self.name = name
        self._caches = caches
        self._maker = maker
        self._options = options
        self._tasks = Tasks()
        self.staging = StagingPool(
            options.staging_bytes, options.chunk_bytes, options.pin, maker.device
        )
        self._receiver = Receiver(caches, engine, self.staging, self._tasks, maker.timeout_s)
        self._links: dict[str, Link] = {}
        self._num_pulls = 0

    async def connect(self, owner: str, epoch: str, control: Control) -> None:
        """Build and warm the channel to a prefill rank ahead of its first pull.

        Raises LayoutMismatch, NodeLost or HandoverError.
        """
        await self._link(owner, epoch, control).ready()

    def forget(self, owner: str) -> None:
        """Drop the channel to a prefill rank that is gone."""
        link = self._links.pop(owner, None)
        if link is not None:
            link.drop(f"{owner} was forgotten")

    async def pull(self, offer: m.Offer, control: Control, pages: Sequence[int]) -> Pulled:
        """Bring an offered sequence into ``pages`` (this rank's, enough for it) and commit.

        Follows prefill's progress, keeps the lease alive meanwhile and releases it at the
        end, whatever the end. Once this returns, raises or is cancelled nothing writes into
        ``pages`` any more. Raises LayoutMismatch, StalePages, NodeLost or HandoverError.
        """
        began = time.perf_counter()
        size = self._caches.pool.page_size
        assert offer.num_tokens <= len(pages) * size, f"{len(pages)} pages for {offer}"
        link = self._link(offer.owner, offer.epoch, control)
        progress = Progress(self._caches.layout, offer)
        job = Job(link, offer, pages, progress, asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT))
        renewal = self._tasks.start(self._keep_lease(link, offer))
        self._num_pulls += 1
        reason = "failed"
        try:
            await self._check(link, offer)
            seal = await self._follow(job)
            reason = "pulled"
            return self._pulled(job, seal, time.perf_counter() - began)
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        finally:
            self._num_pulls -= 1
            renewal.cancel()
            self._tasks.start(self._release(job, reason))

    async def close(self) -> None:
        """Drop every channel and wait for all that is under way."""
        for owner in list(self._links):
            self.forget(owner)
        await self._tasks.finish()

    async def idle(self) -> None:
        """Wait for what finished pulls left behind: releases, and chunks cut off."""
        await self._tasks.finish()

    def counts(self) -> dict[str, int]:
        """What is held right now; all zero after `close`."""
        return {
            "pulls": self._num_pulls,
            "channels": len(self._links),
            "staging": self.staging.num_taken,
            "tasks": len(self._tasks),
        }

    def check_integrity(self) -> None:
        self.staging.check_integrity()

    def _link(self, owner: str, epoch: str, control: Control) -> Link:
        link = self._links.get(owner)
        if link is not None and link.epoch != epoch:
            self.forget(owner)
            link = None
        if link is None:
            link = Link(
                self.name, owner, epoch, control, self._caches.layout, self._maker,
                self._options, self._tasks,
            )  # fmt: skip
            self._links[owner] = link
        return link

    async def _check(self, link: Link, offer: m.Offer) -> None:
        if offer.protocol != PROTOCOL:
            raise LayoutMismatch(f"protocol: {PROTOCOL} here, {offer.protocol} there")
        await link.ready()
        mine = self._caches.layout.fingerprint()
        if offer.fingerprint != mine:
            raise LayoutMismatch(f"fingerprint: {mine} here, {offer.fingerprint} offered")

    async def _follow(self, job: Job) -> m.Seal:
        patience_s = self._options.progress_timeout_s
        give_up_at = time.monotonic() + patience_s
        while True:
            ready = await self._poll(job)
            job.progress.check(ready)
            if ready.num_tokens != job.progress.num_pulled:
                await self._fetch(job, ready)
                give_up_at = time.monotonic() + patience_s
            if ready.seal is not None:
                job.progress.check_seal(ready.seal)
                return ready.seal
            if time.monotonic() > give_up_at:
                raise HandoverError(
                    f"{job.offer.key}: nothing new for {patience_s} s, {ready.num_tokens} tokens "
                    f"of {job.offer.num_tokens} so far, opened: {ready.opened}"
                )

    async def _poll(self, job: Job) -> m.Ready:
        wait_s = min(self._options.wait_s, self._options.progress_timeout_s)
        offer, num_pulled = job.offer, job.progress.num_pulled
        ask = m.Pull(offer.epoch, offer.request_id, offer.attempt, num_pulled, wait_s)
        ready: m.Ready = await job.link.call("pull", ask, m.Ready, wait_s)
        return ready

    async def _fetch(self, job: Job, ready: m.Ready) -> None:
        progress, groups = job.progress, self._caches.layout.groups
        try:
            async with asyncio.TaskGroup() as fetches:
                for group, lo, hi in zip(
                    groups, progress.num_pulled, ready.num_tokens, strict=True
                ):
                    for part in chunks(group, lo, hi, self._options.chunk_bytes):
                        fetches.create_task(self._receiver.fetch(job, group, *part))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        progress.num_pulled = ready.num_tokens

    def _pulled(self, job: Job, seal: m.Seal, seconds: float) -> Pulled:
        done = job.progress.chunks
        return Pulled(
            seal=seal,
            num_tokens=job.offer.num_tokens,
            num_bytes=sum(chunk.sent.num_bytes for chunk in done),
            num_chunks=len(done),
            seconds=seconds,
            wire_s=sum(chunk.wire_s for chunk in done),
            backend=self._maker.backend,
        )

    async def _keep_lease(self, link: Link, offer: m.Offer) -> None:
        renew = m.Renew(offer.epoch, offer.request_id, offer.attempt)
        while True:
            await asyncio.sleep(link.lease_s / 3)
            try:
                await link.call("renew", renew, m.Ack)
            except (TandemError, OSError) as error:
                log.warning("lease of %s was not renewed: %s", offer.key, error)

    async def _release(self, job: Job, reason: str) -> None:
        if job.exchanges:
            # P still reads for a transfer that was cut off; released now, it would fail, and
            # its channel with it.
            await asyncio.wait(list(job.exchanges))
        offer = job.offer
        release = m.Release(offer.epoch, offer.request_id, offer.attempt, reason)
        try:
            await job.link.call("release", release, m.Ack)
        except (TandemError, OSError) as error:
            log.warning("lease of %s was not released, it will expire: %s", offer.key, error)
