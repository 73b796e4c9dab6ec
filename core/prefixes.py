"""Digests of token prefixes: equal digests mean equal tokens."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence


def prefix_digests(token_ids: Sequence[int], stride: int) -> Iterator[bytes]:
    """Yield digests of the first ``stride``, ``2 * stride``, ... tokens; whole strides only."""
    digest = hashlib.blake2b(digest_size=16)
    for end in range(stride, len(token_ids) + 1, stride):
        digest.update(array("I", token_ids[end - stride : end]).tobytes())
        yield digest.digest()
