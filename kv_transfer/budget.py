"""Default number of KV pages of a rank."""

import torch

from tandem.core.config import TandemConfig

DEFAULT_TOKENS_PER_ROW = 2048
"""Number of tokens per row for which a CPU rank has pages by default."""
FREE_MEMORY_SHARE = 0.1
"""Share of a GPU's memory that pages leave free, for activations and CUDA graphs."""


def default_num_pages(
    config: TandemConfig, device: torch.device, max_sequence_tokens: int, bytes_per_token: int
) -> int:
    """Return the number of KV pages of a rank if ``kv.num_pages`` is not configured.

    On a CPU, there are pages for DEFAULT_TOKENS_PER_ROW tokens in every row. On a GPU, pages fill
    the free memory, except for FREE_MEMORY_SHARE of the total. In both cases, at least one sequence
    of the maximum length fits.

    Args:
        max_sequence_tokens: Maximum length of a sequence.
        bytes_per_token: Cache bytes of one token in all layers and groups.

    Raises:
        ValueError: The GPU's memory is too small for one sequence of the maximum length.
    """
    num_ahead = 2 * (config.speculation.max_depth + 1)
    page_size = config.kv.page_size
    max_rows = config.decode.max_num_seqs
    if device.type == "cpu":
        per_row = min(max_sequence_tokens, DEFAULT_TOKENS_PER_ROW) + num_ahead
        num_tokens = max(max_rows * per_row, max_sequence_tokens + num_ahead)
        return 1 + -(-num_tokens // page_size) + max_rows
    torch.cuda.empty_cache()
    num_free, num_bytes = torch.cuda.mem_get_info(device)
    num_pages = int(num_free - FREE_MEMORY_SHARE * num_bytes) // (page_size * bytes_per_token)
    if num_pages * page_size < max_sequence_tokens + num_ahead + page_size:
        raise ValueError(
            f"model.max_model_len: {max_sequence_tokens} tokens do not fit on {device}: it has "
            f"{num_free / 1e9:.1f} GB free, enough for the steps and "
            f"{max(0, num_pages) * page_size} tokens; lower max_model_len, or use more ranks"
        )
    return num_pages
