"""What a step computes on a device, apart from how. Here in terms of torch, for any device and to
measure others by; they override what they do better, in a file each.

Weights are packed once after they were loaded. Products, norms and attention sum in fp32, and what
they give has the type of their input unless it says otherwise.
Shape legend: X rows (of all sequences), B sequences, Q query rows of each, D hidden, H heads,
K query width of a head, C latent width, R rotary width, L = C + R, V value width, N tokens,
P (token, expert) pairs, S slots of experts, F their width, T tokens, E experts, M outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.execution import EAGER
from tandem.model.kernels.replayable import Eager, Function, ReplayableFunction
from tandem.model.network.batch import Segments, gather_pages, visible_slots
from tandem.model.sampling.sampler import Sampler

RopeCosSin = tuple[Tensor, Tensor]
"""Cosines and sines of each row's position: [X, R / 2] fp32 each."""
BranchOutput = Any
"""What is added to rows [X, D]; some give it in parts (Kernels.combine)."""


BLOCK = 128


class Fp8BlockWeight(NamedTuple):
    """FP8 matrices [S, M, K] or one [M, K], with a factor for each BLOCK x BLOCK of their values
    (spec §6): scales [S, ceil(M / BLOCK), ceil(K / BLOCK)], where gate and up rows have blocks of
    their own."""

    values: Tensor
    scales: Tensor


Weights = Tensor | Fp8BlockWeight


class Routing(NamedTuple):
    """How a gate chooses among E experts (spec §4). ``sizes`` are E, groups, groups kept, experts
    chosen. A group scores by its ``by_two`` best experts, or by its best; experts of other groups
    score ``filler``."""

    sizes: tuple[int, int, int, int]
    uses_sigmoid: bool
    sums_top_two: bool
    is_normalised: bool
    masked_score: float
    factor: float


class AttentionMetadata(NamedTuple):
    """What all forms of a layer's attention have in common in one pass: angles of its rows, whether
    pairs of what is rotated are interleaved, the cache [pages, page size, L] and the factor of
    scores. The table is [B, P], or [1, P] of one segment's pages after the other's. With
    ``bits_BQ`` rows of sequences are nodes of trees (Batch)."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    cache: Tensor
    page_table_BP: Tensor
    scale: float
    bits_BQ: Tensor | None = None


class Kernels(Sampler):
    """Those of torch. Weights stay as they are."""

    name = "torch"
    exec_mode = EAGER
    """In which functions are called again and again."""

    ngram_lookup: ClassVar[Callable[..., tuple[Tensor, Tensor]] | None] = None
    """Of n-grams, where it was written for the device (model/drafters/ngram.py: continued)."""

    fallback_reason = ""
    """Why these were taken where faster ones ought to be had."""

    dim_multiple = 1
    """Heads and latents have a multiple of so many values."""

    owns_outputs = False
    """What a repeated function returns is memory that it keeps."""

    supports_fp8_blocks = False
    """Matrices can stay the FP8 blocks of their checkpoint."""

    reads_paged_cache = False
    """Attention reads pages where they lie, so wide page tables cost nothing."""

    copy_rows: Callable[[Sequence[Tensor], Tensor, Tensor, bool], None] | None = None
    """Entries of all layers into staging, or from it (kv_transfer/caches.py), if these can."""

    def use_threads(self, num_threads: int) -> None:
        """What this process computes on its CPU is computed by so many, from now on."""
        torch.set_num_threads(num_threads)

    def compile_s(self) -> float:
        """How long kernels have been compiled so far, this moment included; any thread."""
        return 0.0

    def make_replayable(self, function: Function) -> ReplayableFunction:
        """``function`` in that form, for inputs of the shapes that it meets first. What it returns
        may be overwritten by the next call of any, in the order of the device."""
        return Eager(function)

    def run_concurrently(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Begin ``work``, which may run beside what is called from now on; what is returned waits
        for its result, on the device, and is called before anything that ``work`` reads is gone."""
        result = work()
        return lambda: result

    def pack(self, weight: Any) -> Any:
        """Matrices [..., M, K] as ``linear`` and others read them; Blocks if these can be read."""
        return weight

    def pack_experts(self, gate_up: Any, down: Any) -> tuple[Weights, Weights]:
        """Of [S, 2F, D], gate rows first, and [S, D, F]; Blocks if these can be read."""
        return gate_up, down

    def linear(self, x_XK: Tensor, packed: Any, num_out: int, in_fp32: bool = False) -> Tensor:
        """x times a matrix [M, K]: [X, M]."""
        y = F.linear(x_XK, packed)
        return y.float() if in_fp32 else y

    def rms_norm(self, x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalised in fp32, cast to the input's dtype, then scaled (spec §3, HF order). Rows may
        lie apart."""
        return weight_D * F.rms_norm(x_XD.float(), weight_D.shape, eps=eps).to(x_XD.dtype)

    def add_rms_norm(
        self, x_XD: Tensor, branch: BranchOutput, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of both, and its norm."""
        x_XD = x_XD + branch
        return x_XD, self.rms_norm(x_XD, weight_D, eps)

    def write_mla_cache(
        self, kv_XL: Tensor, weight_C: Tensor, eps: float, attn: AttentionMetadata, slots_X: Tensor
    ) -> None:
        """Write [normed latent, rotated key] of each row at its physical slot of the cache."""
        latent, pe = kv_XL.split([len(weight_C), kv_XL.shape[1] - len(weight_C)], -1)
        latent = self.rms_norm(latent, weight_C, eps)
        pe = rotate(pe, (attn.cos, attn.sin), attn.is_interleaved)
        attn.cache.flatten(0, 1)[slots_X] = torch.cat((latent, pe), -1)

    def mla_attend(
        self,
        q_XHK: Tensor,
        up_k: Tensor,
        up_v: Tensor,
        attn: AttentionMetadata,
        context_lens_BQ: Tensor,
    ) -> Tensor:
        """Attention over each sequence's pages in latent space (spec §3, absorbed form): [X, H, V].

        The first K - R values of queries go through their head's packed [C, K - R], the others are
        rotated; what was attended to goes through packed [V, C]. Here over a copy of the pages, of
        shapes that depend on the page table's width alone.
        """
        nope, pe = q_XHK.split([up_k.shape[2], q_XHK.shape[2] - up_k.shape[2]], -1)
        latent = torch.bmm(nope.transpose(0, 1), up_k.transpose(1, 2)).transpose(0, 1)
        pe = _rotate_heads(pe, attn)
        num_seqs, num_q = context_lens_BQ.shape
        q_BXL = torch.cat((latent, pe), -1).view(num_seqs, -1, attn.cache.shape[-1])
        context_BSL, broken_BS = zero_non_finite(gather_pages(attn.cache, attn.page_table_BP))
        scores = torch.bmm(q_BXL, context_BSL.transpose(1, 2)).float() * attn.scale
        hidden_BQS = ~visible_slots(context_lens_BQ, context_BSL.shape[1], attn.bits_BQ)
        scores_BQHS = scores.unflatten(1, (num_q, -1))
        scores_BQHS = scores_BQHS.masked_fill(broken_BS[:, None, None], float("nan"))
        scores_BQHS = scores_BQHS.masked_fill(hidden_BQS.unsqueeze(2), float("-inf"))
        p_BXS = scores_BQHS.softmax(-1).to(context_BSL.dtype).flatten(1, 2)
        o_XHC = torch.bmm(p_BXS, context_BSL[..., : up_v.shape[2]]).view(*latent.shape)
        return torch.bmm(o_XHC.transpose(0, 1), up_v.transpose(1, 2)).transpose(0, 1)

    def write_gqa_cache(self, kv_XL: Tensor, attn: AttentionMetadata, slots_X: Tensor) -> None:
        """Write [rotated keys, values] of each row's heads at its physical slot of the cache."""
        keys, values = kv_XL.chunk(2, -1)
        keys = _rotate_heads(keys.unflatten(1, (-1, 2 * attn.cos.shape[1])), attn).flatten(1)
        attn.cache.flatten(0, 1)[slots_X] = torch.cat((keys, values), -1)

    def gqa_attend(self, q_XHK: Tensor, attn: AttentionMetadata, context_lens_BQ: Tensor) -> Tensor:
        """Attention over each sequence's pages, whose entries are keys and values of G heads [2, G,
        K]; as many heads of queries, which are rotated here, share each: [X, H, K]."""
        num_q, width = context_lens_BQ.shape[1], q_XHK.shape[2]
        context_BSL, broken_BS = zero_non_finite(gather_pages(attn.cache, attn.page_table_BP))
        context = context_BSL.unflatten(-1, (2, -1, width))
        k_BGSK, v_BGSK = (one.transpose(1, 2) for one in context.unbind(2))
        num_groups, num_slots = k_BGSK.shape[1:3]
        q_BQGRK = _rotate_heads(q_XHK, attn).view(
            -1, num_q, num_groups, q_XHK.shape[1] // num_groups, width
        )
        q_BGNK = q_BQGRK.transpose(1, 2).flatten(2, 3)
        scores_BGNS = (q_BGNK @ k_BGSK.transpose(2, 3)).float() * attn.scale
        hidden_BQS = ~visible_slots(context_lens_BQ, num_slots, attn.bits_BQ)
        scores = scores_BGNS.unflatten(2, (num_q, -1))
        scores = scores.masked_fill(broken_BS[:, None, None, None], float("nan"))
        scores = scores.masked_fill(hidden_BQS[:, None, :, None], float("-inf"))
        o_BGNK = scores.softmax(-1).to(v_BGSK.dtype).flatten(2, 3) @ v_BGSK
        return o_BGNK.unflatten(2, (num_q, -1)).transpose(1, 2).reshape(*q_XHK.shape)

    def copy_slots(self, caches: Sequence[Tensor], from_BN: Tensor, to_BN: Tensor) -> None:
        """In all of ``caches`` put what lies at some physical slots at others. No move of a row
        writes what a later one reads, and rows share no slots but the dummy page's."""
        for cache in caches:
            slots = cache.flatten(0, 1)
            slots[to_BN] = slots[from_BN]

    def mla_prefill(
        self,
        q_THK: Tensor,
        kv_b: Tensor,
        attn: AttentionMetadata,
        segments: Segments,
        num_values: int,
    ) -> Tensor:
        """Attention of packed segments over their own contexts, zeros for padding: [T, H, V]. Keys
        and values of every head are rebuilt from the latents by packed [H, N + V, C]: fewest flops
        for many rows. Values are padded to the width of keys, or fused kernels refuse."""
        from torch.nn.attention.bias import causal_lower_right  # brings torch._dynamo: 2 s

        page_size, num_heads = attn.cache.shape[1], q_THK.shape[1]
        nope, pe = q_THK.split([kv_b.shape[1] - num_values, 2 * attn.cos.shape[1]], -1)
        q_HTK = torch.cat((nope, _rotate_heads(pe, attn)), -1).transpose(0, 1)
        latent_SL, broken_S = zero_non_finite(gather_pages(attn.cache, attn.page_table_BP)[0])
        c_SC, k_pe_SR = latent_SL.split([kv_b.shape[2], pe.shape[2]], 1)
        k_HSN, v_HSV = torch.matmul(c_SC, kv_b.transpose(1, 2)).split(
            [nope.shape[2], num_values], 2
        )
        k_HSK = torch.cat((k_HSN, k_pe_SR.expand(num_heads, -1, -1)), -1)
        v_HSK = F.pad(v_HSV, (0, max(0, k_HSK.shape[2] - num_values)))
        out_HTV, row, slot = q_HTK.new_zeros(*q_HTK.shape[:2], num_values), 0, 0
        for num, context in zip(segments.lengths, segments.contexts, strict=True):
            rows, slots = slice(row, row + num), slice(slot, slot + context)
            q, k, v = (x[None] for x in (q_HTK[:, rows], k_HSK[:, slots], v_HSK[:, slots]))
            seen = causal_lower_right(num, context)
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=attn.scale)
            spoilt_T1 = broken_S[slots].cumsum(0)[-num:, None] > 0
            out_HTV[:, rows] = out[0, ..., :num_values].masked_fill(spoilt_T1, float("nan"))
            row, slot = row + num, slot + -(-context // page_size) * page_size
        return out_HTV.transpose(0, 1)

    def fused_experts(
        self,
        x_ND: Tensor,
        tokens_P: Tensor | None,
        slots_P: Tensor | None,
        w1: Any,
        w2: Any,
        num_ranks: int = 1,
    ) -> Tensor:
        """What slot ``slots_P[i]`` makes of token ``tokens_P[i]``, with packed experts: [P, D],
        undefined where the slot is S. Without tokens every token has as many pairs, one after the
        other; without slots each has one, of slot 0. Pairs are those of the experts of
        ``num_ranks``, of which this is one: about so many times as many as are of a slot here.

        Pairs are sorted by slot, one grouped product per projection. Shapes do not depend on the
        routing, and nothing waits for it."""
        if slots_P is None:
            return F.linear(_silu_mul(F.linear(x_ND, w1[0])), w2[0])
        if tokens_P is None:
            num_pairs = len(slots_P)
            tokens_P = torch.arange(num_pairs, device=x_ND.device) // (num_pairs // len(x_ND))
        slot_of, order = slots_P.sort(stable=True)
        counts_S = slot_of.new_zeros(len(w1) + 1).scatter_add(0, slot_of, torch.ones_like(slot_of))
        ends_S = counts_S[:-1].cumsum(0).int()
        hidden = _silu_mul(F.grouped_mm(x_ND[tokens_P[order]], w1.transpose(1, 2), offs=ends_S))
        out = F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends_S)
        return torch.empty_like(out).index_copy(0, order, out)

    def route(
        self, x_TD: Tensor, packed: Tensor, bias_E: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] int64, best first and lowest id among equals, and weights fp32."""
        logits_TE = F.linear(x_TD.float(), packed.float())
        scores_TE = logits_TE.sigmoid() if routing.uses_sigmoid else logits_TE.softmax(-1)
        chosen_TE = scores_TE if bias_E is None else scores_TE + bias_E
        _, num_groups, num_kept, num_chosen = routing.sizes
        if num_groups > 1:
            grouped = chosen_TE.unflatten(1, (num_groups, -1))
            num_counted = min(2 if routing.sums_top_two else 1, grouped.shape[-1])
            group_scores_TG = grouped.topk(num_counted, -1).values.sum(-1)
            kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
            kept_TG = kept_TG.scatter(1, top_ids(group_scores_TG, num_kept), True)
            kept_TE = kept_TG.repeat_interleave(grouped.shape[-1], 1)
            chosen_TE = chosen_TE.masked_fill(~kept_TE, routing.masked_score)
        ids_TK = top_ids(chosen_TE, num_chosen)
        weights_TK = scores_TE.gather(1, ids_TK)
        if routing.is_normalised:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK * routing.factor

    def combine(
        self, out_TKD: Tensor, weights_TK: Tensor, branch_TD: Tensor | None
    ) -> BranchOutput:
        """The weighted sum [T, D] of each token's experts, in fp32, from the best one on; then
        ``branch`` is added. Some leave all that to `add_rms_norm`, for which it is there once."""
        y_TD = out_TKD[:, 0].float() * weights_TK[:, :1]
        for k in range(1, out_TKD.shape[1]):
            y_TD = torch.addcmul(y_TD, out_TKD[:, k].float(), weights_TK[:, k : k + 1])
        y_TD = y_TD.to(out_TKD.dtype)
        return y_TD if branch_TD is None else y_TD + branch_TD


TORCH_KERNELS = Kernels()


def zero_non_finite(context_SL: Tensor) -> tuple[Tensor, Tensor]:
    """Return cache entries [..., S, L] with zeros in place of those that hold a value that is not
    finite, and which these are [..., S]. Attention gives a hidden slot the weight 0, and 0 x NaN
    would be NaN; a row that sees such a slot has to become NaN by other means."""
    broken_S = ~(context_SL.abs().amax(-1) < float("inf"))
    return context_SL.masked_fill(broken_S.unsqueeze(-1), 0), broken_S


def top_ids(scores: Tensor, num: int) -> Tensor:
    """Ids of the ``num`` largest along the last axis, lowest id first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :num]


def rotate(x: Tensor, angles: RopeCosSin, is_interleaved: bool) -> Tensor:
    """Rotate x [..., R] by angles that broadcast to [..., R/2]. Pairs are (2j, 2j+1) if they are
    interleaved, else (j, j + R/2); written as the former, so that q.k is unchanged and the cached
    layout is one (spec §3: it is part of the wire format)."""
    cos, sin = angles
    pairs = x.float().unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    a, b = pairs.unbind(-1 if is_interleaved else -2)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def _rotate_heads(pe_XHR: Tensor, attn: AttentionMetadata) -> Tensor:
    return rotate(pe_XHR, (attn.cos.unsqueeze(1), attn.sin.unsqueeze(1)), attn.is_interleaved)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
