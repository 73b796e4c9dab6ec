"""The usual model of speculative decoding, beside which the measurement is printed.

Each draft is accepted with probability ``a`` if those before it were; drafting one token more
makes a step longer by ``c`` steps without drafts (drafting it and verifying it together). Then
a step of ``n`` drafts gives ``E = (1 - a^(n+1)) / (1 - a)`` tokens and the speed-up is
``E / (n c + 1)``. Where drafts are trees ``n`` is the depth in E and the number of nodes beside c.
"""


def expected_length(acceptance: float, num_drafts: int) -> float:
    """Tokens per step."""
    return sum(acceptance**i for i in range(num_drafts + 1))


def speedup(
    acceptance: float, num_drafts: int, cost_ratio: float, num_nodes: float | None = None
) -> float:
    """Of time per token, over a step without drafts."""
    num_paid = num_drafts if num_nodes is None else num_nodes
    return expected_length(acceptance, num_drafts) / (num_paid * cost_ratio + 1)


def operations(
    acceptance: float, num_drafts: int, draft_flops_ratio: float, num_nodes: float
) -> float:
    """Of a token, over those without drafts: a draft takes ``draft_flops_ratio`` of what the model
    takes for a token, and the model's for each draft and the last token (seeds 003). Reads of
    weights and cache fall by ``expected_length``."""
    paid = num_nodes * (draft_flops_ratio + 1) + 1
    return paid / expected_length(acceptance, num_drafts)


def fitted_acceptance(accepted_length: float, num_drafts: int) -> float | None:
    """The ``a`` of which ``expected_length`` is ``accepted_length``; None without drafts.

    Lengths that no ``a`` gives (below 1, above ``num_drafts + 1``) take the nearest.
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
    """``c`` from the mean step with ``num_drafts`` drafts and the mean step without any."""
    return (step_ms / step_ms_without - 1) / num_drafts
