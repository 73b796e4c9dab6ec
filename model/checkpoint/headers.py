"""Headers of safetensors files: the tensors of a file, and a check of the file's size.

A file has 8 bytes with the size of the header, the header in JSON, and the tensors' bytes.
This module imports no torch, because gateways use it to check checkpoints.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

Header = dict[str, dict[str, Any]]
MAX_HEADER_BYTES = 100_000_000
"""Maximum header size in bytes that the safetensors format allows."""
_LFS = b"version "
"""First 8 bytes of a Git LFS pointer."""


def read_header(path: Path) -> Header:
    """Return the header of the file at ``path``. Raises ValueError as ``header_of`` does."""
    try:
        with path.open("rb") as file:
            return header_of(file)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def header_of(file: BinaryIO) -> Header:
    """Return dtype, shape and offsets of each tensor by name.

    Leaves the file position at the start of the tensors' bytes. Raises ValueError naming the file
    if it is a Git LFS pointer, not a safetensors file, or not of the size that its header states.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    try:
        content = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        header = {name: entry for name, entry in content.items() if name != "__metadata__"}
        places = [entry["data_offsets"] for entry in header.values()]
        end = 8 + length + max((hi for _, hi in places), default=0)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        remedy = (
            "it is a Git LFS pointer: run git lfs pull" if start == _LFS else "download it again"
        )
        raise ValueError(
            f"{file.name}: is not a readable safetensors file ({error!r:.80}); {remedy}"
        ) from None
    if size != end:
        raise ValueError(
            f"{file.name}: has {size:,} bytes, but its header requires {end:,}; download it again"
        )
    return header
