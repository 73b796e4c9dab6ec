"""NCCL process groups without torch's watchdogs, with sockets bound to one network interface."""

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
    # A lost or slow peer must fail its group and must not end the process.
    *("ASYNC_ERROR_HANDLING", "DESYNC_DEBUG", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"),
    "PROPAGATE_ERROR",
    # The engine's next step reports a broken device with its cause.
    "RETHROW_CUDA_ERRORS",
    # Otherwise work.wait() would block the host, for up to the group's timeout.
    "BLOCKING_WAIT",
)
NCCL_SETTINGS = {f"TORCH_NCCL_{name}": "0" for name in DISABLED_FEATURES}
_SIOCGIFADDR = 0x8915
log = logging.getLogger(__name__)


def nccl_group(store: Store, rank: int, num_ranks: int, max_ctas: int | None = None) -> Any:
    """Create a group of NCCL; ``configure_nccl`` must have been called before.

    The first operation creates the communicator. The caller must enforce timeouts: the group's own
    timeout of one day is never reached.

    Args:
        store: Store in which the ranks meet.
        rank: This rank within the group.
        num_ranks: Number of ranks of the group.
        max_ctas: Maximum thread blocks of a kernel, for a group that runs in parallel with steps.
            Its kernels get a stream of high priority, which steps never use. None: no limit and an
            ordinary stream.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
        options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)


def configure_nccl(host: str) -> None:
    """Configure this process for NCCL; must be called before its first group is created.

    NCCL's sockets are bound to the interface that has the address ``host``, unless
    ``NCCL_SOCKET_IFNAME`` is set. Raises ValueError if no interface has it.

    The environment variables stay set, because restoring them would race with groups of other
    threads: NCCL reads its variables once, torch reads them in the constructor of each group.
    """
    os.environ.update(NCCL_SETTINGS)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        log.warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: a lost peer makes NCCL end this process; unset it"
        )
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={find_interface(host)}"


def find_interface(host: str) -> str:
    """Return the name of this machine's interface that has the IPv4 address of ``host``.

    Raises ValueError if no interface has it.
    """
    wanted_address = host
    with suppress(OSError):
        wanted_address = socket.gethostbyname(host)
    found = {name: ip for _, name in socket.if_nameindex() if (ip := _address(name))}
    for name, address in found.items():
        if address == wanted_address:
            return name
    raise ValueError(
        f"kv_transfer.host={host!r}: NCCL needs an IPv4 address of an interface of this machine; "
        f"use one of {found}, or set NCCL_SOCKET_IFNAME"
    )


def _address(name: str) -> str:
    """Return the first IPv4 address of an interface, "" if it has none."""
    packed_name = struct.pack("256s", name.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed_name)[20:24])
    return ""
