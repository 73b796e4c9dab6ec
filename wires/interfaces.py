"""Which network interface has an address: what NCCL wants to be told."""

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915


def interface_of(host: str) -> str:
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
    asked = struct.pack("256s", name.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        return socket.inet_ntoa(fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, asked)[20:24])
    return ""
