"""Format of a rank's cache entries, and the check that two ranks have compatible formats.

The page size is not part of the format. Entries are transferred token by token, so the page sizes
of two ranks may differ.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tandem.core.errors import LayoutMismatch

PROTOCOL = 9
"""Version of the hand-over messages; both ranks must have the same."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose entries have the same size and are computed together.

    ``bytes_per_token`` is the size of one token's entry in one layer.
    """

    name: str
    num_layers: int
    bytes_per_token: int

    @property
    def bytes_per_token_all_layers(self) -> int:
        return self.num_layers * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Layout:
    """Format of a rank's cache. All groups have entries of the same tokens at any time.

    Attributes:
        dtype: Name of the caches' element type.
        model: Digest of the checkpoint that computes the entries.
        num_features: Number of feature values that are handed over with the KV (Seal.features).
        protocol: Version of the hand-over messages.
        computed_by: Digest of separate drafter weights that determine entries, "" if there are
            none.
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
        """Return the group of this name. Raises LayoutMismatch if it is unknown."""
        for group in self.groups:
            if group.name == name:
                return group
        raise LayoutMismatch(
            f"cache group {name!r} is unknown; use one of {[group.name for group in self.groups]}"
        )

    def compatibility_facts(self) -> tuple[str, ...]:
        """Return one line of text per property of the format.

        Ranks with the same format return the same lines on every machine.
        """
        groups = (
            f"{group.name}: {group.num_layers} x {group.bytes_per_token} B" for group in self.groups
        )
        features = (f"features: {self.num_features}",) if self.num_features else ()
        more = (f"drafter: {self.computed_by}",) if self.computed_by else ()
        of_all = f"protocol: {self.protocol}", f"model: {self.model}", f"dtype: {self.dtype}"
        return (*of_all, *groups, *features, *more)


def check_compatible(offered: Collection[str], wanted: Collection[str]) -> None:
    """Raise LayoutMismatch if a fact in ``wanted`` is missing in ``offered``.

    Args:
        offered: ``Layout.compatibility_facts`` of the prefill rank, which may contain more facts.
        wanted: ``Layout.compatibility_facts`` of the decode rank.
    """
    if missing := [fact for fact in wanted if fact not in offered]:
        rest = [fact for fact in offered if fact not in wanted]
        raise LayoutMismatch(
            f"the decode rank needs {', '.join(missing)}; the prefill rank has "
            f"{', '.join(rest) or 'nothing else'}: use the same checkpoint, dtype and draft "
            "heads for both, and a prefill drafter that caches what the decode drafter reads"
        )
