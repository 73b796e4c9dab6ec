"""The decode side of hand-overs: pulls a sequence's KV into pages the engine allocated."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.answer import TransferStats
from tandem.core.control import Control, Empty
from tandem.core.errors import HandoverError, LayoutMismatch, RankLost, TandemError
from tandem.core.tasks import cancel_and_wait, run_periodically
from tandem.kv_transfer import messages as m
from tandem.kv_transfer.caches import Span, split_into_chunks
from tandem.kv_transfer.checksums import verify_checksums
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.layout import PROTOCOL, check_compatible
from tandem.kv_transfer.peer_link import PeerLink
from tandem.kv_transfer.pull import PullState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought; the seconds of ``stats`` are those of Pulling.stats."""

    seal: m.Seal
    stats: TransferStats


class Sink:
    """One decode rank's side. ``seat`` and ``epoch`` are those of its RankSpec.

    Made inside a running asyncio loop, to which it belongs; scatters run beside the steps of the
    engine, which touch no page of a sequence before it is activated.
    """

    def __init__(self, rank_name: str, epoch: int, endpoint: TransferEndpoint) -> None:
        self._local_rank = rank_name, epoch
        self._endpoint = endpoint
        self._layout = endpoint.caches.layout
        self._links: dict[str, PeerLink] = {}
        self._pulls: set[PullState] = set()
        self._sweeper = asyncio.create_task(
            run_periodically(endpoint.deadlines.idle_s / 4, self._sweep)
        )

    async def pull(self, offer: m.Offer, control: Control, pages: Sequence[int]) -> PullResult:
        """Bring an offered sequence into ``pages`` (this rank's, enough for it) and commit.

        ``control`` reaches the life of the rank that the offer names. Follows prefill's
        progress, keeps the lease alive meanwhile and releases it at the end, whatever the end.
        Once this returns, raises or is cancelled nothing writes into ``pages`` any more. Raises
        LayoutMismatch, StalePages, RankLost or HandoverError.
        """
        size = self._endpoint.caches.pool.page_size
        assert offer.num_tokens <= len(pages) * size, f"{len(pages)} pages for {offer}"
        link = self._link(offer.owner, offer.rank_name, offer.epoch, control)
        pull = PullState(self._endpoint, link, offer, pages)
        renewal = self._endpoint.tasks.start(self._keep_lease(pull))
        self._pulls.add(pull)
        reason = "failed"
        try:
            await self._check(link, offer)
            seal = await self._follow(pull)
            if self._endpoint.config.checksums:
                await verify_checksums(pull)
            reason = "pulled"
            return PullResult(seal, pull.stats())
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        finally:
            self._pulls.remove(pull)
            renewal.cancel()
            self._endpoint.tasks.start(self._release(pull, reason))

    async def close(self) -> None:
        """Drop every channel and wait for all that is under way."""
        await cancel_and_wait(self._sweeper)
        links = [*self._links.values()]
        self._links.clear()
        for link in links:
            link.drop("closed")
        await self._endpoint.close()
        for link in links:
            await link.control.close()

    async def idle(self) -> None:
        """Wait for what finished pulls left behind: releases, and chunks cut off."""
        await self._endpoint.tasks.finish()

    def counts(self) -> dict[str, int]:
        """What is held right now; all zero after `close`."""
        return {
            "pulls": len(self._pulls),
            "channels": sum(link.has_channel for link in self._links.values()),
            "staging": self._endpoint.staging.num_taken,
            "quarantined": self._endpoint.staging.num_quarantined(),
            "tasks": len(self._endpoint.tasks),
        }

    def _link(self, owner: str, rank_name: str, epoch: int, control: Control) -> PeerLink:
        """The link to this life of a rank; one to an earlier life is dropped."""
        link = self._links.get(rank_name)
        if link is not None and link.epoch > epoch:
            raise RankLost(f"{owner}: epoch {epoch} is offered after {link.epoch}")
        if link is None or link.epoch != epoch:
            if link is not None:
                link.drop(f"a later life of {rank_name} is asked for")
                self._endpoint.tasks.start(link.control.close())
            link = self._links[rank_name] = PeerLink(
                self._local_rank, owner, epoch, control, self._endpoint
            )
        return link

    async def _sweep(self) -> None:
        self._endpoint.check_staging()
        pulled_over = {pull.link for pull in self._pulls}
        for rank_name, link in list(self._links.items()):
            link.drop_if_idle(self._endpoint.deadlines.idle_s)
            # What is still to be said to its peer, a release, wants its connection.
            if not (link.has_channel or link in pulled_over or self._endpoint.tasks):
                del self._links[rank_name]
                self._endpoint.tasks.start(link.control.close())

    async def _check(self, link: PeerLink, offer: m.Offer) -> None:
        if offer.protocol != PROTOCOL:
            raise LayoutMismatch(f"protocol: {PROTOCOL} here, {offer.protocol} there")
        check_compatible(offer.caches, self._layout.compatibility_facts())
        await link.ensure_channel()

    async def _follow(self, pull: PullState) -> m.Seal:
        patience_s, now = self._endpoint.deadlines.progress_s, asyncio.get_running_loop().time
        wait_s = min(self._endpoint.deadlines.wait_s, patience_s)
        give_up_at = now() + patience_s
        while True:
            message = m.Pull(pull.offer.identity, pull.num_pulled, wait_s)
            ready: m.PullReply = await pull.link.call("pull", message, m.PullReply, wait_s)
            pull.check(ready)
            if ready.num_tokens != pull.num_pulled or ready.is_queued:
                await self._fetch(pull, ready)
                give_up_at = now() + patience_s
            if ready.seal is not None:
                pull.check_seal(ready.seal)
                return ready.seal
            if now() > give_up_at:
                raise HandoverError(
                    f"{pull.offer.identity}: nothing new for {patience_s} s, {ready.num_tokens} "
                    f"tokens of {pull.offer.num_tokens} so far, opened: {ready.is_open}"
                )

    async def _fetch(self, pull: PullState, ready: m.PullReply) -> None:
        lo, hi, chunk_bytes = pull.num_pulled, ready.num_tokens, self._endpoint.staging.chunk_bytes
        try:
            async with asyncio.TaskGroup() as fetches:
                for group in self._layout.groups:
                    for part in split_into_chunks(Span(group, pull.pages, lo, hi), chunk_bytes):
                        fetches.create_task(pull.fetch(part))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        pull.num_pulled = ready.num_tokens

    async def _keep_lease(self, pull: PullState) -> None:
        while True:
            await asyncio.sleep(pull.link.lease_s / 3)
            try:
                await pull.link.call("renew", pull.offer.identity, Empty)
            except TandemError as error:
                log.warning("lease of %s was not renewed: %s", pull.offer.identity, error)

    async def _release(self, pull: PullState, reason: str) -> None:
        if pull.transfers:
            # P may not have begun to send for a transfer that was cut off; released now, it
            # would fail, and its channel with it.
            await asyncio.wait(list(pull.transfers))
        identity = pull.offer.identity
        try:
            await pull.link.call("release", m.Release(identity, reason), Empty)
        except TandemError as error:
            log.warning("lease of %s was not released, it will expire: %s", identity, error)
