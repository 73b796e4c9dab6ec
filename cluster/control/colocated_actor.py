"""The colocated rank as a Ray actor."""

from runtime.shell import RankShell


class ColocatedActor(RankShell):
    builder = "cluster.control.colocated"
