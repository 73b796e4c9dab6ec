"""Channels over torch.distributed: a process group of exactly two ranks.

No default group exists. P (rank 0) hosts one store per rank on the configured address; each
channel meets there under its own nonce. What differs between gloo and NCCL is the backend, which
joins one end of two that meet in a store.
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
    """Makes the two ends of channels of one ``backend``, for which staging must lie on ``device``;
    the store listens on ``host`` only.

    `accept` and `connect` block, and end within ``timeout_s`` unless the backend hangs: see
    `opened`.
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
        """P: the address that D is told; the same for all channels."""
        with self._lock:
            if self._server is None:
                self._server, port = store_server(self._host, self.timeout_s)
                self._address = f"{self._host}:{port}"
            return self._address

    def accept(self, nonce: str, peer: str) -> Channel:
        """P: rank 0's end, warm. Raises HandoverError when D does not come in time."""
        return self._make(self.listen(), nonce, peer, rank=0)

    def connect(self, address: str, nonce: str, peer: str) -> Channel:
        """D: rank 1's end, warm. Raises HandoverError when P does not come in time."""
        return self._make(address, nonce, peer, rank=1)

    def _make(self, address: str, nonce: str, peer: str, rank: int) -> Channel:
        name, ends_at = f"{self.backend}:{peer}", time.monotonic() + self.timeout_s
        try:
            host, _, port = address.rpartition(":")
            store = store_client(host, int(port), self.timeout_s, nonce)
            transport = self._backend.join(store, rank)
        except (RuntimeError, OSError) as error:  # DistError is a RuntimeError
            raise HandoverError(f"channel {name} at {address}: {error}") from None
        channel = Channel(transport, name, self.timeout_s)
        _warm_up(channel, rank, self.device, ends_at)
        return channel


def _warm_up(channel: Channel, rank: int, device: str, ends_at: float) -> None:
    """One element each way: sockets, communicators and threads exist before real use."""
    element = torch.zeros(1, dtype=torch.uint8, device=device)
    # Kept for as long as the channel can touch it, also if this fails.
    channel.terminal.add_done_callback(lambda _: element.numel())
    for sender in (0, 1):
        transfer = channel.send(element) if rank == sender else channel.recv(element)
        try:
            transfer.done.result(max(0.0, ends_at - time.monotonic()))
        except TimeoutError:
            channel.abort("the first transfers took too long")
            raise HandoverError(
                f"channel {channel.name}: {transfer.description}: no end of it"
            ) from None


def create_channel_factory(backend: str, host: str, timeout_s: float = 30.0) -> ChannelFactory:
    """Raises ValueError for an unknown backend, and for a host that NCCL cannot be bound to."""
    if backend == "gloo":
        return ChannelFactory(GlooBackend(host, timeout_s), host, timeout_s)
    if backend == "nccl":
        return ChannelFactory(NcclBackend(host), host, timeout_s)
    raise ValueError(f"kv_transfer.backend must be 'gloo' or 'nccl', got {backend!r}")


def channel_factory_from_config(config: TandemConfig, kind: str, host: str) -> ChannelFactory:
    """Channels for ``kv_transfer.backend``; auto is nccl on GPUs, gloo on CPUs and where nothing is
    sent."""
    backend = config.kv_transfer.backend
    if backend == "auto":
        on_gpus = config.of_kind(kind).device == "cuda" and kind != COLOCATED
        backend = "nccl" if on_gpus else "gloo"
    return create_channel_factory(backend, host)
