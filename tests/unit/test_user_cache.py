"""Location of files that can be made again, also for a user id that has no home."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tandem.core.user_cache import ensure_private_folder, read_private_file, user_cache, user_home

STRANGER = 4242424
"""A user id without an entry in passwd."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files that every user can write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def as_stranger(function: Callable[[], object], **env: str) -> str:
    """Return what ``function`` returns or raises, as text, to a user without a home."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_as_stranger, args=(function, env, sender))
    child.start()
    child.join(60)
    return str(receiver.recv())


def _run_as_stranger(function: Callable[[], object], env: dict[str, str], to: Connection) -> None:
    os.environ.pop("HOME", None)
    os.environ.pop("XDG_CACHE_HOME", None)
    os.environ |= env
    tempfile.tempdir = None
    os.setgroups([])
    os.setresuid(STRANGER, STRANGER, STRANGER)
    try:
        to.send(function())
    except Exception as error:
        to.send(repr(error))


@needs_root
@pytest.mark.parametrize("home", [{}, {"HOME": "/"}, {"HOME": "/nothing/there"}])
def test_a_user_without_a_home_has_a_private_cache(temporary: Path, home: dict[str, str]) -> None:
    def kept() -> tuple[Path, int]:
        folder = ensure_private_folder(user_cache() / "tandem" / "kernels")
        return folder, folder.stat().st_mode & 0o777

    expected = temporary / f"tandem-{STRANGER}"
    told = as_stranger(kept, TMPDIR=str(temporary), **home)
    assert told == str((expected / ".cache" / "tandem" / "kernels", 0o700))
    assert (expected.stat().st_uid, expected.stat().st_mode & 0o777) == (STRANGER, 0o700)
    assert as_stranger(user_home, TMPDIR=str(temporary), **home) == str(expected)


@needs_root
@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/tmp"), Path.touch])
def test_a_temporary_folder_that_another_user_made_is_refused(
    temporary: Path, make: Callable[[Path], None]
) -> None:
    make(temporary / f"tandem-{STRANGER}")
    told = as_stranger(user_cache, TMPDIR=str(temporary))
    assert told.startswith("ValueError") and "set XDG_CACHE_HOME to" in told


@needs_root
def test_a_cache_that_cannot_be_written_to_is_named(temporary: Path) -> None:
    temporary.chmod(0o755)
    told = as_stranger(
        lambda: ensure_private_folder(user_cache() / "tandem"), XDG_CACHE_HOME=str(temporary)
    )
    assert told.startswith("ValueError") and f"{temporary}/tandem" in told
    assert "Permission denied" in told and "set XDG_CACHE_HOME to" in told


def test_a_home_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert (user_home(), user_cache()) == (tmp_path, tmp_path / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere")


@needs_root
def test_a_cache_in_a_home_that_is_read_only_is_used(temporary: Path) -> None:
    """A cache folder in a read-only home is used, as in the pods of deploy/."""
    home = temporary / "home"
    (home / ".cache").mkdir(parents=True)
    (home / ".cache").chmod(0o777)
    told = as_stranger(user_cache, HOME=str(home), TMPDIR=str(temporary))
    assert told == str(home / ".cache")


def test_a_folder_of_ones_own_that_others_could_write_to_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert ensure_private_folder(tmp_path).stat().st_mode & 0o777 == 0o700


def test_bytes_that_others_could_have_written_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert read_private_file(file) is None
    file.write_bytes(b"x")
    assert read_private_file(file) == b"x"
    (tmp_path / "link").symlink_to(file)
    assert read_private_file(tmp_path / "link") is None
    for mode in (0o664, 0o646):
        file.chmod(mode)
        assert read_private_file(file) is None
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, STRANGER, -1)
        assert read_private_file(file) is None
