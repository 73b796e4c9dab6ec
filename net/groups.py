"""Process groups of torch.distributed and the stores in which their ranks meet; NCCL's: nccl.py.

Groups are constructed directly; no default group exists. Sockets listen on configured addresses
only.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Store = dist.Store


def store_server(host: str, timeout_s: float) -> tuple[Store, int]:
    """And its port. TCPStore alone would listen on every interface: the socket is bound for it."""
    try:
        listener = socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise ValueError(f"kv_transfer cannot listen on {host!r}: {error}") from None
    port = listener.getsockname()[1]
    return _store(host, port, timeout_s, True, master_listen_fd=listener.detach()), port


def store_client(host: str, port: int, timeout_s: float, prefix: str = "") -> Store:
    """What is stored under ``prefix``; one for each group: waits of one store block each other."""
    return dist.PrefixStore(prefix, _store(host, port, timeout_s, False))


def _store(host: str, port: int, timeout_s: float, is_server: bool, **more: Any) -> Store:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, is_server, timeout, wait_for_workers=False, **more)


def gloo_group(store: Store, rank: int, num_ranks: int, host: str, timeout_s: float) -> Any:
    """A group that listens on ``host`` only; ``timeout_s`` bounds each wait for another rank."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, num_ranks, options)
