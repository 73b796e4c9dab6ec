"""Dispatch by all-gather: every rank receives all tokens and sends back its experts' outputs.

Takes two collectives per layer. With few ranks most ranks hold an expert of each token anyway.
Every rank knows the tokens of all others, so no counts have to be exchanged.
Shape legend: T tokens of each rank, N = R * T, K experts per token, D hidden, R ranks.
"""

import torch
from torch import Tensor

from tandem.core.placement import Placement
from tandem.model.network.dispatch.expert_parallel import (
    ExpertParallelDispatch,
    pack_payload,
    unpack_payload,
)
from tandem.model.network.experts import Experts


class AllGatherDispatch(ExpertParallelDispatch):
    """Dispatch by all-gather.

    With ``is_static``, every rank returns K outputs for each token, computed or not. Then no shape
    depends on the routing and the host never waits, as CUDA graphs require. Otherwise ranks return
    only the outputs that they computed.
    """

    def __init__(
        self, placement: Placement, rank: int, device: torch.device, is_static: bool
    ) -> None:
        super().__init__(placement, rank, device)
        self._is_static = is_static
        if is_static:
            self.eager_reason = ""

    def run_experts(
        self, layer: int, experts: Experts, x_TD: Tensor, ids_TK: Tensor, real_T: Tensor | None
    ) -> Tensor:
        slots_TK = self.slots(layer, ids_TK, real_T)
        payload_NB = self.group.all_gather(pack_payload(x_TD, slots_TK)).flatten(0, 1)
        if self._is_static:
            return self._static(
                layer=layer, experts=experts, payload_NB=payload_NB, x_TD=x_TD, slots_TK=slots_TK
            )
        num_from_R = [len(x_TD)] * self.group.num_ranks
        return self.compute_and_return(
            layer=layer,
            experts=experts,
            payload_NB=payload_NB,
            num_from_R=num_from_R,
            x_TD=x_TD,
            slots_TK=slots_TK,
        )

    def _static(
        self, layer: int, experts: Experts, payload_NB: Tensor, x_TD: Tensor, slots_TK: Tensor
    ) -> Tensor:
        num_tokens, num_per_token = slots_TK.shape
        x_ND, slots_NK = unpack_payload(payload_NB, x_TD, num_per_token)
        slots_P = self.local_slots(layer, slots_NK).flatten()
        out_PD = experts(x_ND, None, slots_P, self.group.num_ranks)
        back = self.group.all_to_all(out_PD).view(-1, num_tokens * num_per_token, x_TD.shape[1])
        owner_Q = (slots_TK // self.num_slots).flatten()
        out_QD = back[owner_Q.clamp(min=0), torch.arange(len(owner_Q), device=x_TD.device)]
        # Outputs of padding are uninitialised memory.
        out_QD = out_QD.where((owner_Q >= 0).unsqueeze(1), 0)
        return out_QD.view(*slots_TK.shape, x_TD.shape[1])
