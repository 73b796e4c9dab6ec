"""gRPC settings shared by clients and servers."""

import os

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of a message. A server may accept less (cluster/entrypoints/uploads.py)."""
STREAM_KEY = "tandem-stream"
"""Metadata key of Generate. Its value is a nonce that all attempts at one stream carry.

A later attempt ends an earlier one with the same request id and nonce.
"""
RETRY_AFTER_KEY = "retry-after-s"
"""Trailing metadata key of RESOURCE_EXHAUSTED: seconds to wait before a retry."""


def proxy_options() -> tuple[tuple[str, int], ...]:
    """Return channel options that make gRPC ignore http_proxy and similar variables, as Ray does.

    Such a proxy would also receive loopback addresses unless no_proxy lists them.
    TANDEM_USE_PROXY=1 makes channels use the proxy.
    """
    return (("grpc.enable_http_proxy", int(os.environ.get("TANDEM_USE_PROXY") == "1")),)
