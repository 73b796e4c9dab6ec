"""What all ways of dispatch over several ranks share: where experts lie, what travels, and how.

Shape legend: T tokens of this rank, N tokens that came here, K experts per token, P (token,
expert) pairs computed here, D hidden, R ranks, L MoE layers, E experts, C most replicas of one.
"""

from itertools import zip_longest

import torch
from torch import Tensor

from tandem.core.placement import Placement
from tandem.model.network.dispatch.base import CollectiveGroup, Dispatch
from tandem.model.network.experts import Experts

PADDING_SLOT = -1
"""The slot of padding: no rank computes it."""


class ExpertParallelDispatch(Dispatch):
    """Experts lie as ``placement`` says; ``group`` belongs to the gang."""

    placement: Placement
    eager_reason = "tokens travel between ranks"

    def __init__(self, placement: Placement, rank: int, device: torch.device) -> None:
        self._group: CollectiveGroup | None = None
        self.num_slots = placement.slots_per_rank
        self.placement, self._rank = placement, rank
        tables = [
            _replicas(placement.expert_slots(layer)) for layer in range(len(placement.slot_experts))
        ]
        self._slots = [table.to(device) for table, _ in tables]
        self._num = [num.to(device) for _, num in tables]
        num_experts = len(placement.expert_slots(0))
        self._sent_LE = torch.zeros(len(tables), num_experts, dtype=torch.int64, device=device)
        self._computed_L = torch.zeros(len(tables), dtype=torch.int64, device=device)
        # On the device: what is captured in a graph must not be decided on the host.
        self._is_counting, self._is_counting_1 = (
            True,
            torch.ones(1, dtype=torch.int64, device=device),
        )

    @property
    def is_counting(self) -> bool:
        return self._is_counting

    @is_counting.setter
    def is_counting(self, value: bool) -> None:
        if value != self._is_counting:
            self._is_counting_1.fill_(int(value))
        self._is_counting = value

    def local_experts(self, layer: int) -> tuple[int, ...]:
        return self.placement.experts_of_rank(layer, self._rank)

    def set_group(self, group: CollectiveGroup | None) -> None:
        self._group = group

    def num_sent_rows(self) -> list[list[int]]:
        return self._sent_LE.tolist()

    def num_computed_rows(self) -> list[int]:
        return self._computed_L.tolist()

    @property
    def group(self) -> CollectiveGroup:
        assert self._group is not None, "no life of the gang has begun"
        return self._group

    def slots(self, layer: int, ids_TK: Tensor, real_T: Tensor | None) -> Tensor:
        """The slots [T, K] of chosen experts, NOWHERE for padding; replicas take turns."""
        turns_T1 = torch.arange(self._rank, self._rank + len(ids_TK), device=ids_TK.device)[:, None]
        slots_TK = self._slots[layer][ids_TK, turns_T1 % self._num[layer][ids_TK]]
        real_TK = torch.ones_like(ids_TK)
        if real_T is not None:
            slots_TK = slots_TK.where(real_T.unsqueeze(1), PADDING_SLOT)
            real_TK = real_T.unsqueeze(1).expand_as(ids_TK).long()
        counted_TK = real_TK * self._is_counting_1
        self._sent_LE[layer].scatter_add_(0, ids_TK.flatten(), counted_TK.flatten())
        return slots_TK

    def local_slots(self, layer: int, slots_NK: Tensor) -> Tensor:
        """Slots of this rank from 0 on, ``num_slots`` for those of others. The rows are counted."""
        mine_NK = slots_NK - self._rank * self.num_slots
        is_mine = (mine_NK >= 0) & (mine_NK < self.num_slots)
        self._computed_L[layer] += is_mine.sum() * self._is_counting_1[0]
        return mine_NK.where(is_mine, self.num_slots)

    def compute_and_return(
        self,
        layer: int,
        experts: Experts,
        payload_NB: Tensor,
        num_from_R: list[int],
        x_TD: Tensor,
        slots_TK: Tensor,
    ) -> Tensor:
        """What came here is computed and goes back to whom it came from, ``num_from_R`` tokens
        each: the outputs [T, K, D] for this rank's own tokens, zeros for padding.

        Both ends order pairs by token, then by place, so counts are all that has to be known, and
        these follow from the slots: the host waits for them.
        """
        x_ND, slots_NK = unpack_payload(payload_NB, x_TD, slots_TK.shape[1])
        local_NK = self.local_slots(layer, slots_NK)
        pairs_P = (local_NK < self.num_slots).flatten().nonzero().squeeze(1)
        tokens_P = pairs_P // slots_TK.shape[1]
        out_PD = experts(x_ND, tokens_P, local_NK.flatten()[pairs_P])
        num_back = [int((one < self.num_slots).sum()) for one in local_NK.split(num_from_R)]
        owner_of, order = (slots_TK // self.num_slots).flatten().sort(stable=True)
        order = order[owner_of >= 0]
        num_due = torch.bincount(owner_of[owner_of >= 0], minlength=len(num_from_R)).tolist()
        back_PD = self.group.all_to_all(out_PD, num_back, num_due)
        out = x_TD.new_zeros(slots_TK.numel(), x_TD.shape[1])
        return out.index_copy_(0, order, back_PD).view(*slots_TK.shape, x_TD.shape[1])


def pack_payload(x_TD: Tensor, slots_TK: Tensor) -> Tensor:
    """Tokens and where they go as bytes [T, B], so that both travel at once."""
    return torch.cat((x_TD.view(torch.uint8), slots_TK.int().view(torch.uint8)), 1)


def unpack_payload(
    payload_NB: Tensor, like_TD: Tensor, num_per_token: int
) -> tuple[Tensor, Tensor]:
    """Tokens [N, D] and slots [N, K]."""
    num_bytes = payload_NB.shape[1] - 4 * num_per_token
    x_NB, slots_NB = payload_NB.split([num_bytes, 4 * num_per_token], 1)
    slots_NK = slots_NB.contiguous().view(torch.int32).long()
    return x_NB.contiguous().view(like_TD.dtype), slots_NK


def _replicas(slots_of: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """Each expert's slots [E, C], filled up, and how many they are [E]."""
    table = torch.tensor(list(zip_longest(*slots_of, fillvalue=0))).T.contiguous()
    return table, torch.tensor([len(slots) for slots in slots_of])
