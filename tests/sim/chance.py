"""All randomness from one seed, for the cluster's nonces and pauses as well as for the faults."""

import random
import secrets
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def patched(draw: random.Random) -> Iterator[None]:
    """Make the standard library draw from ``draw`` during the block."""
    changes: list[tuple[Any, str, Any]] = [
        (secrets, "randbits", draw.getrandbits),
        (secrets, "token_bytes", lambda num=32: draw.randbytes(num)),
        (secrets, "token_hex", lambda num=32: draw.randbytes(num).hex()),
        (random, "uniform", draw.uniform),
        (uuid, "uuid4", lambda: uuid.UUID(int=draw.getrandbits(128))),
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield
