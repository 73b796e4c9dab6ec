"""A value of the product travels no further than is written down; and the script that says so."""

import pytest

from tests.following import Walk
from tests.sources import Index
from tests.walks import STARTS, Counts, counts, walked, written

MOST_LINES = 250


def test_no_walk_is_longer_than_is_written_down() -> None:
    """``python -m tests.walks NAME`` shows where it goes; what has become shorter is written down
    with --write."""
    today, most = walked(), written()
    assert today.keys() == most.keys() == STARTS.keys()
    for name, found in today.items():
        worse = {word: num for word, num in vars(found).items() if num > vars(most[name])[word]}
        assert not worse, f"{name}: {worse} where {most[name]} is written down"
        assert found.largest <= MOST_LINES, f"{name}: a file of {found.largest} lines"


def test_none_is_cut_short_by_a_name_that_is_nobodys() -> None:
    for name, found in walked().items():
        assert found.rooms >= 2, f"{name} {found}: does its start still hold the value?"


PASSED_ON = {
    "a.py": """
from b import inner, other
def start(thing):
    renamed = thing
    inner(1, renamed)
    back(thing)
def back(thing):
    other(key=thing.part)
def never(thing): ...
""",
    "b.py": """
def inner(first, second):
    return len(second)
def other(first=0, *, key):
    unrelated(first, len(key))
def unrelated(first, key): ...
""",
}
STORED = {
    "a.py": """
from b import Keeper
def start(thing, others):
    keeper = Keeper(thing, others)
    keeper.asked()
    keeper.idle()
def end(thing): ...
""",
    "b.py": """
from a import end
class Keeper:
    def __init__(self, thing, others):
        self._thing, self._others = thing, others
    def asked(self):
        self._told(self._thing)
    def _told(self, what):
        end(what)
    def idle(self):
        return self._others
""",
}
WRAPPED = {
    "a.py": """
import asyncio
from dataclasses import replace
from b import Message, Sender, work
async def start(thing, sender: Sender):
    message = Message(3, body=thing)
    sender.send(message)
    sender.count(message.number)
    made = await asyncio.to_thread(work, thing)
    sender.send(made)
    sender.send(replace(made, number=4))
""",
    "b.py": """
from dataclasses import dataclass
@dataclass
class Message:
    number: int
    body: object
def work(thing):
    return Message(1, thing)
class Sender:
    def send(self, message: Message): ...
    def count(self, number): ...
""",
}
HANDED = {
    "a.py": """
from b import Runner
def start(thing):
    Runner(thing, served).run()
def served(thing): ...
""",
    "b.py": """
class Runner:
    def __init__(self, thing, serve):
        self._thing, self._serve = thing, serve
    def run(self):
        self._serve(self._thing)
""",
}
PROTOCOLS = {
    "a.py": """
from b import Many, One
def start(thing, one: One, many: "Many | None"):
    one.take(thing)
    many.give(thing)
""",
    "b.py": """
from typing import Protocol
class One(Protocol):
    def take(self, thing): ...
class Only:
    def take(self, thing): ...
class Many(Protocol):
    def give(self, thing): ...
class First:
    def give(self, thing): ...
class Second:
    def give(self, thing): ...
""",
}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (PASSED_ON, ["a:start", "b:inner", "a:back", "b:other"]),
        (STORED, ["a:start", "b:Keeper.__init__", "b:Keeper.asked", "b:Keeper._told", "a:end"]),
        (WRAPPED, ["a:start", "b:Sender.send", "b:work", "b:Sender.send", "b:Sender.send"]),
        (HANDED, ["a:start", "b:Runner.__init__", "b:Runner.run", "a:served"]),
        (PROTOCOLS, ["a:start", "b:Only.take"]),
    ],
    ids=["other names", "stored on self", "in a message", "a function handed on", "protocols"],
)
def test_the_value_is_followed(sources: dict[str, str], expected: list[str]) -> None:
    walk = Walk(Index(sources), "a.py:start:thing")
    entered = [f"{one.function.file[:-3]}:{one.function.label}" for one in walk.entries]
    assert entered == expected


def test_stays_and_returns_are_counted() -> None:
    walk = Walk(Index(PASSED_ON), "a.py:start:thing")
    assert [entry.names for entry in walk.entries] == [
        ("thing",),
        ("second",),
        ("thing",),
        ("key",),
    ]
    found = counts(walk)
    assert (found.stays, found.rooms, found.returns) == (4, 2, 2)


def test_a_second_entry_is_a_stay_but_not_read_again() -> None:
    again = {
        "a.py": "from b import f\ndef start(thing):\n    f(thing)\n    g(thing)\n    f(thing)\n"
        "def g(thing): ...\n",
        "b.py": "from c import h\ndef f(thing):\n    h(thing)\n",
        "c.py": "def h(thing): ...\n",
    }
    walk = Walk(Index(again), "a.py:start:thing")
    assert [(one.function.label, one.is_again) for one in walk.entries] == [
        *(("start", False), ("f", False), ("h", False), ("g", False), ("f", True)),
    ]
    assert counts(walk) == Counts(stays=5, rooms=3, returns=2, largest=0)


@pytest.mark.parametrize("place", ["a.py:start:nothing", "a.py:nowhere:thing", "c.py:start:thing"])
def test_a_start_that_is_not_there_is_told(place: str) -> None:
    with pytest.raises(ValueError, match="no such"):
        Walk(Index(PASSED_ON), place)
