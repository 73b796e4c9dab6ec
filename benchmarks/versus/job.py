"""Orders to an engine process and its answers: JSON, standard library only.

Every engine's process imports this module, in the peers' environments too.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.busy import busy

WARM_UP_TOKENS = 16
MAX_ROWS = 64
"""Maximum number of answers that any engine generates at once; later ones wait."""


@dataclass(frozen=True)
class Trial:
    """One load for one batch of prompts.

    ``batches`` are used for a warm-up first, then measured. Sequences of a batch are sent
    ``arrivals_s`` after its start; all at once if this is empty. ``num_busy`` processes compute on
    the same cores, from the warm-up on.
    """

    name: str
    warm_up: list[list[int]]
    batches: list[list[list[int]]]
    max_tokens: int
    ignore_eos: bool
    temperature: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    num_busy: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.batches[0])

    @property
    def prompt_tokens(self) -> int:
        return len(self.warm_up[0])

    def warming(self) -> "Trial":
        """Return the same trial with short answers, all sent at once."""
        return replace(self, max_tokens=min(self.max_tokens, WARM_UP_TOKENS), arrivals_s=[])

    async def arrival(self, index: int, began: float) -> None:
        """Wait until sequence ``index`` of a batch is due; the batch started at ``began``."""
        if self.arrivals_s:
            await asyncio.sleep(began + self.arrivals_s[index] - time.perf_counter())


@dataclass(frozen=True)
class Job:
    """One run of an engine process. ``options`` are specific to the engine."""

    model_path: str
    dtype: str
    num_drafts: int
    num_threads: int
    cores: list[int]
    trials: list[Trial]
    options: dict[str, Any] = field(default_factory=dict)

    def in_turn(self) -> Iterator[Trial]:
        """Yield each trial while its busy processes run."""
        for trial in self.trials:
            with busy(trial.num_busy):
                yield trial

    @property
    def max_sequences(self) -> int:
        return min(MAX_ROWS, max(trial.num_sequences for trial in self.trials))

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt, answer and drafts, in whole pages of 64."""
        longest = max(trial.prompt_tokens + trial.max_tokens for trial in self.trials)
        return (longest + self.num_drafts + 64) // 64 * 64

    @property
    def max_prompt_tokens(self) -> int:
        return max(trial.prompt_tokens * trial.num_sequences for trial in self.trials)


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(asdict(job)))


def read_job(path: Path) -> Job:
    values = json.loads(path.read_text())
    trials = [Trial(**trial) for trial in values.pop("trials")]
    return Job(trials=trials, **values)


@dataclass(frozen=True)
class Event:
    """Tokens of one sequence that came out together, ``at_s`` since the batch was sent."""

    at_s: float
    sequence: int
    token_ids: list[int]


@dataclass
class Timeline:
    """All tokens of one batch; the first of each sequence is from prefill."""

    num_sequences: int
    events: list[Event] = field(default_factory=list)

    def add(self, at_s: float, sequence: int, token_ids: list[int]) -> None:
        if token_ids:
            self.events.append(Event(at_s, sequence, list(token_ids)))

    def of(self, sequence: int) -> Iterator[Event]:
        return (event for event in self.events if event.sequence == sequence)


def say(kind: str, **values: Any) -> None:
    """Write one line to the process that started this one."""
    print("@@" + json.dumps({"kind": kind, **values}), flush=True)


def say_batch(trial: Trial, timeline: Timeline) -> None:
    events = [(round(e.at_s, 6), e.sequence, e.token_ids) for e in timeline.events]
    arrivals_s = trial.arrivals_s or [0.0] * timeline.num_sequences
    say("batch", trial=trial.name, arrivals_s=arrivals_s, events=events)


def heard(line: str) -> dict[str, Any] | None:
    """Parse a line written by ``say``; return None for any other line."""
    return json.loads(line[2:]) if line.startswith("@@{") else None
