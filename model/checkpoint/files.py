"""Files of a checkpoint: an index of its tensors from the files' headers, and reading tensors."""

from collections.abc import Iterator
from contextlib import ExitStack
from os import SEEK_END
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.core.json_file import read_json
from tandem.core.progress import LOADING, on_startup_progress
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.digest import checkpoint_digest
from tandem.model.checkpoint.headers import Header, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles(ExitStack):
    """The tensors of a checkpoint, read by name. A context manager that owns the open files.

    Each read reports progress to ``on_startup_progress`` (core/progress.py): the share of the
    checkpoint's bytes read so far, from 0 to 1.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        headers = read_headers(path)
        self._file_of = {name: file for file, header in headers.items() for name in header}
        self._header = {
            name: entry for header in headers.values() for name, entry in header.items()
        }
        try:
            self._files = {
                file: self.enter_context((path / file).open("rb"))
                for file in set(self._file_of.values())
            }
        except OSError as error:
            raise ValueError(f"{path}: a weight file cannot be opened: {error}") from None
        self._open: dict[str, safe_open] = {}
        self._num_bytes = sum(file.seek(0, SEEK_END) for file in self._files.values())
        self._num_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def digest(self, config: ModelConfig) -> str:
        """Return the digest of the files that ``read`` uses. Raises ValueError if they are
        invalid."""
        return checkpoint_digest(config, self._files, self._file_of)

    def path_of(self, name: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self.path / self._file_of[name]

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor of this name exists and is float8_e4m3fn."""
        return name in self._header and self._header[name]["dtype"] == "F8_E4M3"

    def names(self) -> Iterator[str]:
        """Return all tensor names, sorted by file so that each file is read sequentially."""
        return iter(sorted(self._file_of, key=lambda name: (self._file_of[name], name)))

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raises ValueError naming tensor and file if it cannot be read."""
        file = self._file_of[name]
        try:
            if file not in self._open:
                # Open through the descriptor, because the path may point to another file by now.
                opened = safe_open(f"/proc/self/fd/{self._files[file].fileno()}", framework="pt")
                self._open[file] = self.enter_context(opened)
            tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{self.path / file}: cannot read tensor {name}: {error}; download it again"
            ) from None
        self._num_read += tensor.nbytes
        on_startup_progress.get()(LOADING, min(1.0, self._num_read / self._num_bytes))
        return tensor


def read_headers(path: Path) -> dict[str, Header]:
    """Return the header of each file in ``path``, restricted to the tensors that the index lists.

    Without an index, the checkpoint must be a single file. Raises ValueError naming file and tensor
    if a file is missing, incomplete or inconsistent with the index.
    """
    index = path / INDEX
    if not index.is_file():
        file = _single(path)
        return {file.name: read_header(file)}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: has no weight_map; download it again")
    files = sorted({str(file) for file in weight_map.values()})
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise ValueError(f"{index}: lists missing files: {', '.join(missing[:5])}; download them")
    headers = {file: read_header(path / file) for file in files}
    found: dict[str, Header] = {file: {} for file in files}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ValueError(
                f"{path / file}: lacks {name}, which {INDEX} lists; download both again"
            )
        found[file][name] = headers[file][name]
    return found


def _single(path: Path) -> Path:
    """Return the only weight file of the folder, which may have any name."""
    files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:5]) or "no .safetensors file"
        raise ValueError(
            f"{path}: needs {INDEX} or one .safetensors file, has {names}; download it again"
        )
    return files[0]


def dequantise(weight: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply an FP8 weight [out, in] by its block scales, in fp32.

    ``scale_inv`` is [ceil(out / block[0]), ceil(in / block[1])]. Blocks at the edges may be
    partial.
    """
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale_inv.float()[rows][:, columns]
