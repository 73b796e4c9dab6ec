"""What both ends of a call know beside its messages."""

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of a message; a server may receive less (cluster/door/uploads.py)."""
STREAM_KEY = "tandem-stream"
"""Metadata of Generate: a nonce that all attempts at one stream carry. A later attempt ends what
is left of an earlier one under its request id."""
RETRY_AFTER_KEY = "retry-after-s"
"""Trailing metadata of RESOURCE_EXHAUSTED: seconds to wait before another try."""
