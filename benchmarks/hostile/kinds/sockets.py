"""TCP connections that send nothing."""

import resource
import socket


def open_silently(address: str) -> socket.socket:
    """Start to connect, without waiting for the result."""
    host, _, port = address.rpartition(":")
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex((host, int(port)))
    return made


def has_ended(one: socket.socket) -> bool:
    """Return whether the other end has closed a connection."""
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to its hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
