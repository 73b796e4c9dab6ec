"""The results file: one JSON line per arm, checkpoint and load, rewritten as a whole after
turns."""

import json
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.versus.arms import Arm
from benchmarks.versus.loads import Load
from benchmarks.versus.measures import Measures

Key = tuple[str, str, str, str]
"""Arm, checkpoint, load, dtype."""
MEDIANS: tuple[str, ...] = ("tpot_ms", "ttft_ms", "prefill_ms", "tokens_per_s", "repeated_ngrams")
MEDIANS += ("itl_p50_ms", "itl_p99_ms")


@dataclass
class Result:
    """Result of one arm and load. ``rounds`` has a list of measured batches per turn, ``about``
    their circumstances."""

    arm: str
    family: str
    setting: str
    num_drafts: int
    checkpoint: str
    load: str
    prompt_tokens: int
    num_sequences: int
    temperature: float
    dtype: str
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)
    error: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    rate_per_s: float = 0.0
    num_busy: int = 0

    @property
    def key(self) -> Key:
        return self.arm, self.checkpoint, self.load, self.dtype

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [batch for turn in self.rounds for batch in turn]

    def median(self, name: str) -> float | None:
        """Return the median of a measure over all batches of all turns."""
        values = [batch[name] for batch in self.batches if batch.get(name) is not None]
        return statistics.median(values) if values else None

    @property
    def accepted_length(self) -> float | None:
        """Mean accepted length over all batches, which have the same number of sequences."""
        values = [b["accepted_length"] for b in self.batches if b["accepted_length"] is not None]
        return statistics.fmean(values) if values else None

    def add(self, turn: list[Measures]) -> None:
        self.rounds.append([asdict(measures) for measures in turn])
        self.error = None


def new_result(arm: Arm, checkpoint: str, load: Load, dtype: str) -> Result:
    what = (arm.name, arm.family, arm.setting, arm.num_drafts, checkpoint, load.name)
    size = (load.prompt_tokens, load.num_sequences, load.temperature)
    return Result(*what, *size, dtype, rate_per_s=load.rate_per_s, num_busy=load.num_busy)


class Results:
    """All results of a file. They stay unless they are dropped; an unreadable line is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[Key, Result] = {}
        if path.exists():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            values = json.loads(line)
            fields = Result.__dataclass_fields__
            result = Result(**{name: values[name] for name in fields if name in values})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}, line {number} is no result ({error}); remove the file or use --out"
            ) from error
        self.by_key[result.key] = result

    def lacks(self, arm: Arm, checkpoint: str, load: Load, dtype: str, num_rounds: int) -> bool:
        """Return whether this arm still needs turns here; an error counts as a result."""
        found = self.by_key.get((arm.name, checkpoint, load.name, dtype))
        return found is None or (found.error is None and len(found.rounds) < num_rounds)

    def of(self, arm: Arm, checkpoint: str, load: Load, dtype: str) -> Result:
        new = new_result(arm, checkpoint, load, dtype)
        return self.by_key.setdefault(new.key, new)

    def drop(self, arm: Arm, checkpoint: str, load: Load, dtype: str) -> None:
        self.by_key.pop((arm.name, checkpoint, load.name, dtype), None)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        part.write_text("".join(f"{as_line(result)}\n" for result in self.by_key.values()))
        part.replace(self.path)


def as_line(result: Result) -> str:
    medians = {name: result.median(name) for name in MEDIANS}
    extra = {"medians": medians, "accepted_length": result.accepted_length}
    return json.dumps(asdict(result) | extra)
