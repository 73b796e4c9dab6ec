"""Online softmax over tiles of slots (arXiv:1805.02867), with the weighted sum of values.

Shape legend: M queries, S slots of a tile, V value width.
"""

import triton
import triton.language as tl


@triton.jit
def weighed(score_MS, v_SV, top_M, sum_M, out_MV):
    """Add a tile to the softmax state of each query.

    The state is the largest score (base 2), the sum of weights, and the weighted sum of values.
    Slots that a query does not see have the score -inf.
    """
    new_top_M = tl.maximum(top_M, tl.max(score_MS, 1))
    # A query that has seen nothing yet must not subtract infinities.
    safe_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    p_MS = tl.exp2(score_MS - safe_M[:, None])
    kept_M = tl.exp2(top_M - safe_M)
    sum_M = sum_M * kept_M + tl.sum(p_MS, 1)
    out_MV = tl.dot(p_MS.to(v_SV.dtype), v_SV, out_MV * kept_M[:, None], input_precision="ieee")
    return new_top_M, sum_M, out_MV


@triton.jit
def seen(slot_S, len_M, bits_M, IS_TREE: tl.constexpr):
    """Return whether each query sees each slot.

    A query sees its context. In a tree it also sees those of the next 64 slots whose bits are set.
    """
    is_seen_MS = slot_S[None, :] < len_M[:, None]
    if IS_TREE:
        node_MS = slot_S[None, :] - len_M[:, None]
        is_node_MS = (node_MS >= 0) & (node_MS < 64)
        bit_MS = (bits_M[:, None] >> tl.where(is_node_MS, node_MS, 0)) & 1
        is_seen_MS = is_seen_MS | (is_node_MS & (bit_MS == 1))
    return is_seen_MS


@triton.jit
def only_seen(score_MS, v_SV, is_seen_MS):
    """Return scores and values of a tile, without non-finite values in hidden slots.

    A weight of 0 does not hide a non-finite value. Such values become 0, and queries that see their
    slot get the score NaN.
    """
    is_number_SV = tl.abs(v_SV.to(tl.float32)) < float("inf")
    is_broken_S = tl.min(is_number_SV.to(tl.int32), 1) == 0
    score_MS = tl.where(is_seen_MS & is_broken_S[None, :], float("nan"), score_MS)
    return score_MS, tl.where(is_number_SV, v_SV, 0.0)
