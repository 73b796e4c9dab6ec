"""The hand-over's parts made from a node's settings; what both sides do alike."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from core.settings import NodeSettings
from kv_transfer.base import ChannelMaker
from kv_transfer.caches import Caches
from kv_transfer.channel import ProcessGroupChannels
from kv_transfer.layout import Group, Layout
from kv_transfer.options import TransferOptions
from kv_transfer.pages import PagePool

MAX_CHUNK_BYTES = 4 << 20


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


def channel_maker(settings: NodeSettings) -> ChannelMaker:
    """Channels for ``kv_transfer.backend``; auto is nccl on GPUs, gloo on CPUs."""
    backend = settings.backend
    if backend == "auto":
        backend = "nccl" if settings.device.startswith("cuda") else "gloo"
    return ProcessGroupChannels(backend, settings.host)


def transfer_options(settings: NodeSettings) -> TransferOptions:
    """At least four chunks in flight, none larger than MAX_CHUNK_BYTES."""
    return TransferOptions(
        lease_s=settings.lease_s,
        staging_bytes=settings.staging_bytes,
        chunk_bytes=min(MAX_CHUNK_BYTES, settings.staging_bytes // 4),
    )
