"""Run as a script: ends every process of a local Ray once its driver is gone, however it went.

Some of Ray's processes follow a killed driver late, and stopped ones not at all. Only the
standard library, so that it costs next to nothing.
"""

import os
import select
import signal
import sys

SCAN_PERIOD_S = 0.5


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``."""
    direct: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                direct += map(int, file.read().split())
    except OSError:
        pass  # it has ended meanwhile
    return direct + [descendant for child in direct for descendant in descendants(child)]


def started_at(pid: int) -> str | None:
    """When a process began, in ticks: with its pid this is one process only. None if dead."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def main() -> None:
    """Watches the trees of the processes given as arguments until standard input closes, which it
    does when the parent ends or asks for the end; then kills what has ever been in them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    roots, known = [int(text) for text in sys.argv[1:]], dict[int, str]()
    is_over = False
    while not is_over:
        is_over = bool(select.select([0], [], [], SCAN_PERIOD_S)[0])
        alive = {pid: started for pid, started in known.items() if started_at(pid) == started}
        seen = {pid for root in (*roots, *alive) for pid in (root, *descendants(root))}
        known = alive | {pid: started for pid in seen if (started := started_at(pid)) is not None}
    for pid, started in known.items():
        if started_at(pid) == started:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
