"""MoE gate: logits of few tokens, and the choice of experts.

Shape legend: T tokens, D hidden, S parts of it, E experts, G groups, N experts of a group, K chosen
experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import Routing

FEW_TOKENS_MAX = 64
"""Maximum number of tokens for which the gate product is split along D to occupy the device."""
MIN_VALUES = 256
"""Number of values of D in a part, doubled if D is large. A program loads up to this number at
once."""


def logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return the partial logits of few tokens, one for each part of D: [S, T, E] fp32."""
    (num_tokens, dim), num_experts = x_TD.shape, len(weight_ED)
    width = MIN_VALUES * (1 if dim < 16 * MIN_VALUES else 2)
    num_parts = triton.cdiv(dim, width)
    block_t = 16 if num_tokens <= 16 else 32
    out_STE = torch.empty(num_parts, num_tokens, num_experts, device=x_TD.device)
    _logits[(triton.cdiv(num_experts, 16), triton.cdiv(num_tokens, block_t), num_parts)](
        *(x_TD, weight_ED, out_STE, num_tokens, x_TD.stride(0)),
        E=num_experts,
        D=dim,
        WIDTH=width,
        BLOCK_T=block_t,
        BLOCK_K=32 if x_TD.dtype == torch.float32 else MIN_VALUES,
    )
    return out_STE


def choose(logits_STE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Sum partial logits over S and choose experts (see ``Kernels.route``).

    Returns expert ids [T, K] int64, best first and the lowest of equals first, and fp32 weights.
    """
    num_experts, num_groups, num_kept, num_chosen = routing.sizes
    (num_parts, num_tokens, _), per_group = logits_STE.shape, num_experts // num_groups
    ids_TK = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits_STE.device)
    weights_TK = torch.empty_like(ids_TK, dtype=torch.float32)
    _choose[(num_tokens,)](
        *(logits_STE, logits_STE if bias_E is None else bias_E, ids_TK, weights_TK),
        *(routing.masked_score, routing.factor, num_tokens),
        NUM_PARTS=num_parts,
        E=num_experts,
        G=num_groups,
        NUM_KEPT=num_kept,
        K=num_chosen,
        SIGMOID=routing.uses_sigmoid,
        BY_TWO=routing.sums_top_two and per_group > 1,
        NORMALISED=routing.is_normalised,
        HAS_BIAS=bias_E is not None,
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_N=triton.next_power_of_2(per_group),
        BLOCK_K=triton.next_power_of_2(num_chosen),
        num_warps=1,
    )
    return ids_TK, weights_TK


@triton.jit
def _logits(
    x,
    w,
    out,
    num_tokens,
    x_row,
    E: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    e_E = tl.program_id(0) * 16 + tl.arange(0, 16)
    part = tl.program_id(2)
    t_T = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k_K = tl.arange(0, BLOCK_K)
    is_t = (t_T < num_tokens)[:, None]
    is_e = (e_E < E)[:, None]
    sum_TE = tl.zeros([BLOCK_T, 16], tl.float32)
    for i in range(0, WIDTH, BLOCK_K):
        at_K = part * WIDTH + i + k_K
        is_k = (at_K < D)[None, :]
        x_TK = tl.load(x + t_T[:, None] * x_row + at_K[None, :], mask=is_t & is_k, other=0.0)
        w_EK = tl.load(w + e_E[:, None] * D + at_K[None, :], mask=is_e & is_k, other=0.0)
        sum_TE = tl.dot(x_TK, tl.trans(w_EK), sum_TE, input_precision="ieee")
    to_TE = out + (part * num_tokens + t_T[:, None]) * E + e_E[None, :]
    tl.store(to_TE, sum_TE, mask=is_t & (e_E < E)[None, :])


@triton.jit
def _choose(
    logits,
    bias,
    ids,
    weights,
    filler,
    factor,
    num_tokens,
    NUM_PARTS: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BY_TWO: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    N: tl.constexpr = E // G
    NUM_PLACES: tl.constexpr = BLOCK_G * BLOCK_N
    low = float("-inf")
    token = tl.program_id(0).to(tl.int64)
    g_G = tl.arange(0, BLOCK_G)
    n_N = tl.arange(0, BLOCK_N)
    id_GN = g_G[:, None] * N + n_N[None, :]
    is_GN = (g_G < G)[:, None] & (n_N < N)[None, :]
    logit_GN = tl.load(logits + token * E + id_GN, mask=is_GN, other=low)
    for part in tl.static_range(1, NUM_PARTS):
        more = logits + (part * num_tokens + token) * E
        logit_GN += tl.load(more + id_GN, mask=is_GN, other=0.0)
    if SIGMOID:
        score_GN = tl.sigmoid(logit_GN)
    else:
        score_GN = tl.exp(logit_GN - tl.max(tl.max(logit_GN, 1), 0))
        score_GN = score_GN / tl.sum(tl.sum(score_GN, 1), 0)
    chosen_GN = score_GN
    if HAS_BIAS:
        chosen_GN += tl.load(bias + id_GN, mask=is_GN, other=0.0)
    # NaN is chosen last, and its id is still a valid expert.
    chosen_GN = tl.where(chosen_GN == chosen_GN, chosen_GN, -1e30)
    chosen_GN = tl.where(is_GN, chosen_GN, low)
    if G > 1:
        group_G = tl.max(chosen_GN, 1)
        if BY_TWO:
            best_G = tl.argmax(chosen_GN, 1)
            group_G += tl.max(tl.where(n_N[None, :] == best_G[:, None], low, chosen_GN), 1)
        group_G = tl.where(g_G < G, group_G, low)
        is_kept_G = g_G < 0
        for _ in tl.static_range(NUM_KEPT):
            is_best_G = g_G == tl.argmax(group_G, 0)
            is_kept_G = is_kept_G | is_best_G
            group_G = tl.where(is_best_G, low, group_G)
        chosen_GN = tl.where(is_kept_G[:, None], chosen_GN, filler)
        chosen_GN = tl.where(is_GN, chosen_GN, low)

    chosen = tl.reshape(chosen_GN, [NUM_PLACES])
    scores = tl.reshape(score_GN, [NUM_PLACES])
    places = tl.arange(0, NUM_PLACES)
    k_K = tl.arange(0, BLOCK_K)
    weight_K = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(chosen, 0)
        weight = tl.sum(tl.where(places == best, scores, 0.0), 0)
        weight_K = tl.where(k_K == k, weight, weight_K)
        tl.store(ids + token * K + k, (best // BLOCK_N * N + best % BLOCK_N).to(tl.int64))
        chosen = tl.where(places == best, low, chosen)
    if NORMALISED:
        weight_K = weight_K / (tl.sum(weight_K, 0) + 1e-20)
    tl.store(weights + token * K + k_K, weight_K * factor, mask=k_K < K)
