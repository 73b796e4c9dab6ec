"""What a node needs to know to start; the cluster makes it from its config tree."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of one rank. None means "choose": dtype and pages from device and model.

    ``num_drafts`` is n_max; ``first_step`` is ship_hidden or zero_hidden; ``draft_length``,
    ``loop`` and ``batch_buckets`` are the decode engine's (EngineOptions); ``host`` is the only
    address the node listens on. ``think_tokens`` begin and end the thinking part of an answer.
    """

    name: str
    model_path: str
    dtype: str = "auto"
    device: str = "cpu"
    num_threads: int = 1
    max_model_len: int | None = None
    think_tokens: tuple[str, str] = ("<think>", "</think>")
    drafter: str = "auto"
    num_drafts: int = 3
    first_step: str = "ship_hidden"
    draft_length: str = "by_load"
    loop: str = "auto"
    batch_buckets: tuple[int, ...] | None = None
    page_size: int = 64
    num_pages: int | None = None
    max_rows: int = 16
    max_batch_tokens: int = 2048
    backend: str = "auto"
    host: str = "127.0.0.1"
    lease_s: float = 30.0
    staging_bytes: int = 64 << 20
