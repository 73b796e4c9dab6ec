"""Grouping of (token, expert) pairs by expert.

Every program scans all pairs if these are few. Otherwise pairs are sorted by slot once.

Shape legend: P pairs, S slots of experts, M pairs of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 1024
MAX_SCANNED_PAIRS = 64
MAX_PAIRS_PER_PASS = 8 * PAIRS
"""Maximum number of pairs for the sort in which the program of each slot scans all pairs. More
pairs are sorted in chunks of ``PAIRS`` by a counting sort."""
COMPARED_PAIRS = 128
"""Number of pairs that the counting sort compares with each other at once."""


class Pairs(NamedTuple):
    """Assignment of pairs to programs, each of which computes the pairs of one slot.

    Attributes:
        order_P: Pairs sorted by slot.
        starts_S: First position of each slot in ``order_P``.
        num_programs: One program per slot, or one per pair if there are fewer pairs than slots.
        by_pair: Whether there is one program per pair. That of a slot's first pair then computes
            all pairs of the slot.
        num_scanned: Number of pairs that each program scans, 0 if pairs are sorted. ``order_P`` and
            ``starts_S`` are unused if it is not 0.
    """

    order_P: Tensor
    starts_S: Tensor
    num_programs: int
    by_pair: bool
    num_scanned: int


def pairs_of(slots_P: Tensor, num_slots: int) -> Pairs:
    num_pairs = len(slots_P)
    programs = min(num_pairs, num_slots), num_pairs < num_slots
    if num_pairs <= MAX_SCANNED_PAIRS:
        return Pairs(slots_P, slots_P, *programs, max(2, triton.next_power_of_2(num_pairs)))
    return Pairs(*by_slot(slots_P, num_slots), *programs, 0)


def by_slot(slots_P: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Return pairs sorted by slot, and the first position of each slot [S + 1].

    Pairs of slot S, which belong to other ranks, are left out.
    """
    order_P = torch.empty_like(slots_P, dtype=torch.int32)
    starts_S = torch.empty(num_slots + 1, dtype=torch.int32, device=slots_P.device)
    pairs = order_P, starts_S, len(slots_P), num_slots
    if len(slots_P) <= MAX_PAIRS_PER_PASS:
        _by_slot[(num_slots + 1,)](slots_P, *pairs, BLOCK=PAIRS)
        return order_P, starts_S
    num_chunks = triton.cdiv(len(slots_P), PAIRS)
    num_counts = triton.next_power_of_2(num_slots + 1)
    counts_CS = order_P.new_empty(num_chunks, num_counts)
    blocks = {"SLOTS": num_counts, "CHUNK": PAIRS}
    _count[(num_chunks,)](slots_P, counts_CS, len(slots_P), num_slots, **blocks)
    _place[(num_chunks,)](
        slots_P, counts_CS, *pairs, **blocks, AT_ONCE=16, BLOCK=COMPARED_PAIRS, num_warps=8
    )
    return order_P, starts_S


@triton.jit
def _by_slot(slots, order, starts, num_pairs, num_slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    p_P = tl.arange(0, BLOCK)
    num_before_P = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        is_pair_P = start + p_P < num_pairs
        slot_P = tl.load(slots + start + p_P, mask=is_pair_P, other=0)
        num_before_P += (is_pair_P & (slot_P < slot)).to(tl.int32)
    position = tl.sum(num_before_P, 0)
    tl.store(starts + slot, position)
    if slot < num_slots:
        for start in range(0, num_pairs, BLOCK):
            is_pair_P = start + p_P < num_pairs
            slot_P = tl.load(slots + start + p_P, mask=is_pair_P, other=0)
            is_mine_P = (is_pair_P & (slot_P == slot)).to(tl.int32)
            place_P = position + tl.cumsum(is_mine_P, 0) - 1
            tl.store(order + place_P, start + p_P, mask=is_mine_P > 0)
            position += tl.sum(is_mine_P, 0)


@triton.jit
def _count(slots, counts, num_pairs, num_slots, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    p_P = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    slot_P = tl.load(slots + p_P, mask=p_P < num_pairs, other=num_slots).to(tl.int32)
    tl.store(counts + tl.program_id(0) * SLOTS + tl.arange(0, SLOTS), tl.histogram(slot_P, SLOTS))


@triton.jit
def _place(
    slots,
    counts,
    order,
    starts,
    num_pairs,
    num_slots,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the pairs of a chunk to their sorted positions; the sort is stable."""
    chunk = tl.program_id(0)
    s_S = tl.arange(0, SLOTS)
    i_P = tl.arange(0, BLOCK)
    num_S = tl.zeros([SLOTS], tl.int32)
    next_S = tl.zeros([SLOTS], tl.int32)
    for first in range(0, tl.num_programs(0), AT_ONCE):
        c_C = first + tl.arange(0, AT_ONCE)
        is_c = (c_C < tl.num_programs(0))[:, None]
        num_CS = tl.load(counts + c_C[:, None] * SLOTS + s_S[None, :], mask=is_c, other=0)
        num_S += tl.sum(num_CS, 0)
        next_S += tl.sum(tl.where((c_C < chunk)[:, None], num_CS, 0), 0)
    start_S = tl.cumsum(num_S, 0) - num_S
    next_S += start_S
    if chunk == 0:
        tl.store(starts + s_S, start_S, mask=s_S <= num_slots)
    for first in range(chunk * CHUNK, min((chunk + 1) * CHUNK, num_pairs), BLOCK):
        p_P = first + i_P
        slot_P = tl.load(slots + p_P, mask=p_P < num_pairs, other=num_slots).to(tl.int32)
        is_before_PP = (slot_P[:, None] == slot_P[None, :]) & (i_P[:, None] > i_P[None, :])
        place_P = tl.gather(next_S, slot_P, 0) + tl.sum(is_before_PP.to(tl.int32), 1)
        tl.store(order + place_P, p_P, mask=slot_P < num_slots)
        next_S += tl.histogram(slot_P, SLOTS)


@triton.jit
def slot_range(pairs, BY_PAIR: tl.constexpr, NUM_SCANNED: tl.constexpr):
    """Return the slot of this program, and the first and end position of its pairs.

    The range is empty if another program computes the slot.
    """
    slots, order, starts, num_pairs, num_slots = pairs
    i = tl.program_id(0)
    if NUM_SCANNED > 0:
        slot = i
        if BY_PAIR:
            slot = tl.load(slots + i).to(tl.int32)
        is_mine_P, p_P = _mine(slots, slot, num_pairs, NUM_SCANNED)
        first = tl.full([], 0, tl.int32)
        end = tl.sum(is_mine_P, 0)
        if BY_PAIR:
            is_first = tl.sum(tl.where(p_P < i, is_mine_P, 0), 0) == 0
            end = tl.where(is_first & (slot < num_slots), end, 0)
    elif BY_PAIR:
        num_here = tl.load(starts + num_slots)
        pair = tl.load(order + i, mask=i < num_here, other=0)
        slot = tl.where(i < num_here, tl.load(slots + pair), 0).to(tl.int32)
        first = tl.load(starts + slot)
        end = tl.where((first == i) & (i < num_here), tl.load(starts + slot + 1), first)
    else:
        slot = i
        first = tl.load(starts + slot)
        end = tl.load(starts + slot + 1)
    return slot, first, end


@triton.jit
def pairs_at(pairs, slot, place_M, end, NUM_SCANNED: tl.constexpr):
    """Return the pairs of ``slot`` at positions ``place_M``, 0 from ``end`` on."""
    slots, order, _, num_pairs, _ = pairs
    if NUM_SCANNED > 0:
        is_mine_P, p_P = _mine(slots, slot, num_pairs, NUM_SCANNED)
        place_P = tl.cumsum(is_mine_P, 0) - 1
        is_it_MP = (place_P[None, :] == place_M[:, None]) & (is_mine_P > 0)[None, :]
        pair_M = tl.sum(tl.where(is_it_MP, p_P[None, :], 0), 1)
    else:
        pair_M = tl.load(order + place_M, mask=place_M < end, other=0)
    return pair_M


@triton.jit
def _mine(slots, slot, num_pairs, NUM_SCANNED: tl.constexpr):
    p_P = tl.arange(0, NUM_SCANNED)
    slot_P = tl.load(slots + p_P, mask=p_P < num_pairs, other=-1)
    return (slot_P == slot).to(tl.int32), p_P
