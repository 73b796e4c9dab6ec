"""Expert parallelism: how tokens reach the ranks that hold their experts, one method per file."""

import torch

from tandem.core.config import AUTO, RankConfig
from tandem.core.info import PREFILL
from tandem.core.placement import Placement
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.network.dispatch.all_gather import AllGatherDispatch
from tandem.model.network.dispatch.all_to_all import AllToAllDispatch
from tandem.model.network.dispatch.base import Dispatch

ALL_TO_ALL = "all_to_all"


def create_dispatch(
    config: ModelConfig, section: RankConfig, kind: str, rank: int, placement: Placement | None
) -> Dispatch:
    """Create the dispatch of one rank of a gang. Without ``placement``, experts are placed in the
    order of their ids.

    Raises ValueError if the experts cannot be spread evenly.
    """
    if section.dp_size == 1:
        return Dispatch(config.n_routed_experts)
    device = torch.device(section.device)
    way = section.dispatch
    placement = placement or Placement.in_order(
        num_layers=config.num_moe_layers,
        num_experts=config.n_routed_experts,
        num_ranks=section.dp_size,
        num_redundant=section.num_redundant_experts,
    )
    if way == ALL_TO_ALL or (way == AUTO and kind == PREFILL):
        return AllToAllDispatch(placement, rank, device)
    return AllGatherDispatch(placement, rank, device, is_static=device.type != "cpu")
