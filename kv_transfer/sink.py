"""Decode side of KV hand-overs: pulls a sequence's KV into pages that the engine allocated."""

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
    """Result of a complete pull; ``stats`` is explained at ``PullState.stats``."""

    seal: m.Seal
    stats: TransferStats


class Sink:
    """Pulls KV for one decode rank. Created in a running asyncio loop, to which it belongs.

    Copies into pages run in parallel with engine steps, which do not access the pages of a
    sequence before it is activated.

    Args:
        rank_name: Name of this rank (RankSpec.rank_name).
        epoch: Epoch of this rank.
        endpoint: Resources of the hand-overs; the sink owns them.
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
        """Pull an offered sequence into ``pages`` as its prefill progresses.

        The lease is renewed during the pull and released at its end, also after an error. Nothing
        writes into ``pages`` once this method has returned, raised or been cancelled.

        Args:
            offer: Where the KV is.
            control: Connection to the prefill rank, in the epoch that the offer names.
            pages: Pages of this rank, enough for all tokens of the offer.

        Raises:
            LayoutMismatch: The prefill rank does not cache what this rank needs.
            StalePages: Pages of the prefill rank changed hands.
            RankLost: The prefill rank is lost or has another epoch.
            HandoverError: Any other failure.
        """
        size = self._endpoint.caches.pool.page_size
        assert offer.num_tokens <= len(pages) * size, f"{len(pages)} pages are too few for {offer}"
        link = self._link(
            owner=offer.owner, rank_name=offer.rank_name, epoch=offer.epoch, control=control
        )
        pull = PullState(endpoint=self._endpoint, link=link, offer=offer, pages=pages)
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
        """Drop all channels and end all background tasks."""
        await cancel_and_wait(self._sweeper)
        links = [*self._links.values()]
        self._links.clear()
        for link in links:
            link.drop("closed")
        await self._endpoint.close()
        for link in links:
            await link.control.close()

    async def idle(self) -> None:
        """Wait for the background tasks of finished pulls: releases and discarded chunks."""
        await self._endpoint.tasks.finish()

    def counts(self) -> dict[str, int]:
        """Return the number of resources held, by kind; all are 0 after ``close``."""
        return {
            "pulls": len(self._pulls),
            "channels": sum(link.has_channel for link in self._links.values()),
            "staging": self._endpoint.staging.num_taken,
            "quarantined": self._endpoint.staging.num_quarantined(),
            "tasks": len(self._endpoint.tasks),
        }

    def _link(self, owner: str, rank_name: str, epoch: int, control: Control) -> PeerLink:
        """Return the link to this epoch of a rank and drop a link to an earlier epoch.

        Raises RankLost if there is a link to a later epoch.
        """
        link = self._links.get(rank_name)
        if link is not None and link.epoch > epoch:
            raise RankLost(
                f"{owner}: got an offer of epoch {epoch} after one of epoch {link.epoch}"
            )
        if link is None or link.epoch != epoch:
            if link is not None:
                link.drop(f"a later epoch of {rank_name} is in use")
                self._endpoint.tasks.start(link.control.close())
            link = self._links[rank_name] = PeerLink(
                local_rank=self._local_rank,
                owner=owner,
                epoch=epoch,
                control=control,
                endpoint=self._endpoint,
            )
        return link

    async def _sweep(self) -> None:
        self._endpoint.check_staging()
        pulled_over = {pull.link for pull in self._pulls}
        for rank_name, link in list(self._links.items()):
            link.drop_if_idle(self._endpoint.deadlines.idle_s)
            # A release that is still to be sent needs the control connection.
            if not (link.has_channel or link in pulled_over or self._endpoint.tasks):
                del self._links[rank_name]
                self._endpoint.tasks.start(link.control.close())

    async def _check(self, link: PeerLink, offer: m.Offer) -> None:
        if offer.protocol != PROTOCOL:
            raise LayoutMismatch(
                f"KV transfer protocol differs: {PROTOCOL} on the decode rank, {offer.protocol} "
                "on the prefill rank; use the same release of Tandem for both"
            )
        check_compatible(offer.caches, self._layout.compatibility_facts())
        await link.ensure_channel()

    async def _follow(self, pull: PullState) -> m.Seal:
        patience_s = self._endpoint.deadlines.progress_s
        now = asyncio.get_running_loop().time
        wait_s = min(self._endpoint.deadlines.wait_s, patience_s)
        give_up_at = now() + patience_s
        while True:
            message = m.Pull(pull.offer.identity, pull.num_pulled, wait_s)
            ready: m.PullReply = await pull.link.call(
                method="pull", message=message, reply=m.PullReply, wait_s=wait_s
            )
            pull.check(ready)
            if ready.num_tokens != pull.num_pulled or ready.is_queued:
                await self._fetch(pull, ready)
                give_up_at = now() + patience_s
            if ready.seal is not None:
                pull.check_seal(ready.seal)
                return ready.seal
            if now() > give_up_at:
                raise HandoverError(
                    f"{pull.offer.identity}: no new tokens for {patience_s} s; "
                    f"{ready.num_tokens} of {pull.offer.num_tokens} computed, prompt known "
                    f"to the prefill rank: {ready.is_open}"
                )

    async def _fetch(self, pull: PullState, ready: m.PullReply) -> None:
        lo = pull.num_pulled
        hi = ready.num_tokens
        chunk_bytes = self._endpoint.staging.chunk_bytes
        try:
            async with asyncio.TaskGroup() as fetches:
                for group in self._layout.groups:
                    for part in split_into_chunks(
                        Span(group=group, pages=pull.pages, lo=lo, hi=hi), chunk_bytes
                    ):
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
            # The prefill rank may not have read the chunk of a cancelled pull yet. Releasing its
            # pages now would fail the transfer and, with it, the channel.
            await asyncio.wait(list(pull.transfers))
        identity = pull.offer.identity
        try:
            await pull.link.call("release", m.Release(identity, reason), Empty)
        except TandemError as error:
            log.warning("lease of %s was not released and will expire: %s", identity, error)
