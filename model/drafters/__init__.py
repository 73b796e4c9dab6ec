"""Drafters by name, each in a file of its own."""

from collections.abc import Callable

from model.deepseek import DeepseekV3
from model.drafters.base import Drafter
from model.drafters.mtp import MtpDrafter
from model.drafters.none import NoDrafter
from model.weights import Checkpoint, has_mtp

NONE = "none"
DRAFTERS: dict[str, Callable[[Checkpoint, DeepseekV3], Drafter]] = {
    "mtp": MtpDrafter.load,
    NONE: lambda *_: NoDrafter(),
}


def create_drafter(name: str, checkpoint: Checkpoint, network: DeepseekV3) -> Drafter:
    """The drafter called ``name`` of a loaded main model, whose embedding and head it may share;
    "auto" is MTP where the checkpoint has it, else none.

    Raises ValueError for an unknown name, for "mtp" on a checkpoint without that layer, and for
    whatever is wrong with the drafter's weights.
    """
    holds_mtp = has_mtp(checkpoint.files, checkpoint.config)
    if name == "auto":
        name = "mtp" if holds_mtp else NONE
    if name not in DRAFTERS:
        raise ValueError(f"speculation.drafter: {name!r} is unknown, use one of {sorted(DRAFTERS)}")
    if name == "mtp" and not holds_mtp:
        raise ValueError(
            "speculation.drafter: 'mtp' needs the MTP layer, which this checkpoint lacks; "
            "use 'auto' or 'none'"
        )
    return DRAFTERS[name](checkpoint, network)
