"""The order of turns: arms alternate within each round, and one engine process runs at a time."""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.versus import machine
from benchmarks.versus.arms import LLAMA, VLLM, Arm
from benchmarks.versus.checkpoints import Checkpoint
from benchmarks.versus.environments import (
    Environment,
    NoEnvironment,
    llama_environment,
    own_environment,
    vllm_environment,
)
from benchmarks.versus.job import Job
from benchmarks.versus.loads import Load
from benchmarks.versus.results import Results
from benchmarks.versus.turns import Turn, TurnFailed, take_turn

Said = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Settings of a run. ``options`` are the command-line options that every figure depends on."""

    dtype: str
    num_rounds: int
    num_batches: int
    cores: list[int]
    cache: Path
    timeout_s: float
    options: list[str]

    def command(self, arm: Arm, checkpoint: str, load: Load) -> str:
        """Return the command that measures this figure again."""
        chosen = ["--arms", arm.name, "--checkpoints", checkpoint]
        chosen += ["--prompts", str(load.prompt_tokens)]
        num = str(load.num_sequences)
        if load.rate_per_s:
            chosen += ["--rates", f"{load.rate_per_s:g}", "--requests", num]
        else:
            chosen += ["--sequences", num]
        chosen += ["--drafts", str(arm.num_drafts), "--temperatures", f"{load.temperature:g}"]
        chosen += ["--num-busy", str(load.num_busy)] if load.num_busy else []
        return shlex.join(["python", "-m", "benchmarks.versus", *chosen, *self.options])


@dataclass(frozen=True)
class Owed:
    """One arm's next turn on a checkpoint: the loads that it lacks in this round."""

    arm: Arm
    checkpoint: Checkpoint
    loads: list[Load]
    round: int


def owed_turns(
    arms: list[Arm],
    loads: dict[str, list[Load]],
    checkpoints: list[Checkpoint],
    results: Results,
    settings: Settings,
) -> list[Owed]:
    """Return turns in order: by checkpoint, then round. Arms go forwards and backwards by turns."""
    turns = []
    for checkpoint in checkpoints:
        for i in range(settings.num_rounds):
            for arm in arms[:: -1 if i % 2 else 1]:
                taken = [
                    load
                    for load in loads[checkpoint.name]
                    if arm.takes(load.num_sequences, load.temperature, load.rate_per_s)
                    and results.lacks(arm, checkpoint.name, load, settings.dtype, i + 1)
                ]
                if taken:
                    turns.append(Owed(arm, checkpoint, taken, i))
    return turns


class Runner:
    """Takes turns and writes their results; an arm's failure is its result."""

    def __init__(self, settings: Settings, results: Results, said: Said) -> None:
        self._settings, self._results, self._said = settings, results, said
        self._environments: dict[tuple[str, bool], Environment | NoEnvironment] = {}

    def take(self, owed: Owed, on_batch: Callable[[str], None]) -> None:
        before = machine.moment()
        left = [load for load in owed.loads if self._still_lacks(owed, load)]
        if not left:
            return
        began_at = time.monotonic()
        try:
            environment = self._environment(owed.arm)
            job = self._job(owed, left)
            logs = self._settings.cache / "logs" / owed.checkpoint.name
            timeout_s = self._settings.timeout_s
            turn = take_turn(owed.arm, environment, job, logs, timeout_s, on_batch)
            error = None
        except TurnFailed as failure:
            turn, error = failure.turn, str(failure)
        except (NoEnvironment, ValueError) as failure:
            turn, error = Turn(), str(failure)
        self._note(owed, left, turn, error, before)
        if error is not None:
            self._said(f"{owed.arm.name} failed after {time.monotonic() - began_at:.0f} s: {error}")

    def _still_lacks(self, owed: Owed, load: Load) -> bool:
        """Return whether a load is still missing. A failure in an earlier round counts for later
        ones."""
        dtype = self._settings.dtype
        return self._results.lacks(owed.arm, owed.checkpoint.name, load, dtype, owed.round + 1)

    def _environment(self, arm: Arm) -> Environment:
        if arm.family not in (VLLM, LLAMA):
            return own_environment()
        key = (arm.family, arm.with_zen)
        if key not in self._environments:
            try:
                self._environments[key] = self._made(arm)
            except NoEnvironment as error:
                self._environments[key] = error
        found = self._environments[key]
        if isinstance(found, NoEnvironment):
            raise found
        return found

    def _made(self, arm: Arm) -> Environment:
        cache, said = self._settings.cache, self._said
        if arm.family == LLAMA:
            return llama_environment(cache, said)
        return vllm_environment(cache, with_zen=arm.with_zen, said=said)

    def _job(self, owed: Owed, loads: list[Load]) -> Job:
        num = self._settings.num_batches
        batches = range(owed.round * num, (owed.round + 1) * num)
        return Job(
            model_path=str(owed.checkpoint.path),
            dtype=self._settings.dtype,
            num_drafts=owed.arm.num_drafts,
            num_threads=len(self._settings.cores),
            cores=self._settings.cores,
            trials=[load.trial(owed.checkpoint, batches) for load in loads],
            options=owed.arm.options,
        )

    def _note(
        self, owed: Owed, loads: list[Load], turn: Turn, error: str | None, before: dict[str, Any]
    ) -> None:
        is_busy_now = machine.moment()["is_busy"]
        for load in loads:
            result = self._results.of(owed.arm, owed.checkpoint.name, load, self._settings.dtype)
            measured = turn.batches.get(load.name, [])
            if len(measured) == self._settings.num_batches:
                result.add(measured)
            else:
                result.error = error or "fewer batches than asked"
            was_busy = result.about.get("is_busy", False)
            result.about = self._about(owed, load) | turn.about | before
            result.about["is_busy"] |= was_busy or is_busy_now
        self._results.save()

    def _about(self, owed: Owed, load: Load) -> dict[str, Any]:
        command = self._settings.command(owed.arm, owed.checkpoint.name, load)
        about = {"command": command, "cores": self._settings.cores, "env": owed.arm.env}
        return about | {"options": owed.arm.options} | machine.cpu()
