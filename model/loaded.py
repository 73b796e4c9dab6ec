"""A checkpoint, ready to run on one rank: network, drafter, and caches to fit."""

from dataclasses import dataclass
from pathlib import Path

import torch

from core.info import NodeInfo
from core.settings import NodeSettings
from model.cache import CacheGroup, Caches, allocate_caches
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.drafters import create_drafter
from model.drafters.base import Drafter
from model.host_memory import keep_freed_memory
from model.think import read_think_ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_TOKENS_PER_ROW = 2048
"""Pages are sized for this many tokens a row when ``kv.num_pages`` is not given."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``groups`` lists the main caches, then the drafter's, in wire order. ``think_ids`` begin
    and end the thinking part of an answer, None if the checkpoint has no such tokens."""

    config: ModelConfig
    network: DeepseekV3
    drafter: Drafter
    groups: tuple[CacheGroup, ...]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    think_ids: tuple[int, int] | None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def allocate(self, num_pages: int, page_size: int) -> Caches:
        return allocate_caches(self.groups, num_pages, page_size, self.dtype, self.device)


def load_model(settings: NodeSettings, *, progress: bool = False) -> LoadedModel:
    """Read the checkpoint named in ``settings`` onto its device.

    Raises ValueError for whatever the user can mend: path, files, dtype, lengths, drafter.
    """
    from model.weights import has_mtp, load_weights

    torch.set_num_threads(settings.num_threads)
    if settings.device == "cpu":
        keep_freed_memory()
    path = Path(settings.model_path)
    config = ModelConfig.from_dir(path)
    max_model_len = _max_model_len(settings.max_model_len, config)
    dtype, device = _dtype(settings), torch.device(settings.device)
    with torch.device("meta"):
        network = DeepseekV3(config, with_mtp=has_mtp(path, config))
    network.rope = type(network.rope)(config).to(device)
    load_weights(network, path, dtype=dtype, device=device, progress=progress)
    network.eval()
    drafter = create_drafter(settings.drafter, network)
    groups = (network.cache_groups()[0], *drafter.cache_groups)
    think_ids = read_think_ids(path, settings.think_tokens)
    return LoadedModel(config, network, drafter, groups, dtype, device, max_model_len, think_ids)


def _dtype(settings: NodeSettings) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.float32 if settings.device == "cpu" else torch.bfloat16
    if settings.dtype not in DTYPES:
        raise ValueError(f"model.dtype: {settings.dtype!r} is unknown, use auto or {list(DTYPES)}")
    return DTYPES[settings.dtype]


def _max_model_len(asked: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if asked is not None and not 2 <= asked <= longest:
        raise ValueError(
            f"model.max_model_len: {asked} is out of range, this checkpoint allows 2..{longest}"
        )
    return asked or longest


def default_num_pages(settings: NodeSettings, max_model_len: int) -> int:
    """Pages for every row at its usual length, and at least one sequence at full length."""
    per_row = min(max_model_len, DEFAULT_TOKENS_PER_ROW) + 2 * (settings.num_drafts + 1)
    num_tokens = max(settings.max_rows * per_row, max_model_len + 2 * (settings.num_drafts + 1))
    return 1 + -(-num_tokens // settings.page_size) + settings.max_rows


def describe(
    settings: NodeSettings,
    loaded: LoadedModel,
    *,
    kind: str,
    epoch: str,
    fingerprint: str,
    num_pages: int,
    num_drafts: int,
) -> NodeInfo:
    """What a node that serves ``loaded`` tells the cluster about itself."""
    return NodeInfo(
        name=settings.name,
        kind=kind,
        epoch=epoch,
        fingerprint=fingerprint,
        architecture=loaded.config.model_type,
        dtype=loaded.dtype_name,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.config.vocab_size,
        eos_ids=loaded.config.eos_token_ids,
        think_ids=loaded.think_ids,
        has_mtp=loaded.network.has_mtp,
        num_mtp_layers=loaded.config.num_nextn_predict_layers,
        num_drafts=num_drafts,
        num_pages=num_pages,
        page_size=settings.page_size,
        max_rows=settings.max_rows,
    )
