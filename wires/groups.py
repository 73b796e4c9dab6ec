"""Process groups of torch.distributed and the stores in which their ranks meet.

Groups are constructed directly; no default group exists. Sockets listen on configured addresses
only.
"""

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from wires.interfaces import interface_of

Store = dist.Store
SWITCHED_OFF = (
    # A lost or slow peer is its group's failure, never the end of the process.
    *("ASYNC_ERROR_HANDLING", "DESYNC_DEBUG", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"),
    "PROPAGATE_ERROR",
    # A broken device is met, and told with its cause, by the engine's next step.
    "RETHROW_CUDA_ERRORS",
    # Or work.wait() would block, and with the group's timeout.
    "BLOCKING_WAIT",
)
SETTINGS = {f"TORCH_NCCL_{name}": "0" for name in SWITCHED_OFF}
log = logging.getLogger(__name__)


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


def nccl_group(store: Store, rank: int, num_ranks: int, max_ctas: int | None = None) -> Any:
    """``prepare`` comes before. Every deadline is the caller's: its own is beyond all of them. The
    first call creates its communicator."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)


def prepare(host: str) -> None:
    """Before any group of NCCL in this process, to whose sockets the interface of the address
    ``host`` is bound.

    Settings are the process's, for good: torch reads them in a group's constructor, NCCL its own
    once. Set and restored around each constructor, they would race with other threads' groups.
    """
    os.environ.update(SETTINGS)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        log.warning("TORCH_DISTRIBUTED_DEBUG=DETAIL: NCCL ends this process with a lost peer")
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(host)}"
