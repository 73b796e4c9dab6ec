"""Which file of a checkpoint holds which tensor (spec §2). Nothing is read but headers."""

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

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class CheckpointFiles(ExitStack):
    """Tensors by name, read one at a time. Use as a context manager; it owns the open files.

    Reading reports its progress to ``on_start`` (core/progress.py): the share of the checkpoint's
    bytes that have been read, from 0 to 1.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        headers = read_headers(path)
        self._file_of = {name: file for file, header in headers.items() for name in header}
        self._header = {name: one for header in headers.values() for name, one in header.items()}
        try:
            self._files = {
                file: self.enter_context((path / file).open("rb"))
                for file in set(self._file_of.values())
            }
        except OSError as error:
            raise ValueError(f"{path}: a file of weights cannot be opened: {error}") from None
        self._open: dict[str, safe_open] = {}
        self._num_bytes = sum(file.seek(0, SEEK_END) for file in self._files.values())
        self._num_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def digest(self, config: ModelConfig) -> str:
        """Return the digest of the files that ``read`` reads. Raises ValueError if one is none."""
        return checkpoint_digest(config, self._files, self._file_of)

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.path / self._file_of[name]

    def is_fp8(self, name: str) -> bool:
        """Whether there is such a tensor, of float8_e4m3fn."""
        return name in self._header and self._header[name]["dtype"] == "F8_E4M3"

    def names(self) -> Iterator[str]:
        """Every tensor's name, file by file, so that each file is read in one go."""
        return iter(sorted(self._file_of, key=lambda name: (self._file_of[name], name)))

    def read(self, name: str) -> Tensor:
        """Raises ValueError naming tensor and file when it cannot be read."""
        file = self._file_of[name]
        try:
            if file not in self._open:
                # By its descriptor: the path may lead to another file by now.
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
    """Return for each file of the checkpoint in ``path`` the header of those of its tensors that
    are the checkpoint's: the index decides, and without one there is a single file.

    Raises ValueError naming the file, and the tensor, for files that are missing, not whole or not
    as the index says.
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
        raise ValueError(f"{index}: names files that are missing: {', '.join(missing[:5])}")
    headers = {file: read_header(path / file) for file in files}
    found: dict[str, Header] = {file: {} for file in files}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ValueError(
                f"{path / file}: lacks {name}, which {INDEX} names; download both again"
            )
        found[file][name] = headers[file][name]
    return found


def _single(path: Path) -> Path:
    """Return the only file of weights, whatever its name is."""
    files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:5]) or "no .safetensors file at all"
        raise ValueError(f"{path}: has neither {INDEX} nor one file: {names}; download it again")
    return files[0]


def dequantise(weight: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 weight [out, in] times its block scales, in fp32 (spec §6).

    ``scale_inv`` is [ceil(out / block[0]), ceil(in / block[1])]: ragged edges share a scale.
    """
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale_inv.float()[rows][:, columns]
