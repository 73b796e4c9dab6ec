"""Which network interface has an address: what NCCL wants to be told."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_of(host: str) -> str:
    """The name of the interface of this machine that has the address ``host``.

    Raises ValueError where none has.
    """
    found = _addresses()
    try:
        wanted = socket.gethostbyname(host)
    except OSError:
        wanted = host
    for name, address in found.items():
        if address == wanted:
            return name
    raise ValueError(
        f"kv_transfer.host={host!r} is no IPv4 address of an interface here, which NCCL needs; "
        f"use one of {found}, or set NCCL_SOCKET_IFNAME"
    )


def _addresses() -> dict[str, str]:
    """First IPv4 address by interface; those without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, asked)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
