"""One turn of one arm: its process from start to end, and the messages of the process."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

from benchmarks.versus.arms import VLLM, Arm
from benchmarks.versus.cache import ROOT
from benchmarks.versus.environments import Environment
from benchmarks.versus.job import Event, Job, heard, write_job
from benchmarks.versus.measures import Measures, measure

STOP_S = 15.0
KV_CACHE_GIB = "4"
ERROR = re.compile(r"\b\w*(Error|Exception): ")


@dataclass
class Turn:
    """Results of a turn: batches by load, versions and threads as reported by the process."""

    about: dict[str, Any] = field(default_factory=dict)
    batches: dict[str, list[Measures]] = field(default_factory=dict)
    is_whole: bool = False


class TurnFailed(Exception):
    """The process ended or stalled before its last batch; ``turn`` has the earlier results."""

    def __init__(self, message: str, turn: Turn) -> None:
        super().__init__(message)
        self.turn = turn


def variables(arm: Arm, environment: Environment, job: Job) -> dict[str, str]:
    """Return environment variables: thread counts for every engine, and for vLLM's bare engine
    those that its launcher would set."""
    found = environment.variables()
    found["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT / "src"), str(ROOT), found.get("PYTHONPATH")))
    )
    found |= {"OMP_NUM_THREADS": str(job.num_threads), "HF_HUB_OFFLINE": "1"}
    if arm.family == VLLM:
        cores = ",".join(map(str, job.cores))
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
        if arm.setting != "offline":
            found = {name: text for name, text in found.items() if not name.startswith("KMP_")}
    return found | arm.env


def take_turn(
    arm: Arm,
    environment: Environment,
    job: Job,
    folder: Path,
    timeout_s: float,
    on_batch: Callable[[str], None],
) -> Turn:
    """Run a turn to its end. Raises TurnFailed with the end of its log.

    ``timeout_s`` is the maximum time between two messages of the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / f"{arm.name}.job.json", folder / f"{arm.name}.log"
    write_job(path, job)
    turn = Turn()
    with _process(arm, environment, job, path, log) as process:
        try:
            for message in _messages(process, log, timeout_s):
                _take(message, turn, on_batch)
                if turn.is_whole:
                    return turn
        except TimeoutError as error:
            raise TurnFailed(f"{error} (its log: {log})", turn) from error
    raise TurnFailed(f"{last_words(log)} (all of it: {log})", turn)


def _take(message: dict[str, Any], turn: Turn, on_batch: Callable[[str], None]) -> None:
    if message["kind"] == "ready":
        turn.about = {name: value for name, value in message.items() if name != "kind"}
    elif message["kind"] == "batch":
        events = [Event(*event) for event in message["events"]]
        found = measure(events, message["arrivals_s"])
        turn.batches.setdefault(message["trial"], []).append(found)
        on_batch(message["trial"])
    elif message["kind"] == "end":
        turn.is_whole = True


@contextmanager
def _process(
    arm: Arm, environment: Environment, job: Job, path: Path, log: Path
) -> Iterator[subprocess.Popen[str]]:
    """Run the process in a separate session, so that its children can be killed with it."""
    log.write_text("")
    with log.open("a") as out:
        process = subprocess.Popen(
            [str(environment.python), "-m", arm.module, str(path)],
            cwd=ROOT,
            env=os.environ | variables(arm, environment, job),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, job.cores),
        )
    try:
        yield process
    except BaseException:
        _signal(process, signal.SIGTERM)
        raise
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for the process to end after its last message, else send SIGTERM, then SIGKILL to its
    group."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for sent in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def _signal(process: subprocess.Popen[str], sent: signal.Signals) -> None:
    """Send a signal to the process group, which has only this process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sent)


def _messages(
    process: subprocess.Popen[str], log: Path, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the process's messages; other lines go to the log. Raises TimeoutError after
    silence."""
    assert process.stdout is not None
    lines: Queue[str | None] = Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    with log.open("a", buffering=1) as out:
        heard_at = time.monotonic()
        while True:
            try:
                line = lines.get(timeout=max(0.0, heard_at + timeout_s - time.monotonic()))
            except Empty:
                silent = f"neither ready nor a batch measured for {timeout_s:.0f} s"
                raise TimeoutError(f"{silent}; see --timeout-s") from None
            if line is None:
                return
            message = heard(line)
            if message is None:
                out.write(line)
            else:
                heard_at = time.monotonic()
                yield message


def _read(stdout: IO[str], lines: "Queue[str | None]") -> None:
    for line in stdout:
        lines.put(line)
    lines.put(None)


def last_words(log: Path) -> str:
    """Return the last line of the log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if ERROR.search(line)]
    return (named or lines or ["it said nothing"])[-1][-300:]
