"""Sums of what pages hold, by which a flipped bit is found on its whole way, in memory too
(``kv_transfer.checksums``).

The words (of eight bytes, or of one where eight do not fit) of a part of the tokens in all layers
of a group, each times an odd number of its own, modulo 2^64: an odd factor has an inverse, so no
change of one word leaves the sum as it was. The factors are as good as random (SplitMix64's
finalizer, Steele et al., OOPSLA 2014), so that changes which are alike, as of a bit that is stuck,
do not cancel.
"""

import asyncio
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.core.errors import HandoverError
from tandem.kv_transfer.caches import DeviceEvent, PagedCaches, Span
from tandem.kv_transfer.layout import Group
from tandem.kv_transfer.messages import Checksums
from tandem.kv_transfer.offer_book import ComputedPrefix

if TYPE_CHECKING:
    from tandem.kv_transfer.pull import PullState

_STRIDE, *_MIX = (
    one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
PARTS_PER_PASS = 64
"""Parts: what is read is copied first."""


class PageChecksums:
    """Of a prefill rank's pages. Those of full pages are kept as long as the page is whose it was:
    what lies in the prefix cache has the sum of its first hand-over."""

    def __init__(self, caches: PagedCaches) -> None:
        self._caches = caches
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        """By group and page: its generation and sum."""

    def of(self, now: ComputedPrefix) -> Checksums:
        """Of all that is computed. On one thread."""
        size = self._caches.pool.page_size
        groups = {group.name: self._of(group, now, size) for group in self._caches.layout.groups}
        return Checksums(size, groups)

    def _of(self, group: Group, now: ComputedPrefix, size: int) -> tuple[int, ...]:
        num_full, num_left = divmod(now.num_tokens, size)
        owned = {(group.name, page): page for page in now.pages[:num_full]}
        generations = dict(zip(owned, now.generations, strict=False))
        fresh = [key for key in owned if self._known.get(key, (-1, 0))[0] != generations[key]]
        pages = [*(owned[key] for key in fresh), *now.pages[num_full : num_full + 1]]
        span = Span(group, pages, 0, len(fresh) * size + num_left)
        checksums = compute_checksums(self._caches, span, size, now.event)
        for key, value in zip(fresh, checksums, strict=False):
            self._known[key] = generations[key], value
        return *(self._known[key][1] for key in owned), *checksums[len(fresh) :]


async def verify_checksums(pull: "PullState") -> None:
    """Compare what is in the pages now, whatever way it came, with what prefill has. Raises
    HandoverError where that differs."""
    endpoint, offer = pull.endpoint, pull.offer
    reply: Checksums = await pull.link.call(
        "checksums", offer.identity, Checksums, endpoint.deadlines.progress_s
    )
    for group in endpoint.caches.layout.groups:
        span = Span(group, pull.pages, 0, offer.num_tokens)
        computing = endpoint.copier.submit(
            compute_checksums, endpoint.caches, span, reply.num_tokens
        )
        if await asyncio.wrap_future(computing) != reply.groups[group.name]:
            raise HandoverError(f"{offer.identity}: other bits than prefill has, in {group.name}")


def compute_checksums(
    caches: PagedCaches, span: Span, size: int, event: DeviceEvent | None = None
) -> tuple[int, ...]:
    """Of each ``size`` of its tokens, from its first one on; done when it returns."""
    checksums: list[int] = []
    for lo in range(span.lo, span.hi, size * PARTS_PER_PASS):
        with caches.on_copy_stream(event):
            part = span._replace(lo=lo, hi=min(span.hi, lo + size * PARTS_PER_PASS))
            checksums += _checksum_parts(caches, part, size).tolist()
    return tuple(checksums)


def _checksum_parts(caches: PagedCaches, span: Span, size: int) -> Tensor:
    slots_T, first = caches.slots_T(span), 0
    num_parts = -(-len(slots_T) // size)
    sum_N = torch.zeros(num_parts, dtype=torch.int64, device=caches.device)
    word = torch.int64 if span.group.bytes_per_token % 8 == 0 else torch.uint8
    for layer in caches.layers(span.group, word):
        words_TW = layer[slots_T].to(torch.int64)
        num_words = size * words_TW.shape[1]
        words_TW = pad(words_TW, (0, 0, 0, num_parts * size - len(words_TW)))
        factor_W = _factors(torch.arange(first, first + num_words, device=caches.device))
        sum_N += (words_TW.view(num_parts, num_words) * factor_W).sum(-1)
        first += num_words
    return sum_N


def _factors(x_W: Tensor) -> Tensor:
    x_W = x_W * _STRIDE
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x_W = (x_W ^ (x_W >> shift)) * factor
    return (x_W ^ (x_W >> 31)) | 1
