"""What both ends of a call know beside its messages."""

MESSAGE_SIZES = tuple((f"grpc.max_{way}_message_length", 16 << 20) for way in ("receive", "send"))
"""Bytes, as both ends are told."""
STREAM_KEY = "tandem-stream"
"""Metadata of Generate: a nonce that all attempts at one stream carry. A later attempt ends what
is left of an earlier one under its request id."""
RETRY_AFTER_KEY = "retry-after-s"
"""Trailing metadata of RESOURCE_EXHAUSTED: seconds to wait before another try."""
