"""The training corpus: the Python standard library's own source files.

Everything here needs only the standard library, so tests can import it without torch.
"""

import hashlib
import os
import random
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

BOS_ID = 0
EOS_ID = 1
HELD_OUT_FRACTION = 0.04
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__"}


def library_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str) -> bool:
    """Return whether a file is held out, by a hash of its POSIX path relative to the root."""
    digest = hashlib.blake2b(relative_path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_FRACTION * 2**64


def _source_files(root: Path) -> list[Path]:
    """Return all files ``*.py`` below ``root``, except those in skipped folders."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


@lru_cache(maxsize=1)
def _split() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    root = library_root()
    train: list[Path] = []
    held_out: list[Path] = []
    for path in sorted(_source_files(root)):
        relative = path.relative_to(root).as_posix()
        (held_out if is_held_out(relative) else train).append(path)
    return tuple(train), tuple(held_out)


def train_files() -> list[Path]:
    """Return the files that the checkpoint is trained on, sorted by path."""
    return list(_split()[0])


def held_out_files() -> list[Path]:
    """Return the files that are not used for training (about 4 %), sorted by path."""
    return list(_split()[1])


def read_text(path: Path) -> str:
    """Return the text of a source file; undecodable bytes are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens.

    `tokenizer` is a `tokenizers.Tokenizer` or a transformers tokenizer.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(ids, "ids", ids))


@lru_cache(maxsize=1)
def _held_out_ids(tokenizer: Any) -> list[list[int]]:
    return [encode(tokenizer, read_text(path)) for path in held_out_files()]


def held_out_prompts(
    tokenizer: Any, num: int, min_len: int, max_len: int, seed: int
) -> list[list[int]]:
    """Return random prompts from held-out files.

    Each is BOS and a slice of a file, with ``min_len`` to ``max_len`` tokens including BOS.
    """
    documents = [ids for ids in _held_out_ids(tokenizer) if len(ids) >= max_len]
    if not documents:
        raise ValueError(f"no held-out file has {max_len} tokens")
    generator = random.Random(seed)
    prompts = []
    for _ in range(num):
        ids = generator.choice(documents)
        length = generator.randint(min_len, max_len) - 1
        start = generator.randint(0, len(ids) - length)
        prompts.append([BOS_ID, *ids[start : start + length]])
    return prompts
