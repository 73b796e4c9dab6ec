"""The kernel interface of a forward pass and its reference implementation in torch.

The torch kernels run on any device, and the tests compare all others with them. Each other
implementation is a subclass in its own file and overrides the operations that it does better.

Weights are packed once after loading. Products, norms and attention accumulate in fp32. Outputs
have the dtype of the input unless stated otherwise.
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
"""Cosines and sines of the RoPE angles of each row: [X, R / 2] fp32 each."""
BranchOutput = Any
"""Output of attention or MLP, before it is added to the residual stream [X, D]. It is a tensor, or
a form that is not yet summed (``Kernels.combine``), which only ``Kernels.add_rms_norm`` reads."""


BLOCK = 128


class Fp8BlockWeight(NamedTuple):
    """FP8 weight with one scale for each BLOCK x BLOCK values (arXiv:2412.19437, 3.3.2).

    Attributes:
        values: Matrices [S, M, K], or one matrix [M, K].
        scales: [S, ceil(M / BLOCK), ceil(K / BLOCK)]. In a fused gate and up matrix each half has
            its own blocks.
    """

    values: Tensor
    scales: Tensor


Weights = Tensor | Fp8BlockWeight


class Routing(NamedTuple):
    """Parameters of a MoE gate (arXiv:2412.19437, 2.1.2).

    Attributes:
        sizes: Number of experts E, of groups, of groups kept, and of experts chosen per token.
        uses_sigmoid: Scores are sigmoid(logits), otherwise softmax(logits).
        sums_top_two: A group's score is the sum of its two best experts, otherwise its best.
        is_normalised: The weights of the chosen experts are divided by their sum.
        masked_score: Score of the experts in groups that were not kept.
        factor: Multiplier of the weights.
    """

    sizes: tuple[int, int, int, int]
    uses_sigmoid: bool
    sums_top_two: bool
    is_normalised: bool
    masked_score: float
    factor: float


class AttentionMetadata(NamedTuple):
    """Inputs of a layer's attention other than queries, in one forward pass.

    Attributes:
        cos, sin: RoPE angles of the rows (``RopeCosSin``).
        is_interleaved: Rotated pairs are (2j, 2j + 1), otherwise (j, j + R / 2).
        cache: The layer's paged cache [pages, page size, L].
        page_table_BP: Pages of each sequence [B, P], or of all packed segments in order [1, P].
        scale: Multiplier of the attention scores.
        bits_BQ: Visible draft-tree nodes of each row (see ``Batch``), None without trees.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    cache: Tensor
    page_table_BP: Tensor
    scale: float
    bits_BQ: Tensor | None = None


class Kernels(Sampler):
    """Kernels in torch, which use the weights as loaded, and the interface of all other kernels."""

    name = "torch"
    exec_mode = EAGER
    """Fastest execution mode (core/execution.py) of functions from ``make_replayable``."""

    ngram_lookup: ClassVar[Callable[..., tuple[Tensor, Tensor]] | None] = None
    """Device implementation of ``find_continuation`` in model/drafters/ngram.py, or None."""

    fallback_reason = ""
    """Why torch kernels replace the faster ones of this device, "" if they do not."""

    dim_multiple = 1
    """Number that the widths of heads and latents must be a multiple of."""

    owns_outputs = False
    """Whether replayable functions keep their outputs and overwrite them in the next call."""

    supports_fp8_blocks = False
    """Whether weights can stay in the block-scaled FP8 format of the checkpoint."""

    reads_paged_cache = False
    """Whether attention reads pages in place, so that unused page table columns cost nothing."""

    copy_rows: Callable[[Sequence[Tensor], Tensor, Tensor, bool], None] | None = None
    """Function that copies cache entries of all layers to or from staging buffers
    (kv_transfer/caches.py), None if these kernels have none."""

    def use_threads(self, num_threads: int) -> None:
        """Set the number of CPU threads that this process computes with."""
        torch.set_num_threads(num_threads)

    def compile_s(self) -> float:
        """Return the seconds of kernel compilation so far, including one in progress. May be called
        on any thread."""
        return 0.0

    def make_replayable(self, function: Function) -> ReplayableFunction:
        """Wrap ``function`` for repeated calls, all with the input shapes of the first. Its outputs
        may be overwritten, in stream order, by the next call of any wrapped function."""
        return Eager(function)

    def run_concurrently(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Start ``work``, possibly in parallel with later calls, and return a join function. That
        function makes the device wait for the result, which it returns. Call it before the inputs
        of ``work`` are freed."""
        result = work()
        return lambda: result

    def pack(self, weight: Any) -> Any:
        """Convert matrices [..., M, K] to the format that ``linear`` and others read. Block-scaled
        FP8 weights are accepted only with ``supports_fp8_blocks``."""
        return weight

    def pack_experts(self, gate_up: Any, down: Any) -> tuple[Weights, Weights]:
        """Convert expert weights to the format that ``fused_experts`` reads. ``gate_up`` [S, 2F, D]
        has the gate rows first; ``down`` is [S, D, F]. FP8 weights are accepted as in ``pack``."""
        return gate_up, down

    def linear(self, x_XK: Tensor, packed: Any, num_out: int, in_fp32: bool = False) -> Tensor:
        """Multiply rows x by the transpose of a packed matrix [M, K]: [X, M]."""
        y = F.linear(x_XK, packed)
        return y.float() if in_fp32 else y

    def rms_norm(self, x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise in fp32, cast to the dtype of ``x_XD``, then scale (the order of transformers).
        Rows may have any stride."""
        return weight_D * F.rms_norm(x_XD.float(), weight_D.shape, eps=eps).to(x_XD.dtype)

    def add_rms_norm(
        self, x_XD: Tensor, branch: BranchOutput, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``x_XD + branch`` and the RMS norm of this sum."""
        x_XD = x_XD + branch
        return x_XD, self.rms_norm(x_XD, weight_D, eps)

    def write_mla_cache(
        self, kv_XL: Tensor, weight_C: Tensor, eps: float, attn: AttentionMetadata, slots_X: Tensor
    ) -> None:
        """Write [normed latent, rotated key] of each row to its physical slot of the cache."""
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
        """Compute absorbed MLA (arXiv:2405.04434, 2.1) over each sequence's pages: [X, H, V].

        Torch copies the pages first; its shapes depend only on the width of the page table.

        Args:
            q_XHK: Queries. The last R values of each head are rotated here.
            up_k: Packed [H, C, K - R], maps the other values of each head to the latent space.
            up_v: Packed [H, V, C], maps the attended latents to each head's values.
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
        """Write [rotated keys, values] of each row's heads to its physical slot of the cache."""
        keys, values = kv_XL.chunk(2, -1)
        keys = _rotate_heads(keys.unflatten(1, (-1, 2 * attn.cos.shape[1])), attn).flatten(1)
        attn.cache.flatten(0, 1)[slots_X] = torch.cat((keys, values), -1)

    def gqa_attend(self, q_XHK: Tensor, attn: AttentionMetadata, context_lens_BQ: Tensor) -> Tensor:
        """Compute grouped-query attention over each sequence's pages: [X, H, K]. A cache entry is
        the keys and values of G heads [2, G, K]. Queries are rotated here."""
        num_q = context_lens_BQ.shape[1]
        width = q_XHK.shape[2]
        context_BSL, broken_BS = zero_non_finite(gather_pages(attn.cache, attn.page_table_BP))
        context = context_BSL.unflatten(-1, (2, -1, width))
        k_BGSK, v_BGSK = (part.transpose(1, 2) for part in context.unbind(2))
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
        """Copy the entries at physical slots ``from_BN`` to ``to_BN`` in all ``caches``. A copy
        must not write a slot that a later copy of the same row reads, nor a slot of another row.
        The dummy page is exempt."""
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
        """Compute MLA of packed segments over their own contexts: [T, H, V], zeros for padding.

        Keys and values of every head are expanded from the latents, which needs the fewest FLOPs
        if there are many rows.

        Args:
            q_THK: Queries. The last R values of each head are rotated here.
            kv_b: Packed [H, N + V, C], maps a latent to a head's keys and values.
            num_values: V, the width of a head's values.
        """
        # Imported here: this loads torch._dynamo, which takes 2 s.
        from torch.nn.attention.bias import causal_lower_right

        page_size = attn.cache.shape[1]
        num_heads = q_THK.shape[1]
        nope, pe = q_THK.split([kv_b.shape[1] - num_values, 2 * attn.cos.shape[1]], -1)
        q_HTK = torch.cat((nope, _rotate_heads(pe, attn)), -1).transpose(0, 1)
        latent_SL, broken_S = zero_non_finite(gather_pages(attn.cache, attn.page_table_BP)[0])
        c_SC, k_pe_SR = latent_SL.split([kv_b.shape[2], pe.shape[2]], 1)
        k_HSN, v_HSV = torch.matmul(c_SC, kv_b.transpose(1, 2)).split(
            [nope.shape[2], num_values], 2
        )
        k_HSK = torch.cat((k_HSN, k_pe_SR.expand(num_heads, -1, -1)), -1)
        v_HSK = F.pad(v_HSV, (0, max(0, k_HSK.shape[2] - num_values)))
        out_HTV = q_HTK.new_zeros(*q_HTK.shape[:2], num_values)
        row = 0
        slot = 0
        for num, context in zip(segments.lengths, segments.contexts, strict=True):
            rows = slice(row, row + num)
            slots = slice(slot, slot + context)
            q, k, v = (x[None] for x in (q_HTK[:, rows], k_HSK[:, slots], v_HSK[:, slots]))
            mask = causal_lower_right(num, context)
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=attn.scale)
            spoilt_T1 = broken_S[slots].cumsum(0)[-num:, None] > 0
            out_HTV[:, rows] = out[0, ..., :num_values].masked_fill(spoilt_T1, float("nan"))
            row = row + num
            slot = slot + -(-context // page_size) * page_size
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
        """Run expert ``slots_P[i]`` on token ``tokens_P[i]`` for each pair i: [P, D].

        The torch implementation sorts the pairs by slot and runs one grouped product per
        projection. Shapes do not depend on the routing, so the host does not wait for it.

        Args:
            x_ND: Hidden states of the tokens.
            tokens_P: Token of each pair. None: every token has P / N consecutive pairs.
            slots_P: Slot of each pair; the output is undefined where it is S (an expert of another
                rank). None: one pair for each token, with slot 0.
            w1, w2: Weights from ``pack_experts``.
            num_ranks: Number of ranks whose experts the pairs refer to. About P / ``num_ranks``
                pairs have a local slot.
        """
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
        """Return expert ids [T, K] int64, best first, and their weights [T, K] fp32. Of equal
        scores, the lowest id comes first. ``packed`` is the packed gate [E, D]."""
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
        """Sum each token's weighted expert outputs in fp32, best expert first, and add
        ``branch_TD``. Some kernels leave this to ``add_rms_norm``, which can read the result only
        once."""
        y_TD = out_TKD[:, 0].float() * weights_TK[:, :1]
        for k in range(1, out_TKD.shape[1]):
            y_TD = torch.addcmul(y_TD, out_TKD[:, k].float(), weights_TK[:, k : k + 1])
        y_TD = y_TD.to(out_TKD.dtype)
        return y_TD if branch_TD is None else y_TD + branch_TD


TORCH_KERNELS = Kernels()


def zero_non_finite(context_SL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries [..., S, L] with non-finite ones zeroed, and a mask [..., S] of these.

    Attention gives slots that a row does not see the weight 0, but 0 * NaN would be NaN. The caller
    must set rows that see a non-finite entry to NaN.
    """
    broken_S = ~(context_SL.abs().amax(-1) < float("inf"))
    return context_SL.masked_fill(broken_S.unsqueeze(-1), 0), broken_S


def top_ids(scores: Tensor, num: int) -> Tensor:
    """Return ids of the ``num`` largest scores along the last axis, the lowest of equals first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :num]


def rotate(x: Tensor, angles: RopeCosSin, is_interleaved: bool) -> Tensor:
    """Apply RoPE (arXiv:2104.09864) to x [..., R], by angles that broadcast to [..., R / 2].

    Input pairs are (2j, 2j + 1) if ``is_interleaved``, otherwise (j, j + R / 2). The output is
    always interleaved. Thus q.k is unchanged, and all ranks that exchange caches use one layout.
    """
    cos, sin = angles
    pairs = x.float().unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    a, b = pairs.unbind(-1 if is_interleaved else -2)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def _rotate_heads(pe_XHR: Tensor, attn: AttentionMetadata) -> Tensor:
    return rotate(pe_XHR, (attn.cos.unsqueeze(1), attn.sin.unsqueeze(1)), attn.is_interleaved)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
