"""Drafters by name, each in a file of its own, or anybody's by the path of its class."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from tandem.core.config import AUTO, SpeculationConfig
from tandem.model.checkpoint.weights import Checkpoint, num_mtp
from tandem.model.drafters.base import Drafter
from tandem.model.drafters.merged import MergedDrafter
from tandem.model.drafters.none import NoDrafter
from tandem.model.drafters.user import UserDrafter
from tandem.model.network.cache import MTP
from tandem.model.network.deepseek import DeepseekV3

NONE, NGRAM = "none", "ngram"
MERGED, NOT_MERGED = f"{NGRAM}+", (NGRAM, "self")
Loader = Callable[[Checkpoint, DeepseekV3, SpeculationConfig], Drafter]
CLASSES = {
    MTP: "tandem.model.drafters.mtp:MtpDrafter",
    "medusa": "tandem.model.drafters.medusa:MedusaDrafter",
    NGRAM: "tandem.model.drafters.ngram:NgramDrafter",
    "eagle": "tandem.model.drafters.eagle:EagleDrafter",
    "eagle3": "tandem.model.drafters.eagle:Eagle3Drafter",
    "draft_model": "tandem.model.drafters.draft_model:ModelDrafter",
    "self": "tandem.model.drafters.sparse:SparseDrafter",
}
TREES = CLASSES | {
    MTP: "tandem.model.drafters.mtp_tree:MtpTreeDrafter",
    "eagle": "tandem.model.drafters.eagle:EagleTreeDrafter",
    "eagle3": "tandem.model.drafters.eagle:Eagle3TreeDrafter",
    "draft_model": "tandem.model.drafters.draft_model:ModelTreeDrafter",
}
MODULES = CLASSES | {MTP: "tandem.model.drafters.mtp_vanilla:VanillaDrafter"}
"""Whose ``load`` makes them of a checkpoint, its loaded main model, whose embedding and head they
may share, and what is asked of them: chains, trees, chains of several MTP layers."""


def create_drafter(
    asked: SpeculationConfig, checkpoint: Checkpoint, network: DeepseekV3
) -> Drafter:
    """The drafter asked for; auto is MTP where the checkpoint has it, else none.

    Raises ValueError for an unknown name or a class that is not there, for MTP on a checkpoint
    without that layer, for trees of who drafts chains, and for whatever is wrong with the drafter's
    weights.
    """
    num_layers = num_mtp(checkpoint.files, checkpoint.config)
    name = asked.drafter if asked.max_depth else NONE
    if name.startswith(MERGED):
        return _merged(asked, checkpoint, network)
    if name == AUTO:
        name = MTP if num_layers else NONE
    if name == NONE:
        return NoDrafter()
    if name == MTP and not num_layers:
        raise ValueError(
            "speculation.drafter: 'mtp' needs the MTP layer, which this checkpoint lacks; "
            "use 'auto' or 'none'"
        )
    chains = CLASSES if min(num_layers, asked.max_depth) < 2 else MODULES
    classes = chains if asked.max_tree_nodes is None else TREES
    drafter = _load(classes.get(name, name))(checkpoint, network, asked)
    if asked.max_tree_nodes is not None and drafter.levels(asked.max_depth)[-1].is_chain:
        raise ValueError(
            f"speculation.max_tree_nodes={asked.max_tree_nodes}: {drafter.name} drafts chains of "
            "speculation.max_depth; leave it null"
        )
    return drafter


def _merged(asked: SpeculationConfig, checkpoint: Checkpoint, network: DeepseekV3) -> MergedDrafter:
    """Chains of n-grams and of one other."""
    other = asked.drafter.removeprefix(MERGED)
    may = ", ".join(f"{MERGED}{name}" for name in CLASSES if name not in NOT_MERGED)
    if other in NOT_MERGED or other not in CLASSES:
        raise ValueError(f"speculation.drafter: {asked.drafter!r} cannot be merged; use {may}")
    if asked.max_tree_nodes is not None:
        raise ValueError(
            f"speculation.max_tree_nodes={asked.max_tree_nodes}: {asked.drafter} drafts two chains "
            "of speculation.max_depth; leave it null"
        )
    ngram, drafter = (
        create_drafter(asked.model_copy(update={"drafter": name}), checkpoint, network)
        for name in (NGRAM, other)
    )
    return MergedDrafter(ngram, drafter)


def _load(path: str) -> Loader:
    """Whatever a module of strangers raises is told."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
        is_plain = Drafter not in found.__mro__ and callable(found.draft)
        load: Loader = partial(UserDrafter.made_of, found) if is_plain else found.load
    except Exception as error:
        known = ", ".join((AUTO, *CLASSES, NONE))
        raise ValueError(
            f"speculation.drafter: {path!r} cannot be had ({error!r}); use {known}, or "
            "package.module:Class with a class that has draft(token_ids, num_drafts)"
        ) from error
    return load
