"""Drafters by name, each in a file of its own, or anybody's by the path of its class."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from tandem.core.config import AUTO, SpeculationConfig
from tandem.model.checkpoint.weights import Checkpoint, num_mtp_layers
from tandem.model.drafters.base import Drafter
from tandem.model.drafters.merged import MergedDrafter
from tandem.model.drafters.none import NoDrafter
from tandem.model.drafters.user import UserDrafter
from tandem.model.network.cache import MTP
from tandem.model.network.deepseek import DeepseekV3

NONE, NGRAM = "none", "ngram"
MERGED_PREFIX, NOT_MERGEABLE = f"{NGRAM}+", (NGRAM, "self")
Loader = Callable[[Checkpoint, DeepseekV3, SpeculationConfig], Drafter]
CHAIN_DRAFTERS = {
    MTP: "tandem.model.drafters.mtp:MtpDrafter",
    "medusa": "tandem.model.drafters.medusa:MedusaDrafter",
    NGRAM: "tandem.model.drafters.ngram:NgramDrafter",
    "eagle": "tandem.model.drafters.eagle:EagleDrafter",
    "eagle3": "tandem.model.drafters.eagle:Eagle3Drafter",
    "draft_model": "tandem.model.drafters.draft_model:ModelDrafter",
    "self": "tandem.model.drafters.sparse:SparseDrafter",
}
TREE_DRAFTERS = CHAIN_DRAFTERS | {
    MTP: "tandem.model.drafters.mtp_tree:MtpTreeDrafter",
    "eagle": "tandem.model.drafters.eagle:EagleTreeDrafter",
    "eagle3": "tandem.model.drafters.eagle:Eagle3TreeDrafter",
    "draft_model": "tandem.model.drafters.draft_model:ModelTreeDrafter",
}
MULTI_LAYER_DRAFTERS = CHAIN_DRAFTERS | {MTP: "tandem.model.drafters.mtp_vanilla:VanillaDrafter"}
"""Whose ``load`` makes them of a checkpoint, its loaded main model, whose embedding and head they
may share, and what is asked of them: chains, trees, chains of several MTP layers."""


def create_drafter(
    spec_config: SpeculationConfig, checkpoint: Checkpoint, network: DeepseekV3
) -> Drafter:
    """The drafter asked for; auto is MTP where the checkpoint has it, else none.

    Raises ValueError for an unknown name or a class that is not there, for MTP on a checkpoint
    without that layer, for trees of who drafts chains, and for whatever is wrong with the drafter's
    weights.
    """
    num_layers = num_mtp_layers(checkpoint.files, checkpoint.config)
    name = spec_config.drafter if spec_config.max_depth else NONE
    if name.startswith(MERGED_PREFIX):
        return _create_merged(spec_config, checkpoint, network)
    if name == AUTO:
        name = MTP if num_layers else NONE
    if name == NONE:
        return NoDrafter()
    if name == MTP and not num_layers:
        raise ValueError(
            "speculation.drafter: 'mtp' needs the MTP layer, which this checkpoint lacks; "
            "use 'auto' or 'none'"
        )
    chains = CHAIN_DRAFTERS if min(num_layers, spec_config.max_depth) < 2 else MULTI_LAYER_DRAFTERS
    classes = chains if spec_config.max_tree_nodes is None else TREE_DRAFTERS
    drafter = _load(classes.get(name, name))(checkpoint, network, spec_config)
    if (
        spec_config.max_tree_nodes is not None
        and drafter.draft_shapes(spec_config.max_depth)[-1].is_chain
    ):
        raise ValueError(
            f"speculation.max_tree_nodes={spec_config.max_tree_nodes}: {drafter.name} drafts "
            "chains of speculation.max_depth; leave it null"
        )
    return drafter


def _create_merged(
    spec_config: SpeculationConfig, checkpoint: Checkpoint, network: DeepseekV3
) -> MergedDrafter:
    """Chains of n-grams and of one other."""
    other = spec_config.drafter.removeprefix(MERGED_PREFIX)
    may = ", ".join(
        f"{MERGED_PREFIX}{name}" for name in CHAIN_DRAFTERS if name not in NOT_MERGEABLE
    )
    if other in NOT_MERGEABLE or other not in CHAIN_DRAFTERS:
        raise ValueError(
            f"speculation.drafter: {spec_config.drafter!r} cannot be merged; use {may}"
        )
    if spec_config.max_tree_nodes is not None:
        raise ValueError(
            f"speculation.max_tree_nodes={spec_config.max_tree_nodes}: {spec_config.drafter} "
            "drafts two chains of speculation.max_depth; leave it null"
        )
    ngram, drafter = (
        create_drafter(spec_config.model_copy(update={"drafter": name}), checkpoint, network)
        for name in (NGRAM, other)
    )
    return MergedDrafter(ngram, drafter)


def _load(path: str) -> Loader:
    """Whatever a module of strangers raises is told."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
        is_plain = Drafter not in found.__mro__ and callable(found.draft)
        load: Loader = partial(UserDrafter.create, found) if is_plain else found.load
    except Exception as error:
        known = ", ".join((AUTO, *CHAIN_DRAFTERS, NONE))
        raise ValueError(
            f"speculation.drafter: {path!r} cannot be had ({error!r}); use {known}, or "
            "package.module:Class with a class that has draft(token_ids, num_drafts)"
        ) from error
    return load
