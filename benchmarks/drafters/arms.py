"""The drafters that are compared, as users ask for them."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.engines import load
from benchmarks.harness.procs import ROOT
from tandem.core.config import TINY_MODEL
from tandem.model.loaded import LoadedModel

FOLDER = ROOT / "training"
MTP, NONE = "MTP", "none"
CHAIN = 3
"""Drafts of a chain that is held against MTP's."""


@dataclass(frozen=True)
class Arm:
    """``asks`` are settings but for how much is drafted: a chain of ``depth`` at most, or with
    ``nodes`` a tree. ``made_in`` has its training.json, ``path`` the checkpoint."""

    name: str
    asks: tuple[str, ...]
    depth: int
    nodes: int | None = None
    made_in: str | None = None
    path: Path = TINY_MODEL

    def loaded(self, depth: int | None = None, *more: str) -> LoadedModel:
        """Drafting at most so deep, a chain then; by default as much as it may."""
        asks = [*self.asks, f"speculation.max_depth={depth or self.depth}"]
        if self.nodes is not None and depth is None:
            asks.append(f"speculation.max_tree_nodes={self.nodes}")
        return load(self.path, "model.kernels=native", "model.dtype=bfloat16", *asks, *more)

    @property
    def is_chain(self) -> bool:
        """Whether it drafts chains of CHAIN."""
        return self.nodes is None and self.depth >= CHAIN

    @property
    def minutes(self) -> float | None:
        """Of training, as it was told."""
        file = FOLDER / (self.made_in or "") / "training.json"
        if self.made_in is None or not file.is_file():
            return None
        return float(json.loads(file.read_text(encoding="utf-8"))["minutes"])


def head(name: str, folder: str) -> tuple[str, ...]:
    return f"speculation.drafter={name}", f"speculation.draft_model_path={FOLDER / folder}"


def arms(medusa2: Path | None = None) -> list[Arm]:
    """``medusa2`` is a folder of training.medusa2, which is not shipped."""
    eagle, hass, eagle3, medusa, small = (
        head("eagle", "tiny-v3-eagle"),
        head("eagle", "tiny-v3-hass"),
        head("eagle3", "tiny-v3-eagle3"),
        head("medusa", "tiny-v3-medusa"),
        head("draft_model", "tiny-v3-draft"),
    )
    made = [
        Arm(MTP, (), 5, made_in="tiny-v3"),
        Arm("MTP tree", (), 4, 16, made_in="tiny-v3"),
        Arm("MTP Vanilla", (), 5, made_in="tiny-v3-vanilla", path=FOLDER / "tiny-v3-vanilla"),
        Arm("EAGLE-1", eagle, 5, made_in="tiny-v3-eagle"),
        Arm("EAGLE-2", eagle, 4, 16, made_in="tiny-v3-eagle"),
        Arm("HASS", hass, 5, made_in="tiny-v3-hass"),
        Arm("EAGLE-3", eagle3, 5, made_in="tiny-v3-eagle3"),
        Arm("EAGLE-3 tree", eagle3, 4, 16, made_in="tiny-v3-eagle3"),
        Arm("Medusa", medusa, 3, made_in="tiny-v3-medusa"),
        Arm("Medusa tree", medusa, 4, 16, made_in="tiny-v3-medusa"),
        Arm("n-gram", ("speculation.drafter=ngram",), 8),
        Arm("draft model", small, 5, made_in="tiny-v3-draft"),
        Arm("draft model tree", small, 4, 16, made_in="tiny-v3-draft"),
        Arm("n-gram + MTP", ("speculation.drafter=ngram+mtp",), 5, made_in="tiny-v3"),
        Arm("self", ("speculation.drafter=self", "speculation.draft_budget_pages=4"), 4),
    ]
    if medusa2 is not None:
        asks = "speculation.drafter=medusa", f"speculation.draft_model_path={medusa2 / 'heads'}"
        made.append(Arm("MEDUSA-2", asks, 3, made_in=str(medusa2), path=medusa2))
    return made


def is_there(arm: Arm) -> bool:
    """Whether its weights are."""
    return arm.made_in is None or (FOLDER / arm.made_in).is_dir()
