"""Process groups of torch.distributed, and the stores in which their ranks meet.

Groups are constructed directly; there is no default group. Sockets listen on configured addresses
only. Groups of NCCL are in nccl.py.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Store = dist.Store


def store_server(host: str, timeout_s: float) -> tuple[Store, int]:
    """Start a store that listens on ``host`` only, and return it with its port.

    The socket is bound here, because TCPStore itself would listen on every interface. Raises
    ValueError if ``host`` cannot be bound.
    """
    try:
        listener = socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise ValueError(f"kv_transfer.host: cannot listen on {host!r}: {error}") from None
    port = listener.getsockname()[1]
    return _store(
        host=host,
        port=port,
        timeout_s=timeout_s,
        is_server=True,
        master_listen_fd=listener.detach(),
    ), port


def store_client(host: str, port: int, timeout_s: float, prefix: str = "") -> Store:
    """Connect to a store and return a view of it in which ``prefix`` is added to every key.

    Each group needs a separate client, because waits on one client block each other.
    """
    return dist.PrefixStore(
        prefix, _store(host=host, port=port, timeout_s=timeout_s, is_server=False)
    )


def _store(host: str, port: int, timeout_s: float, is_server: bool, **more: Any) -> Store:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, is_server, timeout, wait_for_workers=False, **more)


def gloo_group(store: Store, rank: int, num_ranks: int, host: str, timeout_s: float) -> Any:
    """Create a gloo group that listens on ``host`` only.

    ``timeout_s`` is the maximum time of each wait for another rank.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, num_ranks, options)
