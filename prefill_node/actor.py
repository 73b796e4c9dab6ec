"""The prefill rank as a Ray actor."""

from runtime.shell import RankShell


class PrefillActor(RankShell):
    builder = "prefill_node.node"
