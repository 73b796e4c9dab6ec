"""``tandem rebalance``: balance experts over ranks by the row counts of past requests."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cluster.commands.common import Json, RayAddress, fail, run_command, show_progress

if TYPE_CHECKING:
    from tandem.cluster.control.rebalance import RebalanceResult

Gangs = Annotated[
    list[str] | None,
    typer.Option(
        "--gang",
        metavar="NAME",
        help="Gang to rebalance, such as decode-0. Repeatable. "
        "Default: all gangs of several ranks.",
    ),
]


def rebalance(
    ray_address: RayAddress = "auto",
    gang: Gangs = None,
    as_json: Json = False,
) -> None:
    """Rebalance the experts of each gang, so that its ranks have equal work.

    Gangs are rebalanced one after another: each is drained, and its weights are
    loaded again. A gang that would not gain is left unchanged. Answers that take
    longer than control.drain_timeout_s migrate to another gang.

    \b
    Examples:
      tandem rebalance
      tandem rebalance --ray-address 10.0.0.7:6379 --gang decode-0
    """
    run_command(_rebalance(ray_address or "auto", gang or [], as_json))


async def _rebalance(ray_address: str, names: list[str], as_json: bool) -> None:
    from tandem.cluster.control import members, ray_session

    results = []
    async with ray_session.ray_session(ray_address):
        gangs = await members.find_gangs()
        known = [gang.name for gang in gangs if len(gang.members) > 1]
        if wrong := [name for name in names if name not in known]:
            fail(
                "NOT_FOUND",
                f"--gang={wrong[0]}: no ready gang of several ranks; use one of {known}",
            )
        if not known:
            fail(
                "NOT_FOUND",
                f"no gang of several ranks is ready in the Ray cluster at {ray_address}",
            )
        with show_progress() as show:
            for name in names or known:
                show(f"{name}: moving experts if that improves the balance")
                results.append(await members.rebalance_gang(name))
                if not as_json:
                    print(_format_result(results[-1]), flush=True)
    if as_json:
        print(json.dumps({"gangs": [asdict(result) for result in results]}))


def _format_result(result: "RebalanceResult") -> str:
    now = f"now {result.after:.3f}" if result.is_moved else "experts not moved"
    return f"{result.gang}: balance {result.before:.3f} over {result.num_rows} expert rows, {now}"
