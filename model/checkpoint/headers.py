"""Headers of safetensors files: which tensors a file holds, and whether all of it is there.

A file is 8 bytes with the size of the header, the header, which is JSON, and the tensors' bytes.
This module imports no torch: a gateway checks a checkpoint with it.
"""

import json
from pathlib import Path
from typing import Any

Header = dict[str, dict[str, Any]]
_LFS = b"version "
"""The first 8 bytes of a pointer."""
_MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors library."""


def read_header(file: Path) -> Header:
    """Return dtype, shape and place of each tensor by its name.

    Raises ValueError naming the file if it is a pointer of Git LFS, is no safetensors file, or is
    shorter or longer than its header says.
    """
    start = b""
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            num_bytes = int.from_bytes(start, "little")
            content = json.loads(opened.read(min(num_bytes, _MAX_HEADER_BYTES)))
        header = {name: one for name, one in content.items() if name != "__metadata__"}
        end = 8 + num_bytes + max((one["data_offsets"][1] for one in header.values()), default=0)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        remedy = (
            "it is a pointer of Git LFS: run git lfs pull" if start == _LFS else "download it again"
        )
        raise ValueError(
            f"{file}: is not a readable safetensors file ({error!r:.80}); {remedy}"
        ) from None
    if (size := file.stat().st_size) != end:
        raise ValueError(f"{file}: has {size:,} bytes, its header says {end:,}; download it again")
    return header
