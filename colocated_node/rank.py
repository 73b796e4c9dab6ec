"""Prefill and decode engine in one rank, over one page pool.

Meant for comparison, debugging and small machines. A sequence's decode row gets its pages first,
and prefill computes the prompt in these pages. No KV is transferred: the hand-over consists of its
last message alone, the seal (kv_transfer/messages.py).
"""

from collections.abc import Sequence

from tandem.core.answer import TransferStats
from tandem.core.control import Control, Empty, InProcessControl, call_rank
from tandem.core.identity import Identity
from tandem.core.tasks import Tasks
from tandem.decode_node.service.rank import DecodeRank
from tandem.kv_transfer import messages as m
from tandem.kv_transfer.endpoint import Deadlines
from tandem.kv_transfer.sink import PullResult
from tandem.prefill_node.page_source import DecodeRowPages
from tandem.prefill_node.rank import PrefillRank
from tandem.runtime.parts import RankParts

PREFILL_METHODS = ("prefill", "cancel")


class LocalHandover:
    """Decode side of a hand-over within one rank. It waits for the seal and transfers nothing."""

    def __init__(self, lease_s: float) -> None:
        self._num_pulls = 0
        self._tasks = Tasks()
        self._deadlines = Deadlines(wait_s=min(Deadlines().wait_s, lease_s / 3))

    async def pull(self, offer: m.Offer, control: Control, pages: Sequence[int]) -> PullResult:
        """Wait until prefill has sealed ``offer``, and renew its lease while waiting.

        The lease is released at the end, also after an error. See ``Sink.pull`` in
        kv_transfer/sink.py.
        """
        reason = "failed"
        self._num_pulls += 1
        try:
            seal = await self._seal(offer.identity, control)
            reason = "pulled"
            return PullResult(seal, TransferStats(tokens=offer.num_tokens, backend="in place"))
        finally:
            self._num_pulls -= 1
            release = m.Release(offer.identity, reason)
            self._tasks.start(
                call_rank(
                    control=control,
                    method="release",
                    message=release,
                    reply=Empty,
                    timeout_s=self._deadlines.call_s,
                )
            )

    async def _seal(self, identity: Identity, control: Control) -> m.Seal:
        num_tokens = 0
        waits = self._deadlines
        while True:
            pull = m.Pull(identity, num_tokens, waits.wait_s)
            ready = await call_rank(
                control=control,
                method="pull",
                message=pull,
                reply=m.PullReply,
                timeout_s=waits.wait_s + waits.call_s,
            )
            if ready.seal is not None:
                return ready.seal
            num_tokens = ready.num_tokens
            await call_rank(
                control=control,
                method="renew",
                message=identity,
                reply=Empty,
                timeout_s=waits.call_s,
            )

    def counts(self) -> dict[str, int]:
        return {"pulls": self._num_pulls, "channels": 0, "staging": 0, "tasks": len(self._tasks)}

    async def idle(self) -> None:
        await self._tasks.finish()

    close = idle


class ColocatedRank:
    """A prefill and a decode rank that share model, pages and engine thread."""

    def __init__(self, prefill: PrefillRank, decode: DecodeRank) -> None:
        self.prefill = prefill
        self.decode = decode
        self.spec = decode.spec
        self.info = decode.info
        self.loop = decode.loop

    @property
    def num_sequences(self) -> int:
        return self.decode.num_sequences

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes:
        rank = self.prefill if method in PREFILL_METHODS else self.decode
        return await rank.handle(epoch, method, payload)

    async def stop(self) -> None:
        await self.prefill.source.stop()
        await self.decode.stop()


async def build(parts: RankParts) -> ColocatedRank:
    """Create a rank that runs both engines on one thread, and start to serve its token frames."""
    kv_receiver = LocalHandover(parts.config.kv_transfer.lease_s)
    decode = DecodeRank(parts, kv_receiver, lambda owner, epoch: control)
    get_grant = decode.engine.scheduler.get_grant
    use_prefix_pages = decode.engine.scheduler.use_prefix_pages
    pages = DecodeRowPages(
        pool=parts.pool,
        lag=parts.loaded.lag,
        pages_of=lambda identity: get_grant(identity).pages,
        use_prefix_pages=use_prefix_pages,
    )
    prefill = PrefillRank(parts, pages)
    control = InProcessControl(prefill.handle, parts.spec.epoch)
    await decode.listen()
    return ColocatedRank(prefill, decode)
