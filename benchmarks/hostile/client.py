"""Run one hostile client as a process.

    python -m benchmarks.hostile.client --kind connects --grpc 127.0.0.1:50051 [--seconds 60]

Prints ``ready`` when the client has reached its full strength, and after ``--seconds`` or SIGTERM
the number of events by name as a JSON line.
"""

import argparse
import asyncio
import json
import signal
from contextlib import suppress

from benchmarks.hostile.kinds import HARMLESS, KINDS, Hostile, Target

READY_S = 45.0
"""Time after which a client that is still growing counts as ready."""


async def misbehave(client: Hostile, seconds: float) -> None:
    """Run a client for ``seconds`` after it has become ready, or until SIGTERM."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    running = asyncio.create_task(client.run())
    ready = asyncio.create_task(client.is_ready.wait())
    stop = asyncio.create_task(over.wait())
    await asyncio.wait([running, ready, stop], timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
    print("ready", flush=True)
    await asyncio.wait([running, stop], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in (ready, stop, running):
        task.cancel()
    with suppress(asyncio.CancelledError):
        await running


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    kinds = KINDS | HARMLESS
    add("--kind", choices=[*kinds], required=True)
    add("--grpc", required=True, metavar="HOST:PORT", help="gRPC address of the gateway")
    add("--http", default="", metavar="HOST:PORT", help="HTTP address of the gateway [none]")
    add("--seconds", type=float, default=60.0, help="duration from readiness on [60]")
    args = parser.parse_args()
    client = kinds[args.kind](Target(args.grpc, args.http))
    asyncio.run(misbehave(client, args.seconds))
    print(json.dumps(client.counts), flush=True)


if __name__ == "__main__":
    main()
