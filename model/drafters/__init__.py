"""Drafters by name, each in a file of its own, imported when asked for."""

from collections.abc import Callable

from model.deepseek import DeepseekV3
from model.drafters.base import Drafter


def _mtp(model: DeepseekV3) -> Drafter:
    from model.drafters.mtp import MtpDrafter

    return MtpDrafter(model)


def _none(model: DeepseekV3) -> Drafter:
    from model.drafters.none import NoDrafter

    return NoDrafter()


DRAFTERS: dict[str, Callable[[DeepseekV3], Drafter]] = {"mtp": _mtp, "none": _none}


def create_drafter(name: str, model: DeepseekV3) -> Drafter:
    """The drafter called ``name``; "auto" is MTP where the checkpoint has it, else none.

    Raises ValueError for an unknown name, or for "mtp" on a checkpoint without that layer.
    """
    if name == "auto":
        name = "mtp" if model.has_mtp else "none"
    if name not in DRAFTERS:
        raise ValueError(f"speculation.drafter: {name!r} is unknown, use one of {sorted(DRAFTERS)}")
    if name == "mtp" and not model.has_mtp:
        raise ValueError(
            "speculation.drafter: 'mtp' needs the MTP layer, which this checkpoint lacks; "
            "use 'auto' or 'none'"
        )
    return DRAFTERS[name](model)
