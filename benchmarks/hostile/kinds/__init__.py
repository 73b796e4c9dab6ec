"""The hostile clients by name."""

from benchmarks.hostile.kinds.base import Hostile, Target
from benchmarks.hostile.kinds.connects import Connects
from benchmarks.hostile.kinds.half_messages import HalfMessages
from benchmarks.hostile.kinds.long_texts import LongTexts
from benchmarks.hostile.kinds.loops import Crowd, FreshLoops, ProvenLoops, ResumeLoops
from benchmarks.hostile.kinds.silent import SilentConnections
from benchmarks.hostile.kinds.trickling import TricklingReaders

KINDS: dict[str, type[Hostile]] = {
    "long-texts": LongTexts,
    "half-messages": HalfMessages,
    "trickling-readers": TricklingReaders,
    "resume-loops": ResumeLoops,
    "proven-loops": ProvenLoops,
    "silent-connections": SilentConnections,
    "connects": Connects,
}
HARMLESS: dict[str, type[Hostile]] = {"fresh-loops": FreshLoops, "crowd": Crowd}
"""Clients that load a gateway and do nothing wrong."""

__all__ = ["HARMLESS", "KINDS", "Hostile", "Target"]
