"""A rank's KV caches as hand-overs access them: layout, pages and per-layer tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kv_transfer.layout import Group, Layout
from tandem.kv_transfer.pages import PagePool
from tandem.kv_transfer.staging import Buffer

DeviceEvent = torch.cuda.Event
Copy = Callable[[Sequence[Tensor], Tensor, Tensor, bool], None]
"""Function ``copy(layers, slots_T, rows_LTW, is_gather)`` that copies entries of all layers.

If ``is_gather``, it copies the entries in the slots ``slots_T`` of the ``layers`` ([num_slots, W]
each) to ``rows_LTW``. Otherwise it copies ``rows_LTW`` to these slots. Layers and rows have the
same integer type.
"""


class Span(NamedTuple):
    """Tokens ``[lo, hi)`` of a sequence on ``pages``, in all layers of a group."""

    group: Group
    pages: Sequence[int]
    lo: int
    hi: int


class PagedCaches:
    """Cache tensors of all groups, with copies between pages and staging.

    ``gather`` and ``scatter`` are called on one thread, in parallel with engine steps. On GPUs they
    use a separate stream. No step accesses the same entries at that time. The copies are complete
    on return.

    Args:
        tensors: Tensors ``[num_pages, page_size, width]`` by group name, one per layer.
        pool: The rank's page pool.
        dtype: Field of ``Layout``, as are ``model``, ``num_features`` and ``computed_by``.
        copy: Copy function of the kernels, None for the default of the device.
    """

    def __init__(
        self,
        tensors: Mapping[str, Sequence[Tensor]],
        pool: PagePool,
        dtype: str,
        model: str,
        num_features: int = 0,
        computed_by: str = "",
        copy: Copy | None = None,
    ) -> None:
        groups = tuple(
            Group(name, len(layers), layers[0].shape[-1] * layers[0].element_size())
            for name, layers in tensors.items()
        )
        self.layout = Layout(
            groups=groups,
            dtype=dtype,
            model=model,
            num_features=num_features,
            computed_by=computed_by,
        )
        self.pool = pool
        num_slots = pool.num_pages * pool.page_size
        self._tensors = {
            name: [layer.view(num_slots, -1) for layer in layers]
            for name, layers in tensors.items()
        }
        self.device = self._tensors[groups[0].name][0].device
        self._copy = copy or copy_for_device(self.device)
        # torch may share this stream with others of its priority; steps use another priority.
        self._stream = torch.cuda.Stream(self.device, -1) if self.device.type == "cuda" else None

    def record_event(self) -> DeviceEvent | None:
        """Record an event after all work that the calling thread has launched, for ``gather``.

        Returns None on CPUs, where launched work is already complete.
        """
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def gather(self, span: Span, out: Tensor, event: DeviceEvent | None = None) -> None:
        """Wait for ``event``, then copy the entries of ``span`` to ``out``, a ``staging_view``."""
        with self.on_copy_stream(event):
            rows = _widest_view(out)
            slots_T = self.slots_T(span)
            local_rows = (
                rows if out.device == self.device else torch.empty_like(rows, device=self.device)
            )
            self._copy(self.layers(span.group, rows.dtype), slots_T, local_rows, True)
            if local_rows is not rows:
                rows.copy_(local_rows, non_blocking=True)

    def scatter(self, span: Span, data: Tensor) -> None:
        """Copy ``data``, shaped as ``staging_view`` returns it, to the entries of ``span``."""
        with self.on_copy_stream(None):
            rows = _widest_view(data)
            slots_T = self.slots_T(span)
            local_rows = rows.to(self.device, non_blocking=True)
            self._copy(self.layers(span.group, rows.dtype), slots_T, local_rows, False)

    def layers(self, group: Group, dtype: torch.dtype) -> list[Tensor]:
        """Return the layers of a group as ``[num_slots, W]`` views with integers of ``dtype``."""
        return [layer.view(torch.uint8).view(dtype) for layer in self._tensors[group.name]]

    @contextmanager
    def on_copy_stream(self, event: DeviceEvent | None) -> Iterator[None]:
        """Return a context that launches work on the copy stream, after ``event``.

        Leaving the context waits for that work. On CPUs it has no effect.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield
            self._stream.synchronize()

    def slots_T(self, span: Span) -> Tensor:
        """Return the slot of each token of ``span``, the same in each layer."""
        (_, pages, lo, hi), size = span, self.pool.page_size
        assert 0 <= lo < hi <= len(pages) * size, (
            f"tokens [{lo}, {hi}) are not in {len(pages)} pages"
        )
        token_T = torch.arange(lo, hi)
        page_T = torch.tensor(pages, dtype=torch.int64)[token_T // size]
        slots_T = page_T * size + token_T % size
        if self.device.type == "cpu":
            return slots_T
        # A copy from unpinned memory would block until all work launched before is complete.
        return slots_T.pin_memory().to(self.device, non_blocking=True)


def staging_view(span: Span, buffer: Buffer) -> Tensor:
    """Return the part of ``buffer`` for the entries of ``span``.

    Its shape is uint8 ``[num_layers, num_tokens, bytes_per_token]``.
    """
    group = span.group
    num_tokens = span.hi - span.lo
    num_bytes = num_tokens * group.bytes_per_token_all_layers
    shape = (group.num_layers, num_tokens, group.bytes_per_token)
    return buffer.bytes[:num_bytes].view(shape)


def check_chunks(layout: Layout, chunk_bytes: int) -> None:
    """Raise ValueError if a group's entries of one token do not fit a chunk."""
    most = max(group.bytes_per_token_all_layers for group in layout.groups)
    if chunk_bytes < most:
        raise ValueError(
            f"kv_transfer.chunk_bytes={chunk_bytes}: too small for one token; use at least {most}"
        )


def split_into_chunks(span: Span, chunk_bytes: int) -> Iterator[Span]:
    """Yield ``span`` in parts whose entries fit a chunk."""
    step = chunk_bytes // span.group.bytes_per_token_all_layers
    for lo in range(span.lo, span.hi, step):
        yield span._replace(lo=lo, hi=min(lo + step, span.hi))


def _widest_view(data: Tensor) -> Tensor:
    """View rows as int64 if width and alignment allow it, because index copies are then faster."""
    aligned = data.shape[-1] % 8 == 0 and data.storage_offset() % 8 == 0
    return data.view(torch.int64) if aligned else data


def copy_by_layer(
    layers: Sequence[Tensor], slots_T: Tensor, rows_LTW: Tensor, is_gather: bool
) -> None:
    for layer, rows_TW in zip(layers, rows_LTW, strict=True):
        if is_gather:
            torch.index_select(layer, 0, slots_T, out=rows_TW)
        else:
            layer.index_copy_(0, slots_T, rows_TW)


def copy_for_device(device: torch.device) -> Copy:
    if device.type != "cuda" or find_spec("triton") is None:
        return copy_by_layer
    from tandem.kv_transfer.gpu_copies import copy_all_layers

    return copy_all_layers
