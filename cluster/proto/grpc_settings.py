"""What both ends of a call know beside its messages."""

import os

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of a message; a server may receive less (cluster/entrypoints/uploads.py)."""
STREAM_KEY = "tandem-stream"
"""Metadata of Generate: a nonce that all attempts at one stream carry. A later attempt ends what
is left of an earlier one under its request id."""
RETRY_AFTER_KEY = "retry-after-s"
"""Trailing metadata of RESOURCE_EXHAUSTED: seconds to wait before another try."""


def proxy_options() -> tuple[tuple[str, int], ...]:
    """Return channel options by which gRPC ignores http_proxy and the like, as Ray's channels do.

    A loopback address goes through such a proxy too, where no_proxy does not name it.
    TANDEM_USE_PROXY=1 makes channels use the proxy.
    """
    return (("grpc.enable_http_proxy", int(os.environ.get("TANDEM_USE_PROXY") == "1")),)
