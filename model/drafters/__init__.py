"""Drafters by name, each in a file of its own, or anybody's by the path of its class."""

from collections.abc import Callable
from importlib import import_module

from core.config import AUTO
from model.checkpoint.weights import Checkpoint, has_mtp
from model.drafters.base import Drafter
from model.drafters.none import NoDrafter
from model.network.cache import MTP
from model.network.deepseek import DeepseekV3

NONE = "none"
Loader = Callable[[Checkpoint, DeepseekV3], Drafter]
CLASSES = {
    MTP: "model.drafters.mtp:MtpDrafter",
}
"""Whose ``load`` makes them of a checkpoint and its loaded main model, whose embedding and head
they may share."""


def create_drafter(name: str, checkpoint: Checkpoint, network: DeepseekV3) -> Drafter:
    """The drafter called ``name``; auto is MTP where the checkpoint has it, else none.

    Raises ValueError for an unknown name or a class that is not there, for MTP on a checkpoint
    without that layer, and for whatever is wrong with the drafter's weights.
    """
    holds_mtp = has_mtp(checkpoint.files, checkpoint.config)
    if name == AUTO:
        name = MTP if holds_mtp else NONE
    if name == NONE:
        return NoDrafter()
    if name == MTP and not holds_mtp:
        raise ValueError(
            "speculation.drafter: 'mtp' needs the MTP layer, which this checkpoint lacks; "
            "use 'auto' or 'none'"
        )
    return _load(CLASSES.get(name, name))(checkpoint, network)


def _load(path: str) -> Loader:
    module, _, name = path.partition(":")
    try:
        load: Loader = getattr(import_module(module), name).load
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join((AUTO, *CLASSES, NONE))
        raise ValueError(
            f"speculation.drafter: {path!r} cannot be had ({error}); use {known}, or "
            "package.module:Class with a class that has load(checkpoint, network)"
        ) from error
    return load
