"""Channels over torch.distributed: each is a process group of two ranks, of gloo or NCCL.

There is no default group. A prefill rank is rank 0 of all its channels. It hosts one TCPStore, on
the configured address. In this store, the two ends of a channel find each other by the channel's
nonce.
"""

import threading
import time

import torch

from tandem.core.config import TandemConfig
from tandem.core.errors import HandoverError
from tandem.core.info import COLOCATED
from tandem.kv_transfer.base import Channel
from tandem.kv_transfer.gloo import GlooBackend
from tandem.kv_transfer.nccl import NcclBackend
from tandem.net.groups import Store, store_client, store_server


class ChannelFactory:
    """Creates channels of one backend.

    ``accept`` and ``connect`` block for up to ``timeout_s``, or longer if the backend hangs
    (see ``waiting.open_with_deadline``).

    Args:
        backend: Transport of the channels. Staging must be on its ``device``.
        host: The only address that the store listens on.
        timeout_s: Maximum seconds to set up a channel, and of each transfer.
    """

    def __init__(
        self, backend: GlooBackend | NcclBackend, host: str, timeout_s: float = 30.0
    ) -> None:
        self.backend = backend.name
        self.device = backend.device
        self.timeout_s = timeout_s
        self._backend = backend
        self._host = host
        self._server: Store | None = None
        self._address = ""
        self._lock = threading.Lock()

    def listen(self) -> str:
        """Return HOST:PORT of the prefill rank's store, the same for all channels.

        The first call starts the store.
        """
        with self._lock:
            if self._server is None:
                self._server, port = store_server(self._host, self.timeout_s)
                self._address = f"{self._host}:{port}"
            return self._address

    def accept(self, nonce: str, peer: str) -> Channel:
        """Build the prefill rank's end of a channel and warm it up.

        Raises HandoverError if the decode rank does not connect in time.
        """
        return self._make(self.listen(), nonce, peer, rank=0)

    def connect(self, address: str, nonce: str, peer: str) -> Channel:
        """Build the decode rank's end of a channel and warm it up.

        Raises HandoverError if the prefill rank does not connect in time.
        """
        return self._make(address, nonce, peer, rank=1)

    def _make(self, address: str, nonce: str, peer: str, rank: int) -> Channel:
        name = f"{self.backend}:{peer}"
        ends_at = time.monotonic() + self.timeout_s
        try:
            host, _, port = address.rpartition(":")
            store = store_client(host=host, port=int(port), timeout_s=self.timeout_s, prefix=nonce)
            transport = self._backend.join(store, rank)
        except (RuntimeError, OSError) as error:  # DistError is a RuntimeError
            raise HandoverError(
                f"channel {name} could not be opened at {address}: {error}"
            ) from None
        channel = Channel(transport, name, self.timeout_s)
        _warm_up(channel=channel, rank=rank, device=self.device, ends_at=ends_at)
        return channel


def _warm_up(channel: Channel, rank: int, device: str, ends_at: float) -> None:
    """Transfer one byte each way, so that sockets, communicators and threads exist afterwards.

    Raises HandoverError if that is not done by ``ends_at``, on the clock of ``time.monotonic``.
    """
    element = torch.zeros(1, dtype=torch.uint8, device=device)
    # This reference keeps the tensor until the channel is terminal, even if the warm-up fails.
    channel.terminal.add_done_callback(lambda _: element.numel())
    for sender in (0, 1):
        transfer = channel.send(element) if rank == sender else channel.recv(element)
        try:
            transfer.done.result(max(0.0, ends_at - time.monotonic()))
        except TimeoutError:
            channel.abort("the first transfers took too long")
            raise HandoverError(
                f"channel {channel.name}: {transfer.description} did not end in time"
            ) from None


def create_channel_factory(backend: str, host: str, timeout_s: float = 30.0) -> ChannelFactory:
    """Create the channel factory for the ``backend`` "gloo" or "nccl".

    Raises ValueError for another name, or if NCCL cannot be bound to ``host``.
    """
    if backend == "gloo":
        return ChannelFactory(GlooBackend(host, timeout_s), host, timeout_s)
    if backend == "nccl":
        return ChannelFactory(NcclBackend(host), host, timeout_s)
    raise ValueError(f"kv_transfer.backend must be 'gloo' or 'nccl', got {backend!r}")


def channel_factory_from_config(config: TandemConfig, kind: str, host: str) -> ChannelFactory:
    """Create the channel factory that ``kv_transfer.backend`` selects.

    "auto" is nccl on GPUs, and gloo on CPUs and on colocated ranks, which transfer nothing.
    """
    backend = config.kv_transfer.backend
    if backend == "auto":
        on_gpus = config.of_kind(kind).device == "cuda" and kind != COLOCATED
        backend = "nccl" if on_gpus else "gloo"
    return create_channel_factory(backend, host)
