"""Who is in a rank's step, kept where it outlives the process: a small mapped file.

Whoever buries a rank reads it, and learns which requests may have killed it (design.md, Poison).
"""

import mmap
import struct
from collections.abc import Iterable
from pathlib import Path

from core.identity import Identity
from core.membership import InStep
from core.schema import pack, unpack

_NUM_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")


class BlackBox:
    """Owned by the engine thread. Without a ``path`` nothing is kept."""

    def __init__(self, path: str = "") -> None:
        self._now: dict[str, InStep] = {}
        self._written: InStep | None = None
        self._num_bytes = 0
        self._map: mmap.mmap | None = None
        self.path = path
        if path:
            with open(path, "wb+") as file:
                file.truncate(_NUM_BYTES)
                self._map = mmap.mmap(file.fileno(), _NUM_BYTES)

    def note(self, engine: str, identities: Iterable[Identity], is_alone: bool = False) -> None:
        """These are in the steps that ``engine`` has launched and not read; none of them: it has
        none. ``is_alone``: the one that is in it is there by itself because it is suspected."""
        now = InStep(tuple(identities), is_alone)
        if self._now.get(engine) == now:
            return
        self._now[engine] = now
        if self._map is not None:
            self._write(self._map)

    def _write(self, target: mmap.mmap) -> None:
        """The length is written last: a file is whole or empty. The same rows step after step cost
        their length alone."""
        steps = [step for step in self._now.values() if step.identities]
        everyone = tuple(identity for step in steps for identity in step.identities)
        now = InStep(everyone, len(everyone) == 1 and steps[0].is_alone)
        if everyone and now != self._written:
            data = pack(now)
            assert len(data) <= _NUM_BYTES - _LENGTH.size, f"{len(everyone)} in one step"
            target[: _LENGTH.size] = _LENGTH.pack(0)
            target[_LENGTH.size : _LENGTH.size + len(data)] = data
            self._written, self._num_bytes = now, len(data)
        target[: _LENGTH.size] = _LENGTH.pack(self._num_bytes if everyone else 0)

    def close(self) -> None:
        """The rank ends in order: nothing is to be learnt."""
        if self._map is not None:
            Path(self.path).unlink(missing_ok=True)


def read_box(path: str) -> InStep | None:
    """Who was in the step of a process that has died; None if it was in none, or kept no box."""
    file = Path(path)
    if not path or not file.is_file():
        return None
    data = file.read_bytes()
    [num_bytes] = _LENGTH.unpack(data[: _LENGTH.size])
    return unpack(InStep, data[_LENGTH.size : _LENGTH.size + num_bytes]) if num_bytes else None
