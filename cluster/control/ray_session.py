"""A Ray of one's own that ends with this process, or one that is there already."""

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
from ray._private import node, ray_constants, services, worker
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)

from cluster.control import reaper
from core.tasks import in_thread
from decode_node.actor import NAMESPACE

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 << 20
REAPER_S = 10.0
PROBE_S, JOIN_S = 10.0, 60.0
"""For a connection to a Ray, and for all of joining it: Ray itself tries for many minutes."""
COMMON = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": False}


@asynccontextmanager
async def ray_session(address: str | None, num_cpus: int = 0) -> AsyncIterator[None]:
    """Connected to the Ray at ``address`` ("auto": the one on this machine), which is only left.

    None is a Ray of one's own that listens on the loopback interface only: none of its processes
    outlives the block, nor this process, even if that is killed.
    Raises ValueError when there is no Ray at ``address`` or it does not let us in.
    """
    # Ray prints its troubles to stdout, which is for answers.
    worker.print_to_stdstream = lambda said, **_: log.warning("Ray: %s", "\n".join(said["lines"]))
    watcher: subprocess.Popen[bytes] | None = None
    try:
        if address is not None:
            await _joined(address)
        else:
            before = reaper.children(os.getpid())
            # Not on a thread of its own: Ray's processes die with the one that began them.
            starting = asyncio.create_task(asyncio.to_thread(_start, num_cpus))
            try:
                await asyncio.shield(starting)
            finally:  # what it starts is ours to end
                await asyncio.wait([starting])
            watcher = _watch(set(reaper.children(os.getpid())) - set(before))
        yield
    finally:
        try:
            if ray.is_initialized():
                await in_thread(ray.shutdown)
        finally:
            if watcher is not None:
                watcher.communicate(timeout=REAPER_S)


def _watch(roots: set[int]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-S", reaper.__file__, *map(str, roots)]
    quiet: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **quiet)


async def _joined(address: str) -> None:
    try:
        await asyncio.wait_for(in_thread(lambda: _join(address)), JOIN_S)
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error) or f"no answer within {JOIN_S:g} s"
        raise ValueError(
            f"--ray-address={address!r}: cannot join Ray there ({why}); give the address that "
            "`ray start --head` printed, and its token in ~/.ray/auth_token if it asks for one"
        ) from error


def _join(address: str) -> None:
    # Ray does this by itself only where it was given no address.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if found := services.canonicalize_bootstrap_address(address):
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    ray.init(address=address, **COMMON)


def _start(num_cpus: int) -> None:
    # Ray replaces a loopback address by an outer one unless it is told that there is no cluster:
    # this process reads the constant, those that it starts the variable.
    # Nor are ranks nice, as Ray makes them: beside one busy process they would stand still.
    os.environ |= {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", "RAY_worker_niceness": "0"}
    ray_constants.ENABLE_RAY_CLUSTER = False
    # It never grows, and prints no logs here: two processes less at its start.
    node.Node.start_monitor = node.Node.start_log_monitor = lambda self: None
    sizes = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
    ray.init(address="local", include_dashboard=False, **sizes, **COMMON)
