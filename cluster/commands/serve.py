"""``tandem serve``: a cluster and its gRPC server, until a signal."""

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
    """Serve a cluster over gRPC: one of its own, or one that is joined.

    Prints "ready grpc=HOST:PORT" once it serves. SIGTERM or Ctrl-C lets
    running answers finish (at most server.drain_timeout_s); a second one does not
    wait for them. A cluster of its own ends with it; one that was joined by
    --ray-address goes on, until tandem stop.

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
    """SIGTERM and SIGINT: once ready the first asks to stop. Before, or as the second one, it
    cancels the task; later ones change nothing, so that the end is not cut short. ``end_s`` after
    the first an alarm ends the process."""

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
            signals.install()  # Ray may have put its own in their place
            signals.is_ready = True
            gc.freeze()  # what starting made stays, and need not be looked at again and again
            addresses = {name: at for name, at in server.addresses.items() if at is not None}
            print("ready", *(f"{name}={at}" for name, at in addresses.items()), flush=True)
            await signals.stop.wait()
            await server.drain()
    except asyncio.CancelledError:
        if signals.is_ready:
            raise
        print("stopped before it was ready", file=sys.stderr, flush=True)
