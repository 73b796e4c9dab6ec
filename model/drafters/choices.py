"""Static draft trees of Medusa, given by the path to each node.

Path (0, 2) is the third most likely token of the second head, after the most likely token of the
first head.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

Choice = tuple[int, ...]
MAX_RANK = 63
_Rank = Annotated[int, Field(strict=True, ge=0, le=MAX_RANK)]
_PATHS = TypeAdapter(list[Annotated[tuple[_Rank, ...], Field(min_length=1)]])


def read_choices(file: Path) -> tuple[Choice, ...]:
    """Read paths from a JSON file with a list of lists. Each path comes after its prefixes.

    Raises ValueError naming file, path and remedy.
    """
    try:
        return with_prefixes(_PATHS.validate_json(file.read_bytes()))
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{index}]" for index in first["loc"])
        raise ValueError(
            f"speculation.medusa_choices: {file}: {where or 'all'}: {first['msg']}; write a list "
            f"of paths of ranks from 0 to {MAX_RANK}, such as [[0], [1], [0, 0]]"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"speculation.medusa_choices: {file}: {error}") from None


def with_prefixes(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return each path once, in the given order, except that prefixes come before longer paths.

    Raises ValueError for a path whose prefix is missing.
    """
    known = set(choices)
    if hole := next((path for path in choices if path[:-1] and path[:-1] not in known), None):
        raise ValueError(f"path {[*hole]} needs its prefix {[*hole[:-1]]}; add that path")
    whole = (path[:end] for path in choices for end in range(1, len(path) + 1))
    return tuple(dict.fromkeys(whole))


def parents_of(choices: Iterable[Choice]) -> tuple[int, ...]:
    """Return the parent of each path's node. Nodes are numbered from 1; 0 is the last known
    token."""
    number: dict[Choice, int] = {(): 0}
    for path in choices:
        number[path] = len(number)
    return tuple(number[path[:-1]] for path in number if path)


def sibling_orders(choices: Iterable[Choice]) -> list[int]:
    """Return, for each path, the number of its siblings that come before it."""
    num_children: Counter[Choice] = Counter()
    orders = []
    for path in choices:
        orders.append(num_children[path[:-1]])
        num_children[path[:-1]] += 1
    return orders
