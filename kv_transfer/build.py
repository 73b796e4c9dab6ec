"""The hand-over's parts made from a node's settings; what both sides do alike."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from core.config import TandemConfig
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


def channel_maker(config: TandemConfig, kind: str, host: str) -> ChannelMaker:
    """Channels for ``kv_transfer.backend``; auto is nccl on GPUs, gloo on CPUs."""
    backend = config.kv_transfer.backend
    if backend == "auto":
        backend = "nccl" if config.of_kind(kind).device == "cuda" else "gloo"
    return ProcessGroupChannels(backend, host)


def transfer_options(config: TandemConfig) -> TransferOptions:
    """At least four chunks in flight, none larger than MAX_CHUNK_BYTES."""
    return TransferOptions(
        lease_s=config.kv_transfer.lease_s,
        staging_bytes=config.kv_transfer.staging_bytes,
        chunk_bytes=min(MAX_CHUNK_BYTES, config.kv_transfer.staging_bytes // 4),
    )
