"""Who is in a rank's step, kept where it outlives the process: a small mapped file.

Whoever buries a rank reads it, and learns which requests may have killed it (design.md, Poison).
"""

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from tandem.core.identity import Identity
from tandem.core.membership import InFlightBatch
from tandem.core.schema import pack, unpack
from tandem.core.user_cache import read_private_file

_NUM_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
MAX_RECORDED = 1024
"""Sequences of a step that are noted: with the longest request ids, a little over half of a box."""


class CrashJournal:
    """Owned by the engine thread. Without a ``path`` nothing is kept."""

    def __init__(self, path: str = "") -> None:
        self._in_flight: dict[str, InFlightBatch] = {}
        self._recorded: InFlightBatch | None = None
        self._num_bytes = 0
        self._map: mmap.mmap | None = None
        self.path = path
        if path:
            Path(path).unlink(missing_ok=True)  # of an earlier life of this process
            with open(os.open(path, _NEW, 0o600), "rb+") as file:
                os.posix_fallocate(file.fileno(), 0, _NUM_BYTES)  # or a full disk is a SIGBUS later
                self._map = mmap.mmap(file.fileno(), _NUM_BYTES)

    def record_in_flight(
        self, engine: str, identities: Iterable[Identity], is_isolated: bool = False
    ) -> None:
        """These are in the steps that ``engine`` has launched and not read; none of them: it has
        none. ``is_isolated``: the one that is in it is there by itself because it is suspected."""
        now = InFlightBatch(tuple(identities), is_isolated)
        if self._in_flight.get(engine) == now:
            return
        self._in_flight[engine] = now
        if self._map is not None:
            self._write(self._map)

    def _write(self, target: mmap.mmap) -> None:
        """The length is written last: a file is whole or empty. The same rows step after step cost
        their length alone."""
        steps = [step for step in self._in_flight.values() if step.identities]
        everyone = tuple(identity for step in steps for identity in step.identities)[:MAX_RECORDED]
        now = InFlightBatch(everyone, len(everyone) == 1 and steps[0].is_isolated)
        if everyone and now != self._recorded:
            data = pack(now)
            assert len(data) <= _NUM_BYTES - _LENGTH.size, "a request id is longer than is let in"
            target[: _LENGTH.size] = _LENGTH.pack(0)
            target[_LENGTH.size : _LENGTH.size + len(data)] = data
            self._recorded, self._num_bytes = now, len(data)
        target[: _LENGTH.size] = _LENGTH.pack(self._num_bytes if everyone else 0)

    def close(self) -> None:
        """The rank ends in order: nothing is to be learnt."""
        if self._map is not None:
            Path(self.path).unlink(missing_ok=True)


def read_crash_journal(path: str) -> InFlightBatch | None:
    """Return the sequences in the step of a process that has died; None if there were none, or if
    no box of this user is there: whoever replaces a box would choose what counts as poison."""
    data = read_private_file(Path(path)) if path else None
    if data is None:
        return None
    [num_bytes] = _LENGTH.unpack(data[: _LENGTH.size])
    return (
        unpack(InFlightBatch, data[_LENGTH.size : _LENGTH.size + num_bytes]) if num_bytes else None
    )
