"""What a rank caches per token. Two ranks may hand KV to each other only if this is equal.

Page size is not part of it: the wire is token-wise, so both sides may page as they like.
"""

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from core.errors import LayoutMismatch
from core.schema import pack

PROTOCOL = 5
"""Version of the hand-over messages; both sides must speak the same one."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are cached alike and advance together. Bytes are per token per layer."""

    name: str
    num_layers: int
    bytes_per_token: int

    @property
    def bytes_per_token_all_layers(self) -> int:
        return self.num_layers * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups, of which all have the entries of the same tokens at any time.

    ``dtype`` names the cache's element type, ``model`` the checkpoint it was computed by.
    """

    groups: tuple[Group, ...]
    dtype: str
    model: str
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"layout.groups needs distinct names, got {names}")
        for group in self.groups:
            if group.num_layers < 1 or group.bytes_per_token < 1:
                raise ValueError(f"layout group needs layers and bytes, got {group}")

    def group(self, name: str) -> Group:
        """Raises LayoutMismatch for an unknown name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise LayoutMismatch(f"no group {name!r}, only {[group.name for group in self.groups]}")

    def fingerprint(self) -> str:
        """16 hex digits, equal on every machine for equal layouts."""
        return hashlib.sha256(pack(self)).hexdigest()[:16]


def check_same(mine: Layout, theirs: Layout) -> None:
    """Raises LayoutMismatch naming every field that differs, with both sides' values."""
    here, there = _facts(mine), _facts(theirs)
    differing = [
        f"{name}: {value!r} here, {there[name]!r} there"
        for name, value in here.items()
        if there.get(name, value) != value
    ]
    if differing:
        raise LayoutMismatch("; ".join(differing))


def _facts(layout: Layout) -> dict[str, Any]:
    facts = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    facts["groups"] = [group.name for group in layout.groups]
    for group in layout.groups:
        facts[f"groups.{group.name}.num_layers"] = group.num_layers
        facts[f"groups.{group.name}.bytes_per_token"] = group.bytes_per_token
    return facts
