"""Muon optimizer for many small matrices.

Matrices of equal shape are orthogonalised as one batch, in fp32.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Orthogonalise matrices [N, rows, columns], rows <= columns, by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, scaled to AdamW's root mean square (0.2 lr).

    Parameters are matrices [rows, columns], or N separate matrices as [N, rows, columns].
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            batches: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(buffer, group["momentum"])
                rows, columns = weight.shape[-2:]
                key = (min(rows, columns), max(rows, columns))
                batches[key].append((weight, update.view(-1, rows, columns)))
            for shape, batch in batches.items():
                self._apply(group, shape, batch)

    def _apply(
        self, group: dict, shape: tuple[int, int], batch: list[tuple[Tensor, Tensor]]
    ) -> None:
        wide = [u if u.shape[1] == shape[0] else u.transpose(1, 2) for _, u in batch]
        result = orthogonalise(torch.cat(wide)).split([len(u) for u in wide])
        scale = 0.2 * max(shape) ** 0.5 * group["lr"]
        for (weight, update), part in zip(batch, result, strict=True):
            part = part if update.shape[1:] == part.shape[1:] else part.transpose(1, 2)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(part.reshape(weight.shape), alpha=scale)
