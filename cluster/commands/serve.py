"""``tandem serve``: run a cluster and its gRPC server until a signal arrives."""

import asyncio
import gc
import logging
import signal
import sys
from pathlib import Path

from tandem.cluster.commands.common import (
    ConfigFile,
    ListKeys,
    RayAddress,
    SetOptions,
    run_command,
    run_server,
)
from tandem.core.config import load

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def serve(
    config: ConfigFile = None,
    sets: SetOptions = None,
    ray_address: RayAddress = None,
    list_keys: ListKeys = False,
) -> None:
    """Serve a cluster over gRPC: a local one, or a shared one with --ray-address.

    Prints "ready grpc=HOST:PORT" once it serves. SIGTERM or Ctrl-C lets running
    answers finish (for at most server.drain_timeout_s); a second one does not wait.
    A local cluster ends with this process. A cluster of --ray-address keeps
    running until tandem stop.

    \b
    Examples:
      tandem serve
      tandem serve --config cluster.yaml --set server.address=0.0.0.0:50051
      tandem serve --ray-address auto
      tandem serve --set speculation.max_depth=0 --set decode.max_num_seqs=4
      tandem serve --list-keys
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    run_command(_serve(config, sets, ray_address))


class _Signals:
    """Handling of SIGTERM and SIGINT.

    The first signal sets ``stop``, if the server is ready. A signal before that, or the second one,
    cancels the task. Later ones have no effect, so that cleanup is not cut short. An alarm ends the
    process ``end_s`` seconds after the first signal.
    """

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        self.is_ready = False
        self.stop = asyncio.Event()
        self._is_cancelled = False
        self._task = asyncio.current_task()

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        if (self.stop.is_set() or not self.is_ready) and not self._is_cancelled:
            assert self._task is not None
            self._is_cancelled = True
            self._task.cancel()
        if not self.stop.is_set():
            signal.setitimer(signal.ITIMER_REAL, self._end_s)
        self.stop.set()


async def _serve(config: Path | None, sets: list[str] | None, ray_address: str | None) -> None:
    loaded = load(config, sets)
    signals = _Signals(loaded.server.end_s)
    signals.install()
    try:
        async with run_server(loaded, ray_address) as server:
            signals.install()  # Ray may have replaced the handlers
            signals.is_ready = True
            gc.freeze()  # objects created at startup are permanent: exclude them from collections
            addresses = {name: at for name, at in server.addresses.items() if at is not None}
            print("ready", *(f"{name}={at}" for name, at in addresses.items()), flush=True)
            await signals.stop.wait()
            await server.drain()
    except asyncio.CancelledError:
        if signals.is_ready:
            raise
        print("the server was stopped before it was ready", file=sys.stderr, flush=True)
