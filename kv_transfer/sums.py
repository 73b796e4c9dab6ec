"""Sums of what pages hold, by which a flipped bit is found on its whole way, in memory too.

The 64-bit words of a part of the tokens in all layers, each times an odd number of its own, modulo
2^64: an odd factor has an inverse, so no change of one word leaves the sum as it was. The factors
are as good as random (SplitMix64's finalizer, Steele et al., OOPSLA 2014), so that changes which
are alike, as of a bit that is stuck, do not cancel each other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kv_transfer.caches import Mark, PagedCaches, Span
from kv_transfer.offered import Computed

_STRIDE, *_MIX = (
    one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
NUM_AT_ONCE = 64
"""Parts: what is read is copied first."""


class PageSums:
    """Of a prefill rank's pages, each a part. Those of full pages are kept as long as the page is
    whose it was: what lies in the prefix cache has the sum of when it was computed. Used by one
    thread."""

    def __init__(self, caches: PagedCaches) -> None:
        self._caches = caches
        self._known: dict[int, tuple[int, int]] = {}
        """By page: its generation and sum."""

    def of(self, now: Computed) -> tuple[int, ...]:
        """Of all that is computed, by page."""
        size = self._caches.pool.page_size
        num_full, num_left = divmod(now.num_tokens, size)
        owned = list(zip(now.pages, now.generations, strict=True))
        fresh = [one for one in owned[:num_full] if self._known.get(one[0], (-1, 0))[0] != one[1]]
        asked = [page for page, _ in fresh] + list(now.pages[num_full : num_full + 1])
        sums = sums_of(self._caches, asked, len(fresh) * size + num_left, size, now.mark)
        for (page, generation), value in zip(fresh, sums, strict=False):
            self._known[page] = generation, value
        return *(self._known[page][1] for page, _ in owned[:num_full]), *sums[len(fresh) :]


def sums_of(
    caches: PagedCaches, pages: Sequence[int], num_tokens: int, size: int, mark: Mark | None = None
) -> list[int]:
    """Of each ``size`` of the tokens on ``pages``, in all layers; done when it returns."""
    sums: list[int] = []
    for lo in range(0, num_tokens, size * NUM_AT_ONCE):
        span = Span(caches.layout.groups[0], pages, lo, min(num_tokens, lo + size * NUM_AT_ONCE))
        with caches.beside(mark):
            sums += _summed(caches, span, size).tolist()
    return sums


def _summed(caches: PagedCaches, span: Span, size: int) -> Tensor:
    slots_T, first = caches.slots_T(span), 0
    num_parts = -(-len(slots_T) // size)
    sum_N = torch.zeros(num_parts, dtype=torch.int64, device=caches.device)
    for layer in caches.layers():
        words_TW = _words(layer[slots_T])
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


def _words(entry_TB: Tensor) -> Tensor:
    """Of eight bytes each, or of one where eight do not fit."""
    byte_TB = entry_TB.view(torch.uint8)
    fits = byte_TB.shape[1] % 8 == 0
    return byte_TB.view(torch.int64) if fits else byte_TB.to(torch.int64)
