"""P's half of one transfer: a gathered chunk goes out on the channel that D waits at."""

from core.errors import HandoverError
from kv_transfer import messages as m
from kv_transfer.accepted import AcceptedChannels
from kv_transfer.base import Channel
from kv_transfer.gathered import Chunk, GatheredChunks
from kv_transfer.waiting import settled


class Sender:
    """Sends what was gathered; D's receive is launched before each call."""

    def __init__(self, channels: AcceptedChannels, gathered: GatheredChunks) -> None:
        self._channels = channels
        self._gathered = gathered

    async def send(self, ask: m.Send) -> m.Sent:
        """Send one chunk. Must run to its end.

        Raises HandoverError for a chunk, channel or transfer id that is not to be had; the
        channel is gone then.
        """
        channel = await self._channels.get(ask.nonce)
        try:
            if ask.transfer_id != channel.num_transfers:
                raise HandoverError(
                    f"transfer {channel.num_transfers} is next here, {ask.transfer_id} there"
                )
            chunk = self._gathered.take(ask.identity, ask.ticket)
            await self._transfer(channel, chunk)
        except BaseException as error:
            # D's receive is posted and nothing will fill it: only dropping the channel ends it.
            channel.abort(f"transfer {ask.transfer_id} failed: {error}")
            self._channels.drop(ask.nonce)
            raise
        return m.Sent(ask.transfer_id, chunk.data.nbytes)

    async def _transfer(self, channel: Channel, chunk: Chunk) -> None:
        try:
            await settled(channel.send(chunk.data).done, channel)
        except BaseException as error:
            channel.abort(f"sending failed: {error}")
            self._gathered.quarantine(chunk, channel.terminal)
            raise
        self._gathered.free(chunk)
