"""Listening sockets at configured addresses."""

import socket


def open_listener(key: str, address: str) -> socket.socket:
    """Return a socket that listens at HOST:PORT, the value of the configuration key ``key``.

    Raises:
        ValueError: The address is unavailable.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise ValueError(
            f"{key}={address!r}: cannot listen there ({error.strerror or error}); stop what uses "
            f"it or choose another address, such as --set {key}=127.0.0.1:0"
        ) from error
