"""Drafters by name, and user-defined drafters by the path of their class."""

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

NONE = "none"
NGRAM = "ngram"
MERGED_PREFIX = f"{NGRAM}+"
NOT_MERGEABLE = (NGRAM, "self")
Loader = Callable[[Checkpoint, DeepseekV3, SpeculationConfig], Drafter]
"""Function that creates a drafter from a checkpoint, its loaded main model and the speculation
settings. The drafter may share the main model's embedding and head."""
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
"""CHAIN_DRAFTERS, TREE_DRAFTERS and MULTI_LAYER_DRAFTERS map a drafter's name to its
``module:Class``. The last one is for chains if two or more MTP layers are used."""


def create_drafter(
    spec_config: SpeculationConfig, checkpoint: Checkpoint, network: DeepseekV3
) -> Drafter:
    """Create the drafter that ``speculation.drafter`` names. The name auto stands for MTP if the
    checkpoint has an MTP layer, otherwise for none.

    Raises:
        ValueError: The name is unknown, the class cannot be imported, or the drafter's weights are
            missing or unusable. Also if trees are configured for a drafter that supports only
            chains.
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
            "chains, not trees; set max_tree_nodes to null"
        )
    return drafter


def _create_merged(
    spec_config: SpeculationConfig, checkpoint: Checkpoint, network: DeepseekV3
) -> MergedDrafter:
    """Create a drafter that merges the draft chains of the n-gram drafter and of another
    drafter."""
    other = spec_config.drafter.removeprefix(MERGED_PREFIX)
    may = ", ".join(
        f"{MERGED_PREFIX}{name}" for name in CHAIN_DRAFTERS if name not in NOT_MERGEABLE
    )
    if other in NOT_MERGEABLE or other not in CHAIN_DRAFTERS:
        raise ValueError(
            f"speculation.drafter: {spec_config.drafter!r} cannot be merged with the n-gram "
            f"drafter; use one of {may}"
        )
    if spec_config.max_tree_nodes is not None:
        raise ValueError(
            f"speculation.max_tree_nodes={spec_config.max_tree_nodes}: {spec_config.drafter} "
            "drafts two chains, not trees; set max_tree_nodes to null"
        )
    ngram, drafter = (
        create_drafter(spec_config.model_copy(update={"drafter": name}), checkpoint, network)
        for name in (NGRAM, other)
    )
    return MergedDrafter(ngram, drafter)


def _load(path: str) -> Loader:
    """Return the function that creates the drafter at ``path``.

    A class that is not a ``Drafter`` but has a method ``draft`` is wrapped in a ``UserDrafter``.
    Raises ValueError if the class cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
        is_plain = Drafter not in found.__mro__ and callable(found.draft)
        load: Loader = partial(UserDrafter.create, found) if is_plain else found.load
    except Exception as error:
        known = ", ".join((AUTO, *CHAIN_DRAFTERS, NONE))
        raise ValueError(
            f"speculation.drafter: {path!r} cannot be loaded ({error!r}); use {known}, or "
            "package.module:Class with a class that has draft(token_ids, num_drafts)"
        ) from error
    return load
