"""Folders for reproducible files that one user's processes keep between runs."""

import os
import stat
import tempfile
from pathlib import Path

REMEDY = "set XDG_CACHE_HOME to a folder that only this user can write to"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WRITABLE = os.W_OK | os.X_OK


def user_home() -> Path:
    """Return the home folder of this user, or a private temporary folder if home is not writable.

    The latter happens, for instance, with OpenShift's arbitrary user ids. Raises ValueError if no
    temporary folder is possible either.
    """
    home = os.path.expanduser("~")  # unchanged if neither HOME nor an entry in passwd names one
    if os.access(home, _WRITABLE):
        return Path(home)
    return ensure_private_folder(Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}")


def user_cache() -> Path:
    """Return the cache folder of this user: XDG_CACHE_HOME, otherwise ``.cache`` in a home folder.

    Raises the errors of ``user_home``.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    cache = Path(os.path.expanduser("~"), ".cache")  # may exist in a read-only home
    return cache if os.access(cache, _WRITABLE) else user_home() / ".cache"


def ensure_private_folder(folder: Path) -> Path:
    """Create a folder that only this user can write to, or verify an existing one.

    Raises ValueError if the folder cannot be created or belongs to another user.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{folder}: belongs to another user, or is not a folder; {REMEDY}")
        if status.st_mode & _OTHERS_MAY_WRITE:
            folder.chmod(0o700)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be used as cache folder ({error}); {REMEDY}") from error
    return folder


def read_private_file(file: Path) -> bytes | None:
    """Return the content of a file that only this user can write to.

    Returns None if there is no such file or if another user could have written it.
    """
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            status = os.fstat(opened.fileno())
            is_own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE
            return opened.read() if is_own else None
    except OSError:
        return None
