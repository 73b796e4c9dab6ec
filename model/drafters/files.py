"""Weight files of drafters that have their own folder, in the formats that their authors
publish."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tandem.model.checkpoint.digest import file_digest
from tandem.model.checkpoint.weights import Checkpoint


def find_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of the files ``names`` that ``folder`` has. Raises ValueError if it has
    none."""
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(
            f"speculation.draft_model_path={str(folder)!r}: contains none of the files "
            f"{', '.join(names)}"
        )
    return file


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a file without executing code from it. Raises ValueError if that
    fails."""
    try:
        if file.suffix != ".safetensors":
            tensors = dict(torch.load(file, map_location="cpu", weights_only=True))
            if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
                raise TypeError("the file must contain only tensors")
            return tensors
        return load_file(file)
    except Exception as error:
        kind = type(error).__name__
        raise ValueError(f"{file}: cannot be read ({kind}); download it again") from error


def pop_tensor(file: Path, tensors: dict[str, Tensor], name: str, *shape: int) -> Tensor:
    """Remove tensor ``name`` from ``tensors`` and return it. Raises ValueError if it is missing or
    has another shape."""
    if name not in tensors:
        raise ValueError(f"{file}: tensor {name} is missing; download it again")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise ValueError(
            f"{file}: {name} has shape {(*tensor.shape,)}, but this model needs {shape}; use heads "
            "that were trained for it"
        )
    return tensor


def files_digest(*files: Path) -> str:
    """Return a digest of the contents of ``files``, which are read whole."""
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            hasher.update(hashlib.file_digest(opened, "sha256").digest())
    return hasher.hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    """Return a digest of config.json and of all weights in a drafter's folder.

    Safetensors files are sampled by page, like those of a checkpoint; other files are read whole.
    """
    whole = [file for file in folder.glob("*") if file.suffix in (".bin", ".pt")]
    digests = [files_digest(file) for file in (*folder.glob("config.json"), *whole)]
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            digests.append(file_digest(opened))
    return hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()[:16]


def load_parameters(
    module: nn.Module, file: Path, tensors: dict[str, Tensor], checkpoint: Checkpoint
) -> None:
    """Fill all parameters of ``module`` from ``tensors``, each of which must be used.

    Raises ValueError, naming file and tensor, if a tensor is missing, unknown or of the wrong
    shape.
    """
    parameters = {
        # Copy, because changing the file would change a memory-mapped tensor or crash the process.
        name: pop_tensor(file, tensors, name, *meta.shape).to(
            checkpoint.device, checkpoint.dtype, copy=True
        )
        for name, meta in module.named_parameters()
    }
    if tensors:
        raise ValueError(f"{file}: unknown tensors, such as {', '.join(sorted(tensors)[:3])}")
    module.load_state_dict(parameters, assign=True)
