"""Every expert is here."""

from torch import Tensor

from model.dispatch.base import Collectives
from model.experts import Experts


class Local:
    """Padding is computed like everything else: it costs less than to leave it out."""

    pads = True
    why_eager = ""
    placement = None
    counts = True

    def __init__(self, num_experts: int) -> None:
        self._held = tuple(range(num_experts))

    def held(self, layer: int) -> tuple[int, ...]:
        return self._held

    def join(self, group: Collectives | None) -> None:
        assert group is None, "there is nobody to join"

    def sent(self) -> list[list[int]]:
        return []

    def computed(self) -> list[int]:
        return []

    def run(
        self, layer: int, experts: Experts, x_TD: Tensor, ids_TK: Tensor, real_T: Tensor | None
    ) -> Tensor:
        return experts(x_TD, None, ids_TK.flatten()).view(*ids_TK.shape, x_TD.shape[1])
