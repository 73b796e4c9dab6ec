"""Digest of a checkpoint: two folders with the same digest hold the same model.

It covers what config.json says, and of each file its safetensors header (names, dtypes,
shapes and places of all tensors) and sampled pages: at least one of each file and of each tensor
outside the routed experts. The names and the order of files do not matter, nor does the dtype that
a rank computes in.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import BinaryIO

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.headers import Header, header_of

PAGE_BYTES = 4096
NUM_EXPERT_PAGES = 8
"""Minimum number of tensors of routed experts that are sampled in a file, if it has as many."""


def checkpoint_digest(
    config: ModelConfig, files: Mapping[str, BinaryIO], file_of: Mapping[str, str]
) -> str:
    """Return 32 hexadecimal digits that are equal for equal checkpoints.

    Args:
        config: The parsed config.json of the folder.
        files: All files that hold weights, by name.
        file_of: For each tensor the name of the file that it is loaded from.

    Raises:
        ValueError: A file is no safetensors file, or not whole.
    """
    digests = {name: file_digest(file) for name, file in files.items()}
    tensors = sorted((tensor, digests[name]) for tensor, name in file_of.items())
    text = json.dumps([config.identity(), asdict(config), tensors], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(file: BinaryIO) -> str:
    """Return a digest of the header, which says the size, and of sampled pages of a safetensors
    file. Raises ValueError as ``header_of`` does."""
    header = header_of(file)
    start = file.tell()
    file.seek(0)
    found = hashlib.sha256(file.read(start))
    for offset, num_bytes in _pages(header):
        file.seek(start + offset)
        found.update(file.read(num_bytes))
    return found.hexdigest()


def _pages(header: Header) -> list[tuple[int, int]]:
    """Return offset and number of bytes of each page to sample, in the order of the file."""
    places = {name: _middle(*entry["data_offsets"]) for name, entry in header.items()}
    experts = [name for name in places if ".mlp.experts." in name]
    sampled = {*experts[:: max(1, len(experts) // NUM_EXPERT_PAGES)], *places.keys() - experts}
    return sorted(places[name] for name in sampled)


def _middle(lo: int, hi: int) -> tuple[int, int]:
    """Return the page in the middle of a tensor that lies between two offsets."""
    start = max(lo, (lo + hi - PAGE_BYTES) // 2)
    return start, max(0, min(PAGE_BYTES, hi - start))
