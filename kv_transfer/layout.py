"""What a rank caches per token. Two ranks may hand KV to each other only if this is equal.

Page size is not part of it: the wire is token-wise, so both sides may page as they like.
"""

import hashlib
from dataclasses import dataclass, fields

from core.errors import LayoutMismatch
from core.schema import pack

PROTOCOL = 1
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
    """Groups in the order in which every per-group tuple of the hand-over lists them.

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

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes over all groups and layers."""
        return sum(group.bytes_per_token_all_layers for group in self.groups)

    def group(self, name: str) -> Group:
        """Raises LayoutMismatch for a name this layout does not have."""
        return self.groups[self.index(name)]

    def index(self, name: str) -> int:
        """Place of a group in per-group tuples. Raises LayoutMismatch for an unknown name."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        raise LayoutMismatch(f"no group {name!r}, only {[group.name for group in self.groups]}")

    def fingerprint(self) -> str:
        """16 hex digits, equal on every machine for equal layouts."""
        return hashlib.sha256(pack(self)).hexdigest()[:16]


def check_same(mine: Layout, theirs: Layout) -> None:
    """Raises LayoutMismatch naming every field that differs, with both sides' values."""
    differing = [
        f"{field.name}: {getattr(mine, field.name)!r} here, {getattr(theirs, field.name)!r} there"
        for field in fields(Layout)
        if field.name != "groups" and getattr(mine, field.name) != getattr(theirs, field.name)
    ]
    differing += _differing_groups(mine, theirs)
    if differing:
        raise LayoutMismatch("; ".join(differing))


def _differing_groups(mine: Layout, theirs: Layout) -> list[str]:
    ours, other = ({group.name: group for group in side.groups} for side in (mine, theirs))
    if list(ours) != list(other):
        return [f"groups: {list(ours)} here, {list(other)} there"]
    return [
        f"groups.{name}.{field.name}: {getattr(group, field.name)} here, "
        f"{getattr(other[name], field.name)} there"
        for name, group in ours.items()
        for field in fields(Group)
        if getattr(group, field.name) != getattr(other[name], field.name)
    ]
