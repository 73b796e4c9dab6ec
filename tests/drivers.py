"""Scripts that join a running Ray cluster as separate drivers."""

import json
import subprocess
import sys

from benchmarks.harness.procs import RayHead

TROUBLE = """
import asyncio, sys
from ray._private import utils, worker
from tandem.cluster.control.ray_session import ray_session

async def main():
    async with ray_session(sys.argv[1]):
        gcs = worker.global_worker.gcs_client
        utils.publish_error_to_driver("test", "trouble of Ray's own", gcs)
        await asyncio.sleep(0.5)  # time: what Ray tells takes some; the gateways wait for it
        print("done")

asyncio.run(main())
"""
"""Publishes an error through Ray, which forwards it to every driver."""

MEMBERS = """
import asyncio, os, signal, sys
from tandem.cluster.control.members import RayMembers
from tandem.cluster.control.ray_session import ray_session
from tandem.core.config import load
from tandem.core.control import Empty
from tandem.core.errors import RankLost
from tandem.core.schema import decode

def decodes(snapshot):
    return [info for info in snapshot.ready() if info.spec.kind == "decode"]

async def main():
    async with ray_session(sys.argv[1]):
        members = await RayMembers.attach(load(None, sys.argv[3:]))
        [old] = decodes(members.membership)
        os.kill(int(sys.argv[2]), signal.SIGSTOP)
        members.report("decode-0", old.spec.epoch - 1, "of another life")
        members.report("decode-0", old.spec.epoch, "its frames stopped")
        snapshot = members.membership
        while not decodes(snapshot) or decodes(snapshot) == [old]:
            snapshot = await members.wait_for_change(snapshot.version)
        [new] = decodes(snapshot)
        decode(Empty, await members.control(new.spec).call("ping", b""))
        assert old.spec.epoch < new.spec.epoch and new.frames is not None
        try:
            await members.control(old.spec).call("ping", b"")
        except RankLost as error:
            print("lost:", error)

asyncio.run(main())
"""

ROOMS = """
import asyncio, sys
import ray
from tandem.cluster.control.machines import RayMachines, remove_placement_groups
from tandem.cluster.control.ray_session import ray_session
from tandem.core.membership import RankSpec

def rooms():
    groups = ray.util.placement_group_table().values()
    return sorted(g["name"] for g in groups
                  if g["state"] != "REMOVED" and g["name"].startswith("tandem:other-"))

async def main():
    async with ray_session(sys.argv[1]):
        for name in ("other-0.4", "other-0.9", "other-1.9", "other-1.8", "other-10.7"):
            ray.util.placement_group([{"CPU": 0.1}], name=f"tandem:{name}", lifetime="detached")
        kept = [RankSpec("other-0", "decode", 9, placement_group_epoch=4)]
        kept += [RankSpec("other-1", "decode", 9), RankSpec("other-10", "decode", 7)]
        for number in (0, 1, 10):
            remove_placement_groups(kept, f"other-{number}")
        print(*rooms())
        await RayMachines().release_placement_group("other-1")
        print(*rooms())
        for number in (0, 1, 10):
            remove_placement_groups((), f"other-{number}")
        print(*rooms())

asyncio.run(main())
"""
"""Creates placement groups for three gangs, removes stale ones and prints those that remain. One
gang is in its second epoch, and one ends."""

LEFT = """
import asyncio, json, sys
import ray
from tandem.cluster.control.ray_session import ray_session

async def main():
    async with ray_session(sys.argv[1]):
        groups = ray.util.placement_group_table().values()
        print(json.dumps({
            "actors": ray.util.list_named_actors(all_namespaces=True),
            "groups": [group["name"] for group in groups if group["state"] != "REMOVED"],
        }))

asyncio.run(main())
"""


def left_in(head: RayHead) -> dict[str, list[str]]:
    return json.loads(script(head, LEFT)[-1])


def script(head: RayHead, text: str, *args: str) -> list[str]:
    """Run a script as a separate driver and return the lines that it prints."""
    command = [sys.executable, "-c", text, head.address, *args]
    ran = subprocess.run(command, env=head.env, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()
