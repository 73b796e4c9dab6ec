"""Digest of a checkpoint: two folders with the same digest hold the same model.

It covers what config.json says, and of each file its size, its safetensors header (names, dtypes,
shapes and places of all tensors) and sampled pages: at least one of each file and of each tensor
outside the routed experts. The names and the order of files do not matter, nor does the dtype that
a rank computes in.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from model.checkpoint.config import ModelConfig

PAGE_BYTES = 4096
NUM_EXPERT_PAGES = 8
"""Minimum number of tensors of routed experts that are sampled in a file, if it has as many."""
MAX_HEADER_BYTES = 100_000_000
"""Bound of the safetensors format itself."""


def checkpoint_digest(
    config: ModelConfig, files: Mapping[str, BinaryIO], file_of: Mapping[str, str]
) -> str:
    """Return 32 hexadecimal digits that are equal for equal checkpoints.

    Args:
        config: The parsed config.json of the folder.
        files: All files that hold weights, by name.
        file_of: For each tensor the name of the file that it is loaded from.

    Raises:
        ValueError: A file has no safetensors header.
    """
    digests = {name: _file_digest(file) for name, file in files.items()}
    tensors = sorted((tensor, digests[name]) for tensor, name in file_of.items())
    text = json.dumps([config.identity(), asdict(config), tensors], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _file_digest(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = file.read(8)
    header = file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
    found = hashlib.sha256(size.to_bytes(8) + length + header)
    for offset, num_bytes in _pages(header, file.name):
        file.seek(len(length + header) + offset)
        found.update(file.read(num_bytes))
    return found.hexdigest()


def _pages(header: bytes, path: str) -> list[tuple[int, int]]:
    """Return offset and number of bytes of each page to sample, in the order of the file."""
    try:
        entries: dict[str, Any] = json.loads(header)
        places = {
            name: _middle(*entry["data_offsets"])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: is not a readable safetensors file ({error!r}); download it again"
        ) from None
    experts = [name for name in places if ".mlp.experts." in name]
    sampled = {*experts[:: max(1, len(experts) // NUM_EXPERT_PAGES)], *places.keys() - experts}
    return sorted(places[name] for name in sampled)


def _middle(lo: int, hi: int) -> tuple[int, int]:
    """Return the page in the middle of a tensor that lies between two offsets."""
    start = max(lo, (lo + hi - PAGE_BYTES) // 2)
    return start, max(0, min(PAGE_BYTES, hi - start))
