"""``tandem stop``: stop a cluster that ``tandem serve --ray-address`` started."""

import json

import typer

from tandem.cluster.commands.common import Json, RayAddress, fail, run_command


def stop(
    ray_address: RayAddress = "auto",
    deadline_s: float = typer.Option(
        10.0, min=0.1, help="Seconds that ranks have to stop before they are killed."
    ),
    as_json: Json = False,
) -> None:
    """Stop the cluster in a Ray: stop every rank and free its resources.

    Attached servers keep listening, but refuse requests.

    \b
    Examples:
      tandem stop
      tandem stop --ray-address 10.0.0.7:6379
    """
    run_command(_stop(ray_address or "auto", deadline_s, as_json))


async def _stop(ray_address: str, deadline_s: float, as_json: bool) -> None:
    from tandem.cluster.control import members, ray_session

    async with ray_session.ray_session(ray_address):
        names = await members.stop_cluster(deadline_s)
    if not names:
        fail("NOT_FOUND", f"no Tandem cluster runs in the Ray cluster at {ray_address}")
    print(json.dumps({"stopped": names}) if as_json else f"stopped {', '.join(names)}")
