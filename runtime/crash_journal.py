"""Journal of the sequences in a rank's current step: a small mapped file that outlives the process.

After a rank has died, the controller reads the file to learn which requests may have crashed the
rank.
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
"""Maximum number of recorded sequences. With the longest request ids they fill a little over half
of the file."""


class CrashJournal:
    """Journal of one rank, written on the engine thread only. An empty ``path`` disables it."""

    def __init__(self, path: str = "") -> None:
        self._in_flight: dict[str, InFlightBatch] = {}
        self._recorded: InFlightBatch | None = None
        self._num_bytes = 0
        self._map: mmap.mmap | None = None
        self.path = path
        if path:
            Path(path).unlink(missing_ok=True)  # an earlier epoch of this process may have left it
            with open(os.open(path, _NEW, 0o600), "rb+") as file:
                os.posix_fallocate(file.fileno(), 0, _NUM_BYTES)  # fails here if the disk is full
                self._map = mmap.mmap(file.fileno(), _NUM_BYTES)

    def record_in_flight(
        self, engine: str, identities: Iterable[Identity], is_isolated: bool = False
    ) -> None:
        """Record the sequences of the steps that ``engine`` has launched but not yet read.

        Args:
            engine: Name of the engine.
            identities: The sequences; empty if no step is in flight.
            is_isolated: Whether there is only one sequence because it must run alone: it is
                suspected of crashing a rank.
        """
        now = InFlightBatch(tuple(identities), is_isolated)
        if self._in_flight.get(engine) == now:
            return
        self._in_flight[engine] = now
        if self._map is not None:
            self._write(self._map)

    def _write(self, target: mmap.mmap) -> None:
        """Write the length last, so that a reader finds either a complete journal or an empty one.

        If the sequences are unchanged since the last record, only the length is written.
        """
        steps = [step for step in self._in_flight.values() if step.identities]
        everyone = tuple(identity for step in steps for identity in step.identities)[:MAX_RECORDED]
        now = InFlightBatch(everyone, len(everyone) == 1 and steps[0].is_isolated)
        if everyone and now != self._recorded:
            data = pack(now)
            assert len(data) <= _NUM_BYTES - _LENGTH.size, (
                "the request ids do not fit into the journal"
            )
            target[: _LENGTH.size] = _LENGTH.pack(0)
            target[_LENGTH.size : _LENGTH.size + len(data)] = data
            self._recorded = now
            self._num_bytes = len(data)
        target[: _LENGTH.size] = _LENGTH.pack(self._num_bytes if everyone else 0)

    def close(self) -> None:
        """Delete the file. Called when the rank ends without a crash."""
        if self._map is not None:
            Path(self.path).unlink(missing_ok=True)


def read_crash_journal(path: str) -> InFlightBatch | None:
    """Return the sequences in the last step of a dead process, None if there were none.

    Also returns None for a file that another user could have written. Otherwise that user could
    choose which requests are refused as poison.
    """
    data = read_private_file(Path(path)) if path else None
    if data is None:
        return None
    [num_bytes] = _LENGTH.unpack(data[: _LENGTH.size])
    return (
        unpack(InFlightBatch, data[_LENGTH.size : _LENGTH.size + num_bytes]) if num_bytes else None
    )
