"""Starts that make no progress.

Ranks that stop while loading, compiling or joining are restarted. An address without a Ray is
reported. A signal ends every command in every phase.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.procs import (
    COMMAND,
    ROOT,
    actors,
    descendants,
    free_port,
    python_path,
    serving,
    wait_gone,
)
from tests.waiting import PATIENCE_S, wait_until

START_S, STUCK_S = 20, 2
BOUNDED = (
    f"control.startup_timeout_s={START_S}",
    f"control.stall_timeout_s={STUCK_S}",
    "kv.num_pages=200",
)
DRAIN_S = 3
GANG = ("prefill.dp_size=2", "decode.dp_size=2")


def stopping(faults: Path, phase: str) -> dict[str, str]:
    """Return the environment in which the first rank that reaches this phase stops itself."""
    (faults / f"{phase}.stop").touch()
    path = python_path(ROOT, ROOT / "tests" / "faults")
    return os.environ | {"FAULTS": str(faults), "PYTHONPATH": path}


@pytest.mark.parametrize(
    ("phase", "sets"),
    [
        ("loading", ("mode=colocated",)),
        ("compiling", ("mode=colocated",)),
        ("joining", GANG),
    ],
)
@pytest.mark.slow
def test_a_rank_that_stops_as_it_starts_is_begun_anew(
    tmp_path: Path, phase: str, sets: tuple[str, ...]
) -> None:
    """`serve` reports the restart while it waits."""
    env = stopping(tmp_path, phase)
    if phase == "compiling":
        env["XDG_CACHE_HOME"] = str(tmp_path)
    with serving(*BOUNDED, *sets, env=env) as server:
        assert not (tmp_path / f"{phase}.stop").exists(), "nobody came there"
        [told] = [line for line in server.log if "lost; last epoch ended: " in line]
        assert "but it does not answer: no progress for 20 s (control.startup_timeout_s)" in told
        kinds = ("PrefillActor", "DecodeActor") if sets == GANG else ("ColocatedActor",)
        num = sum(len(actors(server.process.pid, kind)) for kind in kinds)
        assert num == (4 if sets == GANG else 1)


def test_where_no_ray_is_it_is_soon_told() -> None:
    with begun("serve", "--ray-address", f"127.0.0.1:{free_port()}") as process:
        assert process.stderr is not None
        while "joining Ray at" not in process.stderr.readline():
            assert process.poll() is None
        # time: Ray itself tries for more than ten minutes
        _, said = process.communicate(timeout=20)
    assert process.returncode == 1 and "cannot join Ray there" in said
    assert "Connection refused" in said and "Traceback" not in said


@contextmanager
def begun(*args: str, env: dict[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
    quiet: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "env": env}
    process = subprocess.Popen([*COMMAND, *args], cwd=ROOT, text=True, **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ends_in_time(process: "subprocess.Popen[str]", within_s: float) -> None:
    """The process ends after SIGTERM within ``within_s``, with everything that it started."""
    tree = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    process.stderr.read()
    process.wait(within_s + 1.0)
    wait_gone(tree)


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A listener that accepts connections and never answers. It listens on all addresses, because
    Ray replaces a loopback address by an outer one."""
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("command", ["serve", "stop"])
def test_a_signal_ends_who_waits_for_a_ray_that_says_nothing(
    mute: socket.socket, command: str
) -> None:
    with begun(command, "--ray-address", address_of(mute)) as process:
        probe, _ = mute.accept()
        ray, _ = mute.accept()
        with probe, ray:
            ends_in_time(process, DRAIN_S + 5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [("generate", "a"), ("bench", "--num-requests", "1")], ids=["generate", "bench"]
)
def test_a_signal_ends_who_waits_for_a_server_that_says_nothing(
    mute: socket.socket, args: tuple[str, ...]
) -> None:
    with begun(*args, "--address", address_of(mute)) as process, mute.accept()[0]:
        ends_in_time(process, DRAIN_S + 5.0)


SERVE = (
    *("serve", "--set", "server.address=127.0.0.1:0", "--set", f"server.drain_timeout_s={DRAIN_S}"),
    *("--set", "mode=colocated"),
)


def test_a_signal_ends_a_serve_whose_rank_stands_still_as_it_loads(tmp_path: Path) -> None:
    with begun(*SERVE, env=stopping(tmp_path, "loading")) as process:
        came = tmp_path / "loading.stop"
        wait_until(lambda: not came.exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        ends_in_time(process, DRAIN_S + 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["importing torch and Ray", "starting Ray", "warming up"])
def test_a_signal_ends_a_serve_in_every_phase_of_its_start(line: str) -> None:
    with begun(*SERVE) as process:
        assert process.stderr is not None
        while line not in (said := process.stderr.readline()):
            assert said, "it ended before"
        ends_in_time(process, DRAIN_S + 5.0)
