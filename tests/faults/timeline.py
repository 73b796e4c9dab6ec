"""Record when epochs of gangs and attempts at answers start and end, for chaos runs.

In $FAULTS, ``gangs.jsonl`` has each change of a gang that its controller sees. ``attempts.jsonl``
has the events of each attempt at an answer, written by the gateway that makes the attempt.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUTING, ATTEMPT, GRANTED, PIECE, ENDED = "routing", "attempt", "granted", "piece", "ended"
"""Events of an attempt, in order. The gateway searches for a pair of ranks, has one, has a row,
receives a piece, and ends the attempt."""


def note(name: str, **fields: object) -> None:
    line = json.dumps({"at": time.time(), "pid": os.getpid(), **fields})
    with Path(os.environ["FAULTS"], name).open("a") as file:
        file.write(f"{line}\n")


def note_gang(gang: Any) -> None:
    why = gang.failure.text if gang.failure else ""
    shown = {
        "gang": gang.name,
        "epoch": gang.epoch,
        "state": gang.state,
        "starts": gang.startup_notes,
    }
    note("gangs.jsonl", **shown, why=why)


def note_attempts(flow: Any) -> None:
    """Patch tandem.cluster.gateway.flow, before other modules import from it."""
    run_request, grant = flow.run_request, flow._grant

    async def running(
        request: Any, pair: Any, session: int, answer: Any, tell: Callable[[Any], None]
    ) -> None:
        name, told = request.request_id, False

        def telling(piece: Any) -> None:
            nonlocal told
            if not told:
                note("attempts.jsonl", request=name, event=PIECE)
            told = True
            tell(piece)

        ranks = [pair.prefill.epoch_name, pair.decode.epoch_name]
        note("attempts.jsonl", request=name, event=ATTEMPT, ranks=ranks)
        error = ""
        try:
            await run_request(request, pair, session, answer, telling)
        except BaseException as caught:
            error = repr(caught)
            raise
        finally:
            note("attempts.jsonl", request=name, event=ENDED, error=error[:300])

    async def granting(request: Any, *args: Any, **named: Any) -> None:
        await grant(request, *args, **named)
        note("attempts.jsonl", request=request.request_id, event=GRANTED)

    flow.run_request, flow._grant = running, granting


def note_routing(gateway: Any) -> None:
    """Patch tandem.cluster.gateway.gateway."""
    find_pair = gateway.ClusterGateway._choose_route

    async def finding(self: Any, request: Any, *args: Any, **named: Any) -> Any:
        note("attempts.jsonl", request=request.request_id, event=ROUTING)
        return await find_pair(self, request, *args, **named)

    gateway.ClusterGateway._choose_route = finding
