"""Waiting for the kernels' compiler while it makes progress, with a script in place of the
compiler."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import IO

import pytest

from tandem.core.progress import on_startup_progress
from tandem.model.kernels import build
from tests.waiting import wait_until

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1 && exit
for last; do :; done
echo $$ > {folder}/pid.new && mv {folder}/pid.new {folder}/pid
while [ -e {folder} ] && [ ! -e {folder}/end ]; do :; done
echo made > "$last"
"""
BUILD = """
from pathlib import Path
from tandem.model.kernels import build
print(build.build_library())
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    compiler = tmp_path / "cxx"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PROGRESS_INTERVAL_S", 0.02)
    return tmp_path


class Building:
    """A build of kernels on a thread. ``told`` holds the progress that it has reported."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.told: list[tuple[str, float]] = []
        context = copy_context()
        context.run(on_startup_progress.set, lambda *news: self.told.append(news))
        self.done = pool.submit(context.run, build.build_library)

    def moves(self) -> None:
        """Wait until the build reports progress."""
        last = self.told[-1]
        wait_until(lambda: self.told[-1] != last)

    def stands(self, num: int) -> None:
        """Wait for ``num`` reports without progress."""
        wait_until(lambda: len(self.told) > 1 and self.told[-1] == self.told[-2])
        at = len(self.told)
        wait_until(lambda: len(self.told) >= at + num)
        assert len(set(self.told[at - 1 :])) == 1


def test_a_compiler_gets_on_as_long_as_it_computes(folder: Path) -> None:
    with ThreadPoolExecutor() as pool:
        one = Building(pool)
        wait_until((folder / "pid").exists)
        pid = int((folder / "pid").read_text())
        for _ in range(2):
            one.moves()
            os.kill(pid, signal.SIGSTOP)
            one.stands(10)
            os.kill(pid, signal.SIGCONT)
        one.moves()
        assert {doing for doing, _ in one.told} == {"compiling kernels"}
        (folder / "end").touch()
        assert one.done.result(60).read_text() == "made\n"


def test_who_waits_for_the_lock_tells_who_has_it_and_gets_on_with_it(folder: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
    wait_until((folder / "pid").exists)
    with ThreadPoolExecutor() as pool:
        one = Building(pool)
        wait_until(lambda: one.told)
        one.moves()
        os.kill(other.pid, signal.SIGSTOP)
        one.stands(10)
        os.kill(other.pid, signal.SIGCONT)
        one.moves()
        waiting = f"waiting for process {other.pid}, which compiles kernels"
        assert {doing for doing, _ in one.told} == {waiting}
        (folder / "end").touch()
        told, _ = other.communicate(timeout=60)
        assert one.done.result(60) == Path(told.strip())


def test_a_holder_that_was_killed_is_succeeded(folder: Path) -> None:
    """The killed process's compiler keeps running, but the next process starts a new one."""
    other = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE)
    wait_until((folder / "pid").exists)
    with ThreadPoolExecutor() as pool:
        one = Building(pool)
        wait_until(lambda: one.told)
        other.kill()
        other.communicate()
        wait_until(lambda: one.told[-1][0] == "compiling kernels")
        (folder / "end").touch()  # for both compilers
        assert one.done.result(60).exists()


def test_a_library_that_was_cut_short_or_touched_is_built_again(folder: Path) -> None:
    """A library that was truncated or modified is built again. A truncated one would kill every
    process that loads it with SIGBUS."""
    (folder / "end").touch()
    library = build.build_library()
    digest = library.with_suffix(build.DIGEST_SUFFIX)
    damages: list[Callable[[], object]] = [
        lambda: os.truncate(library, 2),
        lambda: library.write_text("mode\n"),
        lambda: library.chmod(0o666),
        lambda: (library.rename(folder / "away"), library.symlink_to(folder / "away")),
        digest.unlink,
        lambda: digest.write_text("0" * 64),
    ]
    if os.geteuid() == 0:
        damages.append(lambda: os.chown(library, 4242424, -1))
    for damage in damages:
        (folder / "pid").unlink()
        damage()
        assert build.build_library() == library and library.read_text() == "made\n"
        assert (folder / "pid").exists(), "it was compiled"
        assert library.lstat().st_mode & 0o777 == 0o600
        (folder / "pid").rename(folder / "before")
        build.build_library()
        assert not (folder / "pid").exists(), "it was kept"
        (folder / "before").rename(folder / "pid")


def test_the_cache_is_this_users_alone_whatever_the_umask(folder: Path) -> None:
    (folder / "end").touch()
    before = os.umask(0)
    try:
        library = build.build_library()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in library.parent.iterdir()}
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert len(modes) == 3 and set(modes.values()) == {0o600}


def test_a_library_has_its_name_only_when_it_is_on_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "end").touch()
    synced: list[tuple[str, bool]] = []

    def fsync(file: IO[bytes]) -> None:
        has_name = any((folder / "tandem" / "kernels").glob("*.so"))
        synced.append((Path(file.name).read_text()[:4], has_name))

    monkeypatch.setattr(os, "fsync", fsync)
    library = build.build_library()
    digest = library.with_suffix(build.DIGEST_SUFFIX).read_text()
    assert synced == [(digest[:4], False), ("made", False)]


def test_another_users_folder_is_refused(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (folder / "end").touch()
    kernels = folder / "tandem" / "kernels"
    kernels.mkdir(parents=True)
    os.chown(kernels, 4242424, -1)
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME to"):
        build.build_library()
