"""One rank's KV memory as the hand-over sees it: layout, pages and per-layer tensors."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kv_transfer.layout import Group, Layout
from kv_transfer.pages import PagePool
from kv_transfer.staging import Buffer, gather, scatter


class Caches:
    """Cache tensors by group name, each ``[num_pages * page_size, width]``, one per layer.

    `gather` and `scatter` may only run on the thread that owns the tensors and the pool.
    """

    def __init__(
        self, layout: Layout, pool: PagePool, tensors: Mapping[str, Sequence[Tensor]]
    ) -> None:
        self.layout = layout
        self.pool = pool
        self._tensors = {group.name: list(tensors[group.name]) for group in layout.groups}
        for group in layout.groups:
            _check_tensors(group, self._tensors[group.name], pool)
        self.device = self._tensors[layout.groups[0].name][0].device

    def gather(self, group: Group, pages: Sequence[int], lo: int, hi: int, out: Tensor) -> None:
        """Read tokens ``[lo, hi)`` of a sequence on ``pages`` into ``out`` (see `staged`)."""
        gather(self._tensors[group.name], self._slots_T(pages, lo, hi), out)

    def scatter(self, group: Group, pages: Sequence[int], lo: int, hi: int, staged: Tensor) -> None:
        """Write tokens ``[lo, hi)`` of a sequence on ``pages`` from ``staged``."""
        scatter(staged, self._slots_T(pages, lo, hi), self._tensors[group.name])

    def _slots_T(self, pages: Sequence[int], lo: int, hi: int) -> Tensor:
        size = self.pool.page_size
        assert 0 <= lo < hi <= len(pages) * size, f"tokens [{lo}, {hi}) of {len(pages)} pages"
        token_T = torch.arange(lo, hi)
        page_T = torch.tensor(pages, dtype=torch.int64)[token_T // size]
        return (page_T * size + token_T % size).to(self.device)


def caches_of(
    tensors: Mapping[str, Sequence[Tensor]], pool: PagePool, dtype: str, model: str
) -> Caches:
    """View per-layer tensors [num_pages, page_size, width] as the hand-over's caches."""
    groups = tuple(
        Group(name, len(layers), layers[0].shape[-1] * layers[0].element_size())
        for name, layers in tensors.items()
    )
    flat = {name: [layer.flatten(0, 1) for layer in layers] for name, layers in tensors.items()}
    return Caches(Layout(groups, dtype, model), pool, flat)


def staged(group: Group, buffer: Buffer, num_tokens: int) -> Tensor:
    """The part of a buffer one chunk fills: uint8 ``[num_layers, num_tokens, bytes_per_token]``."""
    num_bytes = num_tokens * group.bytes_per_token_all_layers
    shape = (group.num_layers, num_tokens, group.bytes_per_token)
    return buffer.bytes[:num_bytes].view(shape)


def check_chunks(layout: Layout, chunk_bytes: int) -> None:
    """Raises ValueError if a chunk cannot hold one token of every group."""
    most = max(group.bytes_per_token_all_layers for group in layout.groups)
    if chunk_bytes < most:
        raise ValueError(f"a staging chunk must hold a token of {most} bytes, got {chunk_bytes}")


def chunks(group: Group, lo: int, hi: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Split tokens ``[lo, hi)`` of all layers of a group into pieces that fit a buffer."""
    step = chunk_bytes // group.bytes_per_token_all_layers
    for start in range(lo, hi, step):
        yield start, min(start + step, hi)


def _check_tensors(group: Group, tensors: list[Tensor], pool: PagePool) -> None:
    assert len(tensors) == group.num_layers, f"{group} has {len(tensors)} cache tensors"
    for tensor in tensors:
        assert tensor.dim() == 2 and tensor.is_contiguous(), f"{group}: {tensor.shape}"
        assert tensor.shape[0] == pool.num_pages * pool.page_size, f"{group}: {tensor.shape}"
        width_bytes = tensor.shape[1] * tensor.element_size()
        assert width_bytes == group.bytes_per_token, f"{group}: rows of {width_bytes} bytes"
