"""What a rank has per token, and what another has to have to take it over.

Page size is not part of it: the wire is token-wise, so both sides may page as they like.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tandem.core.errors import LayoutMismatch

PROTOCOL = 9
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

    ``dtype`` names the cache's element type, ``model`` and ``more`` what it was computed by;
    ``num_features`` of the last tokens go with them.
    """

    groups: tuple[Group, ...]
    dtype: str
    model: str
    num_features: int = 0
    protocol: int = PROTOCOL
    computed_by: str = ""

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

    def compatibility_facts(self) -> tuple[str, ...]:
        """A line for each thing that it has; equal on every machine."""
        groups = (f"{one.name}: {one.num_layers} x {one.bytes_per_token} B" for one in self.groups)
        features = (f"features: {self.num_features}",) if self.num_features else ()
        more = (f"by: {self.computed_by}",) if self.computed_by else ()
        of_all = f"protocol: {self.protocol}", f"model: {self.model}", f"dtype: {self.dtype}"
        return (*of_all, *groups, *features, *more)


def check_compatible(offered: Collection[str], wanted: Collection[str]) -> None:
    """Raises LayoutMismatch with the ``facts`` of a decode rank that a prefill rank does not have;
    what that has besides is no matter."""
    if missing := [fact for fact in wanted if fact not in offered]:
        rest = [fact for fact in offered if fact not in wanted]
        raise LayoutMismatch(
            f"decode wants {', '.join(missing)}; prefill has {', '.join(rest) or 'no more'}: both "
            "need the same checkpoint, dtype and heads, and prefill what decode's drafts read"
        )
