"""Folders for files that can be made again, kept between runs of one user."""

import os
import stat
import tempfile
from pathlib import Path

REMEDY = "set XDG_CACHE_HOME to a folder that only this user can write to"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_cache() -> Path:
    """Return the cache folder of this user: XDG_CACHE_HOME, else ``~/.cache``.

    A user without a home to write to, such as the arbitrary user ids of OpenShift, gets a private
    folder beside other temporary files. Raises ValueError if that one cannot be had either.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        folder = Path.home() / ".cache"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # no such folder can be made, or nothing says where
        pass
    return private_folder(Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}")


def private_folder(folder: Path) -> Path:
    """Create a folder that this user alone can write to, or make sure that it is one.

    Raises ValueError if it cannot be created or belongs to another user.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{folder}: it is another user's, or no folder; {REMEDY}")
        if status.st_mode & _OTHERS_MAY_WRITE:
            folder.chmod(0o700)
    except OSError as error:
        raise ValueError(f"{folder}: no cache can be kept there ({error}); {REMEDY}") from error
    return folder


def own_bytes(file: Path) -> bytes | None:
    """Return what is in a file that this user alone can write to, None if there is no such file."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            status = os.fstat(opened.fileno())
            is_own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE
            return opened.read() if is_own else None
    except OSError:
        return None
