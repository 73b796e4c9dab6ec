"""Digest of a checkpoint: two folders with the same digest hold the same model.

The digest covers config.json, and for each file its safetensors header and sampled pages. The
header has names, dtypes, shapes and offsets of all tensors. At least one page of each file and of
each tensor outside the routed experts is sampled. Names and order of files do not matter, nor does
the dtype that a rank computes in.
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
"""Minimum number of routed-expert tensors sampled per file; all of them if a file has fewer."""


def checkpoint_digest(
    config: ModelConfig, files: Mapping[str, BinaryIO], file_of: Mapping[str, str]
) -> str:
    """Return 32 hexadecimal digits that are equal for equal checkpoints.

    Args:
        config: The parsed config.json of the folder.
        files: All files that hold weights, by name.
        file_of: Name of the file that each tensor is loaded from.

    Raises:
        ValueError: A file is not a safetensors file, or is incomplete.
    """
    digests = {name: file_digest(file) for name, file in files.items()}
    tensors = sorted((tensor, digests[name]) for tensor, name in file_of.items())
    text = json.dumps([config.identity(), asdict(config), tensors], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(file: BinaryIO) -> str:
    """Return a digest of the header and the sampled pages of a safetensors file.

    The header states the file's size, so the digest covers it too. Raises ValueError as
    ``header_of`` does.
    """
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
    """Return offset and size of the page in the middle of a tensor, which lies from ``lo`` to
    ``hi``."""
    start = max(lo, (lo + hi - PAGE_BYTES) // 2)
    return start, max(0, min(PAGE_BYTES, hi - start))
