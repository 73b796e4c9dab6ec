"""The drafters that are compared, with the config keys that select them."""

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
"""Length of the draft chains that are compared with MTP's."""


@dataclass(frozen=True)
class Arm:
    """One drafter.

    Attributes:
        asks: Config items, except those for the amount of drafting.
        depth: Maximum depth of a chain or tree.
        nodes: Maximum nodes of a tree; None for a chain.
        made_in: Folder with the training.json of its weights.
        path: Checkpoint.
    """

    name: str
    asks: tuple[str, ...]
    depth: int
    nodes: int | None = None
    made_in: str | None = None
    path: Path = TINY_MODEL

    def loaded(self, depth: int | None = None, *more: str) -> LoadedModel:
        """Load it with chains of at most ``depth`` drafts; None drafts up to the arm's maximum."""
        asks = [*self.asks, f"speculation.max_depth={depth or self.depth}"]
        if self.nodes is not None and depth is None:
            asks.append(f"speculation.max_tree_nodes={self.nodes}")
        return load(self.path, "model.kernels=native", "model.dtype=bfloat16", *asks, *more)

    @property
    def is_chain(self) -> bool:
        """Whether it can draft chains of length CHAIN."""
        return self.nodes is None and self.depth >= CHAIN

    @property
    def minutes(self) -> float | None:
        """Training time in minutes, from training.json."""
        file = FOLDER / (self.made_in or "") / "training.json"
        if self.made_in is None or not file.is_file():
            return None
        return float(json.loads(file.read_text(encoding="utf-8"))["minutes"])


def head(name: str, folder: str) -> tuple[str, ...]:
    return f"speculation.drafter={name}", f"speculation.draft_model_path={FOLDER / folder}"


def arms(medusa2: Path | None = None) -> list[Arm]:
    """Return all arms. ``medusa2`` is a folder of training.medusa2, which is not shipped."""
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
    """Return whether the weights of an arm exist."""
    return arm.made_in is None or (FOLDER / arm.made_in).is_dir()
