"""The usual model of speculative decoding, which reports compare with the measurement.

Each draft is accepted with probability ``a`` if all drafts before it were accepted. Drafting and
verifying one draft takes ``c`` times as long as a step without drafts. A step of ``n`` drafts then
yields ``E = (1 - a^(n+1)) / (1 - a)`` tokens, and the speed-up is ``E / (n c + 1)``. For draft
trees, ``n`` is the depth in ``E`` and the number of nodes in ``n c``.
"""


def expected_length(acceptance: float, num_drafts: int) -> float:
    """Return the expected tokens per step, ``E``."""
    return sum(acceptance**i for i in range(num_drafts + 1))


def speedup(
    acceptance: float, num_drafts: int, cost_ratio: float, num_nodes: float | None = None
) -> float:
    """Return the factor by which drafts reduce the time per token.

    ``num_nodes`` is the number of drafts per step if they form a tree; None for chains.
    """
    num_paid = num_drafts if num_nodes is None else num_nodes
    return expected_length(acceptance, num_drafts) / (num_paid * cost_ratio + 1)


def operations(
    acceptance: float, num_drafts: int, draft_flops_ratio: float, num_nodes: float
) -> float:
    """Return the FLOPs per output token, divided by those without drafts.

    Args:
        acceptance: Probability ``a`` that a draft is accepted.
        num_drafts: Depth of the drafts.
        draft_flops_ratio: FLOPs of one draft token divided by FLOPs of one main-model token.
        num_nodes: Number of drafts per step. The main model verifies them and computes one more
            token.
    """
    paid = num_nodes * (draft_flops_ratio + 1) + 1
    return paid / expected_length(acceptance, num_drafts)


def fitted_acceptance(accepted_length: float, num_drafts: int) -> float | None:
    """Return the acceptance probability ``a`` that gives ``accepted_length`` tokens per step.

    Lengths below 1 or above ``num_drafts + 1`` give the nearest possible ``a``. None without
    drafts.
    """
    if num_drafts == 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_length(middle, num_drafts) < accepted_length:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 12)


def cost_ratio(step_ms: float, step_ms_without: float, num_drafts: float) -> float:
    """Return ``c``, the cost of one draft divided by the time of a step without drafts.

    Args:
        step_ms: Mean time of a step with ``num_drafts`` drafts.
        step_ms_without: Mean time of a step without drafts.
        num_drafts: Number of drafts per step.
    """
    return (step_ms / step_ms_without - 1) / num_drafts
