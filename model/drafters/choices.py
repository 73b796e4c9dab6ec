"""Static trees as the paths of their nodes: (0, 2) is the third likeliest token of the second head
behind the likeliest of the first. Plain Python."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

Choice = tuple[int, ...]
MOST_RANK = 63


def read_choices(file: Path) -> tuple[Choice, ...]:
    """Of a JSON file with a list of lists, in an order in which no path comes before its prefix.
    Raises ValueError naming file, path and remedy."""
    try:
        paths = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"speculation.choices: {file} cannot be read: {error}") from error
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise ValueError(f"{file}: give a list of paths, such as [[0], [1], [0, 0]]")
    for path in paths:
        if not path or not all(type(rank) is int and 0 <= rank <= MOST_RANK for rank in path):
            raise ValueError(f"{file}: {path} is no path; write ranks of 0 to {MOST_RANK}")
    try:
        return ordered([tuple(path) for path in paths])
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def ordered(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Each once, as they come, but for those that come before their prefix. Raises ValueError for
    one whose prefix is not there."""
    known = set(choices)
    if hole := next((path for path in choices if path[:-1] and path[:-1] not in known), None):
        raise ValueError(f"{[*hole]} has no {[*hole[:-1]]} before it; add that")
    whole = (path[:end] for path in choices for end in range(1, len(path) + 1))
    return tuple(dict.fromkeys(whole))


def parents_of(choices: Iterable[Choice]) -> tuple[int, ...]:
    """The node that each comes after, by its number from 1 on; 0 is the last known token."""
    number: dict[Choice, int] = {(): 0}
    for path in choices:
        number[path] = len(number)
    return tuple(number[path[:-1]] for path in number if path)
