"""Groups of NCCL: made without torch's watchdogs, their sockets bound to one network interface."""

import fcntl
import logging
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tandem.net.groups import Store

DISABLED_FEATURES = (
    # A lost or slow peer is its group's failure, never the end of the process.
    *("ASYNC_ERROR_HANDLING", "DESYNC_DEBUG", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"),
    "PROPAGATE_ERROR",
    # A broken device is met, and told with its cause, by the engine's next step.
    "RETHROW_CUDA_ERRORS",
    # Or work.wait() would block, and with the group's timeout.
    "BLOCKING_WAIT",
)
NCCL_SETTINGS = {f"TORCH_NCCL_{name}": "0" for name in DISABLED_FEATURES}
_SIOCGIFADDR = 0x8915
log = logging.getLogger(__name__)


def nccl_group(store: Store, rank: int, num_ranks: int, max_ctas: int | None = None) -> Any:
    """``prepare`` comes before. Every deadline is the caller's: its own is beyond all of them. The
    first call creates its communicator. With ``max_ctas`` it goes before steps, beside which it
    runs, and has no stream of theirs."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    if max_ctas is not None:
        options.config.max_ctas, options.is_high_priority_stream = max_ctas, True
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)


def configure_nccl(host: str) -> None:
    """Before any group of NCCL in this process, to whose sockets the interface of the address
    ``host`` is bound.

    Settings are the process's, for good: torch reads them in a group's constructor, NCCL its own
    once. Set and restored around each constructor, they would race with other threads' groups.
    """
    os.environ.update(NCCL_SETTINGS)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        log.warning("TORCH_DISTRIBUTED_DEBUG=DETAIL: NCCL ends this process with a lost peer")
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={find_interface(host)}"


def find_interface(host: str) -> str:
    """The name of the interface of this machine that has the address ``host``.

    Raises ValueError where none has.
    """
    wanted = host
    with suppress(OSError):
        wanted = socket.gethostbyname(host)
    found = {name: ip for _, name in socket.if_nameindex() if (ip := _address(name))}
    for name, address in found.items():
        if address == wanted:
            return name
    raise ValueError(
        f"kv_transfer.host={host!r} is no IPv4 address of an interface here, which NCCL needs; "
        f"use one of {found}, or set NCCL_SOCKET_IFNAME"
    )


def _address(name: str) -> str:
    """The first IPv4 address of an interface, "" if it has none."""
    packed_name = struct.pack("256s", name.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed_name)[20:24])
    return ""
