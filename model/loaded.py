"""Loads a checkpoint onto one rank: network, drafter, kernels, and the shapes of the caches."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.core.config import AUTO, TandemConfig
from tandem.core.execution import EAGER
from tandem.core.info import PREFILL
from tandem.core.placement import Placement
from tandem.core.progress import LOADING, on_startup_progress
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.files import CheckpointFiles
from tandem.model.checkpoint.weights import Checkpoint, load_network, num_mtp_layers
from tandem.model.drafters import create_drafter
from tandem.model.drafters.base import Drafter
from tandem.model.drafters.files import folder_digest
from tandem.model.host_memory import keep_freed_memory
from tandem.model.kernels import create_kernels
from tandem.model.kernels.base import BLOCK, Kernels
from tandem.model.network.cache import MAIN, CacheGroup, Caches, allocate_zeros
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.dispatch import create_dispatch
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.layers import process_weights_after_loading
from tandem.text.think import read_think_ids
from tandem.text.tokenizer import tokenizer_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint that is loaded on one rank.

    Attributes:
        max_model_len: Maximum number of tokens of a prompt and its answer.
        has_mtp: Whether the checkpoint has an MTP layer, even if the drafter does not use it.
        think_ids: Tokens that start and end the thinking part of an answer, None if the checkpoint
            has none.
        digest: Digest of the checkpoint's files.
        tokenizer_digest: Digest of the checkpoint's tokenizer, "" without one.
        uncapturable: Programs that could not be captured in this process, with the reason.
    """

    config: ModelConfig
    network: DeepseekV3
    drafter: Drafter
    dispatch: Dispatch
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    has_mtp: bool
    think_ids: tuple[int, int] | None
    digest: str = ""
    tokenizer_digest: str = ""
    uncapturable: dict[Any, str] = field(default_factory=dict)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def exec_mode(self) -> str:
        """Fastest execution mode (core/execution.py) in which this rank can run step programs."""
        return EAGER if self.dispatch.eager_reason else self.kernels.exec_mode

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of the main model and the drafter, in the order of the transfer format."""
        main = CacheGroup(MAIN, self.config.num_hidden_layers, self.config.latent_dim)
        return (main, *self.drafter.cache_groups)

    @property
    def lag(self) -> int:
        """Maximum number of later tokens that an entry of any cache depends on."""
        return max(group.lag for group in self.cache_groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all caches per token."""
        return self.dtype.itemsize * sum(
            group.num_layers * group.width for group in self.cache_groups
        )

    def allocate_caches(self, num_pages: int, page_size: int) -> Caches:
        """Allocate zeroed caches, so that slots that are read before any write hold finite
        values."""
        shape = (num_pages, page_size)
        kind = (self.dtype, self.device)
        return {
            group.name: [
                allocate_zeros((*shape, group.width), *kind) for _ in range(group.num_layers)
            ]
            for group in self.cache_groups
        }


def load_model(
    config: TandemConfig,
    kind: str,
    rank: int = 0,
    placement: Placement | None = None,
    check_digest: Callable[[str], None] = lambda digest: None,
) -> LoadedModel:
    """Load the configured checkpoint onto the device of one rank.

    Links in the path are resolved once, so all files are of one revision. The share of bytes read,
    from 0 to 1, is reported to ``on_startup_progress`` (core/progress.py).

    Args:
        config: The cluster's configuration.
        kind: Kind of the gang (core/info.py).
        rank: Number of the rank within its gang.
        placement: Experts of each rank, None for the default order.
        check_digest: Called with the digest of the checkpoint and of a separate drafter folder,
            before any weight is read. Its exceptions are passed on.

    Raises:
        ValueError: The configuration or the files are invalid: path, dtype, lengths, drafter or
            ranks.
    """
    section = config.of_kind(kind)
    path = config.model.path.resolve()
    torch.set_num_threads(section.num_threads)
    if section.device == "cpu":
        keep_freed_memory()
    ignored = config.model.ignore_config_keys
    model = ModelConfig.from_dir(path, ignored)
    max_model_len = _max_model_len(config.model.max_model_len, model)
    device = torch.device(section.device)
    dtype = _dtype(config.model.dtype, model)
    think_ids = read_think_ids(path, config.model.think_tokens)
    tokenizer = tokenizer_digest(path)
    dispatch = create_dispatch(
        config=model, section=section, kind=kind, rank=rank, placement=placement
    )
    kernels = create_kernels(config.model.kernels, model, device, quantises=kind == PREFILL)
    keep_fp8 = kernels.supports_fp8_blocks and _is_block_fp8(model)
    with CheckpointFiles(path) as files:
        digest = files.digest(model)
        weights = _weights_digest(digest, config.speculation.draft_model_path)
        check_digest(weights)
        checkpoint = Checkpoint(
            files=files,
            config=model,
            dtype=dtype,
            device=device,
            keep_fp8=keep_fp8,
            may_draft=kind != PREFILL,
            ignored_keys=ignored,
        )
        network = load_network(checkpoint, dispatch)
        drafter = create_drafter(config.speculation, checkpoint, network)
        has_mtp = num_mtp_layers(files, model) > 0
        if _weights_digest(files.digest(model), config.speculation.draft_model_path) != weights:
            raise ValueError(
                f"{path} or speculation.draft_model_path: files changed while they were loaded; "
                "wait until they are complete, and use a new folder for a new checkpoint"
            )
    fp8_note = ", FP8 weights stay FP8" if keep_fp8 else ""
    log.info("dtype of weights and cache: %s%s; kernels: %s", dtype, fp8_note, kernels.name)
    process_weights_after_loading(network, kernels)
    drafter.process_weights_after_loading(kernels)
    drafter.check(config.kv.page_size, max_model_len)
    kernels.use_threads(section.num_threads)
    on_startup_progress.get()(LOADING, 1.0)
    return LoadedModel(
        config=model,
        network=network,
        drafter=drafter,
        dispatch=dispatch,
        kernels=kernels,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        has_mtp=has_mtp,
        think_ids=think_ids,
        digest=digest,
        tokenizer_digest=tokenizer,
    )


def _weights_digest(digest: str, drafter: Path | None) -> str:
    """Return a text that identifies all weights that a rank loads."""
    if drafter is None:
        return digest
    return f"{digest} and speculation.draft_model_path {folder_digest(drafter)}"


def _dtype(configured: str, model: ModelConfig) -> torch.dtype:
    if configured == AUTO:
        configured = "float32" if model.dtype in ("float32", "float64") else "bfloat16"
    dtype: torch.dtype = getattr(torch, configured)
    return dtype


def _is_block_fp8(model: ModelConfig) -> bool:
    fp8 = model.quantization
    return fp8 is not None and tuple(fp8.weight_block_size) == (BLOCK, BLOCK)


def _max_model_len(configured: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if configured is not None and not 2 <= configured <= longest:
        raise ValueError(
            f"model.max_model_len={configured}: out of range; use 2 to {longest} with this "
            "checkpoint"
        )
    return configured or longest
