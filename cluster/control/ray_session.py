"""Connection to an existing Ray, or a local Ray that ends with this process."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray

from tandem.cluster.control import ray_private, reaper
from tandem.cluster.control.actors import NAMESPACE
from tandem.core.tasks import run_in_thread
from tandem.core.user_cache import user_home

OBJECT_STORE_BYTES = 128 << 20
REAPER_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 60.0
"""Maximum seconds for joining an existing Ray.

A test connection to it may take PROBE_TIMEOUT_S of them. Ray itself retries for many minutes.
"""
INIT_OPTIONS = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": False}


@asynccontextmanager
async def ray_session(address: str | None, num_cpus: int = 0) -> AsyncIterator[None]:
    """Connect to the Ray at ``address`` ("auto": the one on this machine), and leave it at exit.

    If ``address`` is None, start a local Ray that listens on the loopback interface only. None of
    its processes outlives the block or this process, even if this process is killed.

    Raises ValueError if there is no Ray at ``address`` or if it denies access.
    """
    ray_private.redirect_ray_messages()
    ray_private.send_arguments_inline()
    watcher: subprocess.Popen[bytes] | None = None
    try:
        if address is not None:
            await _join_with_deadline(address)
        else:
            before = reaper.descendants(os.getpid())
            # On an executor thread, because Ray's processes die with the thread that started them.
            starting = asyncio.create_task(asyncio.to_thread(_start_local_ray, num_cpus))
            try:
                await asyncio.shield(starting)
            finally:  # wait, to end all processes that it starts
                await asyncio.wait([starting])
            watcher = _start_reaper(set(reaper.descendants(os.getpid())) - set(before))
        yield
    finally:
        try:
            if ray.is_initialized():
                await run_in_thread(ray.shutdown)
        finally:
            if watcher is not None:
                watcher.communicate(timeout=REAPER_TIMEOUT_S)


def _start_reaper(roots: set[int]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-S", reaper.__file__, *map(str, roots)]
    quiet: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **quiet)


async def _join_with_deadline(address: str) -> None:
    try:
        await asyncio.wait_for(run_in_thread(lambda: _join(address)), JOIN_TIMEOUT_S)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error) or f"no answer within {JOIN_TIMEOUT_S:g} s"
        raise ValueError(
            f"--ray-address={address!r}: cannot join Ray there ({reason}); give the address that "
            "`ray start --head` printed, and put its token into ~/.ray/auth_token if it requires "
            "one"
        ) from error


def _join(address: str) -> None:
    if found := ray_private.resolve_head_address(address):
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
    ray.init(address=address, **INIT_OPTIONS)


def _start_local_ray(num_cpus: int) -> None:
    ray_private.isolate_local_ray()
    os.environ["HOME"] = str(user_home())  # for Ray's token and the ranks' compiled files
    sizes = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
    ray.init(address="local", include_dashboard=False, **sizes, **INIT_OPTIONS)
