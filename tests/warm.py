"""Run commands as forks of a process that has imported everything.

Imports take most of a command's time. A fork has its own arguments, streams and exit code, and ends
as any other interpreter does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cached_property

SCRIPT = """
import sys
from tests import warm
{imports}
warm.forked(int(sys.argv[1]))
{call}
"""
NUM_STREAMS = 3
MOST_BYTES = 1 << 16


class Warm:
    """Runs ``call`` once for each list of arguments, in forks of a process that has done
    ``imports``. That process is started when first needed and ends with this one."""

    def __init__(self, imports: str, call: str) -> None:
        self._script = SCRIPT.format(imports=imports, call=call)

    @cached_property
    def _socket(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._script, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return ours

    def run(
        self, args: tuple[str, ...], stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        with ExitStack() as stack:
            stdio = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(NUM_STREAMS)]
            stdio[0].write(stdin)
            stdio[0].seek(0)
            self._socket.settimeout(timeout_s)
            fds = [stream.fileno() for stream in stdio]
            socket.send_fds(self._socket, [json.dumps(args).encode()], fds)
            pid = int(self._socket.recv(MOST_BYTES))
            try:
                code = int(self._socket.recv(MOST_BYTES))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._socket.recv(MOST_BYTES)
                raise
            for stream in stdio[1:]:
                stream.seek(0)
            return subprocess.CompletedProcess(args, code, *(s.read() for s in stdio[1:]))


def forked(fd: int) -> None:
    """Return once for each command, in a separate process."""
    with socket.socket(fileno=fd) as jobs:
        while True:
            data, fds, _, _ = socket.recv_fds(jobs, MOST_BYTES, NUM_STREAMS)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                break
            for stream in fds:
                os.close(stream)
            jobs.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            jobs.send(str(os.waitstatus_to_exitcode(status)).encode())
    for number, stream in enumerate(fds):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv[1:] = json.loads(data)
