"""How far a value travels: what somebody reads who follows one parameter through the code.

    python -m tests.walks [NAME or FILE:FUNCTION:PARAM ..] [--json] [--write]

The walk enters a function where it is given the value, and from there each function of ours into
which the value goes, in the order in which the code is written, branches one after the other. The
value is itself under whatever name (an argument, by place or by keyword; a variable; an attribute
of ``self``, read by a later method of the class), its parts (attributes, items), its other forms
(what a method that is not ours gives of it: ``path.absolute()``, ``tensor.tobytes()``; FORMS) and
what holds it (a tuple, an object of a class of ours that is made with it, of which the parts made
of it are the value). What is computed of it is not: a length, a sum, a comparison. A method of the
value is entered, and one of what holds it if it reads the attribute. A function of ours that is
handed on is entered where it is called, and at once when those who call it are not ours. Of a
Protocol the one class that has all of it is entered; where several have, or the value goes over a
wire, the walk is at its end there.

A **stay** is a run of consecutive entered functions in one file; a function that was entered
before counts again, but is read again only if the value comes in another way. A **return** is a
stay in a file that was left before. **Rooms** are the files, **largest** the lines of code
(``tests.sizes``) of the one with most.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from tests.following import Walk
from tests.sizes import ROOT, num_lines, product
from tests.sources import Index

STARTS = {
    "request": ("cluster/door/servicer.py:InferenceServicer.Generate:message",),
    "plan": (
        "decode_node/planning/step_planner.py:StepPlanner.__call__:proposals",
        "decode_node/engine.py:DecodeEngine._launch:plan",
    ),
    "draft": ("decode_node/program/step.py:decode_step:rows",),
    "hidden": (
        "prefill_node/rank.py:PrefillRank._on_progress:progress",
        "kv_transfer/pull.py:Pulling.check_seal:seal",
        "decode_node/service/rank.py:DecodeRank._activate:seal",
    ),
    "pair": ("cluster/gateway/flow.py:run_request:pair",),
    "launch:config": ("cluster/control/launch.py:launch:config",),
}
"""FILE:FUNCTION:PARAM where each begins, and where it goes on after a wire."""
WRITTEN = ROOT / "tests/data/walks.json"


@dataclass(frozen=True)
class Counts:
    stays: int
    rooms: int
    returns: int
    largest: int


def counts(walk: Walk) -> Counts:
    files = [entry.function.file for entry in walk.entries]
    stays, rooms = sum(1 for _ in groupby(files)), set(files)
    return Counts(stays, len(rooms), stays - len(rooms), max(map(_size, rooms)))


def told(walk: Walk) -> Iterator[str]:
    """The path, a line for each file and each function entered there."""
    for file, entries in groupby(walk.entries, lambda entry: entry.function.file):
        yield file
        for entry in entries:
            names = ", ".join(entry.names) or "(read from its object)"
            again = " (again)" if entry.is_again else ""
            yield f"{'  ' * (entry.depth + 1)}{entry.function.label}: {names}{again}"


@cache
def index() -> Index:
    """Of the product as it stands."""
    return Index({file: (ROOT / file).read_text() for file in product()})


def walked() -> dict[str, Counts]:
    return {name: counts(Walk(index(), *places)) for name, places in STARTS.items()}


def written() -> dict[str, Counts]:
    return {name: Counts(**one) for name, one in json.loads(WRITTEN.read_text()).items()}


@cache
def _size(file: str) -> int:
    path = ROOT / file
    return num_lines(path.read_text()) if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(STARTS), metavar="NAME or PLACE")
    parser.add_argument("--json", action="store_true", help="counts alone")
    parser.add_argument("--write", action="store_true", help=f"today's counts to {WRITTEN.name}")
    args = parser.parse_args()
    try:
        walks = {name: Walk(index(), *STARTS.get(name, (name,))) for name in args.names}
    except ValueError as error:
        parser.error(f"{error}; where walks begin stands in STARTS")
    figures = {name: vars(counts(walk)) for name, walk in walks.items()}
    if args.write:
        today = {name: vars(one) for name, one in walked().items()}
        WRITTEN.write_text(json.dumps(today, indent=2) + "\n")
    if args.json:
        print(json.dumps(figures))
        return
    for name, walk in walks.items():
        head = ", ".join(f"{word} {num}" for word, num in figures[name].items())
        print(f"{name}: {head}", *told(walk), "", sep="\n")


if __name__ == "__main__":
    main()
