"""Script that kills every process of a local Ray after its driver has ended, for whatever reason.

Some of Ray's processes end late after a killed driver, and stopped ones never end. Uses only the
standard library, so that it starts fast.
"""

import os
import select
import signal
import sys

SCAN_PERIOD_S = 0.5


def descendants(pid: int) -> list[int]:
    """Return all descendants of process ``pid``."""
    direct: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                direct += map(int, file.read().split())
    except OSError:
        pass  # the process has ended
    return direct + [descendant for child in direct for descendant in descendants(child)]


def started_at(pid: int) -> str | None:
    """Return the start time of a process in ticks, None if it is dead.

    Together with the pid it identifies one process.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def main() -> None:
    """Watch the process trees of the pids in the arguments, and kill them at the end.

    The end is when standard input closes: the parent process has ended or closed the pipe. All
    processes that were in a tree at any time are killed.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    roots = [int(text) for text in sys.argv[1:]]
    known = dict[int, str]()
    is_over = False
    while not is_over:
        is_over = bool(select.select([0], [], [], SCAN_PERIOD_S)[0])
        alive = {pid: started for pid, started in known.items() if started_at(pid) == started}
        family = {pid for root in (*roots, *alive) for pid in (root, *descendants(root))}
        known = alive | {pid: started for pid in family if (started := started_at(pid)) is not None}
    for pid, started in known.items():
        if started_at(pid) == started:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
