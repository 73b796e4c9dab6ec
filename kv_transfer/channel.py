"""Channels over torch.distributed: a process group of exactly two ranks, gloo or NCCL.

No default group exists. P (rank 0) hosts one store per rank on the configured address; each
channel meets there under its own nonce.
"""

import contextlib
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from core.config import TandemConfig
from core.errors import HandoverError
from core.info import COLOCATED
from kv_transfer.base import Channel, ChannelMaker, Transfer

ProcessGroup = Any  # ProcessGroupGloo | ProcessGroupNCCL; torch's stubs lack their methods
BACKENDS = ("gloo", "nccl")


class ProcessGroupChannel(Channel):
    """Takes ownership of ``group``. Tensors must lie where the backend can reach them."""

    def __init__(
        self, group: ProcessGroup, rank: int, name: str, backend: str, timeout_s: float, device: str
    ) -> None:
        self._group: ProcessGroup | None = group
        self._peer_rank = 1 - rank
        self._stream = torch.cuda.Stream(device) if backend == "nccl" else None
        super().__init__(name, backend, timeout_s)

    def _transfer(self, transfer: Transfer) -> None:
        group = self._group
        assert group is not None, "a destroyed channel was used"
        if transfer.after is not None:
            transfer.after()
        operation = group.send if transfer.direction == "send" else group.recv
        on_stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with on_stream:
            work = operation([transfer.tensor], self._peer_rank, transfer.transfer_id)
            transfer.launched.set_result(None)
            work.wait(timedelta(seconds=self.timeout_s))

    def _interrupt(self) -> None:
        # Gloo's abort leaves a blocked wait to its deadline, or to the peer's closing.
        group = self._group
        if group is not None and self.backend == "nccl":
            group.abort()

    def _destroy(self) -> None:
        if self._group is not None and self.backend == "nccl":
            self._group.abort()
        self._group = None


class ProcessGroupChannels:
    """Makes process-group channels that listen on ``host`` only."""

    def __init__(
        self, backend: str, host: str, timeout_s: float = 30.0, device: str | None = None
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"kv_transfer.backend must be one of {BACKENDS}, got {backend!r}")
        self.backend = backend
        self.device = device or ("cuda" if backend == "nccl" else "cpu")
        self.timeout_s = timeout_s
        self._host = host
        self._server: dist.TCPStore | None = None
        self._address = ""
        self._lock = threading.Lock()

    def listen(self) -> str:
        with self._lock:
            if self._server is None:
                self._server, self._address = _store_server(self._host, self.timeout_s)
            return self._address

    def accept(self, nonce: str, peer: str) -> Channel:
        return self._make(self.listen(), nonce, peer, rank=0)

    def connect(self, address: str, nonce: str, peer: str) -> Channel:
        return self._make(address, nonce, peer, rank=1)

    def _make(self, address: str, nonce: str, peer: str, rank: int) -> Channel:
        name = f"{self.backend}:{peer}"
        try:
            group = self._group(address, nonce, rank)
            channel = ProcessGroupChannel(
                group, rank, name, self.backend, self.timeout_s, self.device
            )
        except RuntimeError as error:  # DistError is one
            raise HandoverError(f"channel {name} at {address}: {error}") from None
        _warm(channel, rank, self.device)
        return channel

    def _group(self, address: str, nonce: str, rank: int) -> ProcessGroup:
        host, port = address.rsplit(":", 1)
        timeout = timedelta(seconds=self.timeout_s)
        # A client of its own: one store's waits would block all other channels' set-up.
        client = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        store = dist.PrefixStore(nonce, client)
        if self.backend == "nccl":
            return _nccl(store, rank, timeout)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = timeout
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: dist.Store, rank: int, timeout: timedelta) -> ProcessGroup:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = 4
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _store_server(host: str, timeout_s: float) -> tuple[dist.TCPStore, str]:
    """TCPStore alone would listen on every interface, so the socket is bound for it."""
    try:
        listener = socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise ValueError(f"kv_transfer cannot listen on {host!r}: {error}") from None
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    server = dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return server, f"{host}:{port}"


def _warm(channel: Channel, rank: int, device: str) -> None:
    """One element each way: sockets, communicators and threads exist before real use."""
    element = torch.zeros(1, dtype=torch.uint8, device=device)
    for sender in (0, 1):
        transfer = channel.send(element) if rank == sender else channel.recv(element)
        transfer.done.result()


def channel_maker(config: TandemConfig, kind: str, host: str) -> ChannelMaker:
    """Channels for ``kv_transfer.backend``; auto is nccl on GPUs, gloo on CPUs and where nothing is
    sent."""
    backend = config.kv_transfer.backend
    if backend == "auto":
        on_gpus = config.of_kind(kind).device == "cuda" and kind != COLOCATED
        backend = "nccl" if on_gpus else "gloo"
    return ProcessGroupChannels(backend, host)
