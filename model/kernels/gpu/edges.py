"""The least logit that top-k and top-p leave, and how many of those that equal it, by programs that
have a split of a row each: sample.py launches them, and tells of the whole.

A key is found digit by digit. Each launch adds up what the last one left of all splits, in a fixed
order, and leaves of its own, for every value of the next digit, how many tokens, or how much
probability (where the largest token's is 1), there are from that on up, and how many on it.

Shape legend: X places, S splits, V tokens of a split, J values of a digit. ``how`` is columns of
SamplingRows; ``left``: the splits' largest [X, S], parts [slots, X, S, 2, J], and states
[slots, X, 4], which are a key as far as it is found, what is above it, what is wanted, and the key
above which tokens count at all.
"""

import triton
import triton.language as tl

DIGIT = tl.constexpr(16)


@triton.jit
def ordered(x):
    """uint32 in the order of floats, 0 for NaN; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 0)


@triton.jit
def _number(key):
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tile(logits, temperatures, BLOCK: tl.constexpr):
    """The tokens of this split, and logits by temperature; NaN where there is none."""
    start, stride_b, stride_q, num_places, num_tokens = logits
    place = tl.program_id(0).to(tl.int64)
    b, q = place // num_places, place % num_places
    at_V = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    from_V = start + b * stride_b + q * stride_q + at_V
    x_V = tl.load(from_V, mask=at_V < num_tokens, other=float("nan"))
    if temperatures is not None:
        temperature = tl.load(temperatures + b)
        x_V = x_V / tl.where(temperature > 0, temperature, 1.0)
    return at_V, x_V


@triton.jit
def load_splits(values, other, SPLITS: tl.constexpr):
    s_S, num_splits = tl.arange(0, SPLITS), tl.num_programs(1)
    from_S = values + tl.program_id(0).to(tl.int64) * num_splits + s_S
    return tl.load(from_S, mask=s_S < num_splits, other=other)


@triton.jit
def _top(left, SPLITS: tl.constexpr):
    """The largest logit of the row."""
    return _number((tl.max(load_splits(left[0], 0, SPLITS), 0) >> 32).to(tl.uint32))


@triton.jit
def _load_settings(logits, settings):
    """top-k, top-p, and whether there is either."""
    b = tl.program_id(0) // logits[3]
    top_k, top_p = tl.load(settings[1] + b), tl.load(settings[2] + b)
    return top_k.to(tl.float32), top_p, (top_k > 0) & (top_k < logits[4]), top_p < 1


@triton.jit
def _at(step):
    """Where a step leaves what it does, and the shift of its digit."""
    slot = step // 8 * 2 + step % 2
    return slot * tl.num_programs(0) + tl.program_id(0).to(tl.int64), 28 - step % 8 * 4


@triton.jit
def _next_state(left, step, by_mass, top_p, SPLITS: tl.constexpr):
    """The state after a step: with the largest digit from which on up there is what is wanted."""
    s_S, j_J, num_splits = tl.arange(0, SPLITS)[:, None], tl.arange(0, DIGIT), tl.num_programs(1)
    at, shift = _at(step)
    from_SJ = left[1] + (at * num_splits + s_S) * (2 * DIGIT) + j_J[None, :]
    have_J = tl.sum(tl.load(from_SJ, mask=s_S < num_splits, other=0.0), 0)
    state = left[2] + at * 4
    edge = tl.load(state).to(tl.uint32, bitcast=True)
    floor = tl.load(state + 3).to(tl.uint32, bitcast=True)
    above, wanted = tl.load(state + 1), tl.load(state + 2)
    if by_mass & (step % 8 == 0):
        # All there is is known by now, but for what lies on the floor.
        wanted = top_p * (tl.max(have_J, 0) + wanted)
    have_J += above
    digit = tl.max(tl.where(have_J >= wanted, j_J, 0), 0)
    above = tl.max(tl.where(j_J > digit, have_J, above), 0)
    return edge | (digit << shift).to(tl.uint32), above, wanted, floor


@triton.jit
def _num_on(left, step, split, edge, mask):
    """How many tokens of splits have the last digit of a key that is found up to a step's."""
    at, shift = _at(step)
    digit = ((edge >> shift) & (DIGIT - 1)).to(tl.int32)
    from_S = left[1] + (at * tl.num_programs(1) + split) * (2 * DIGIT) + DIGIT + digit
    return tl.load(from_S, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["step"])
def narrow(
    logits, settings, left, step, BLOCK: tl.constexpr, SPLITS: tl.constexpr, DRAWS: tl.constexpr
):
    """A digit of the first edge, by number if there is a top-k (steps 0 to 7), or of the second, by
    probability, of what is above the first if there is top-p too (8 to 15)."""
    top_k, top_p, has_k, has_p = _load_settings(logits, settings)
    is_idle = not tl.where(step < 8, has_k | has_p, has_k & has_p)
    if DRAWS:
        is_idle |= tl.load(settings[0] + tl.program_id(0) // logits[3]) <= 0
    if is_idle:
        return
    top, by_mass, is_empty = _top(left, SPLITS), (step >= 8) | (not has_k), False
    edge, floor = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    above, wanted = 0.0, tl.where(by_mass, 0.0, top_k)
    if step > 0:
        edge, above, wanted, floor = _next_state(left, step - 1, by_mass, top_p, SPLITS)
        if step == 8:
            wanted = tl.exp(_number(edge) - top) * (top_k - above)
            floor, edge, above = edge, tl.full([], 0, tl.uint32), 0.0
        else:
            is_empty = _num_on(left, step - 1, tl.program_id(1), edge, True) == 0
    at, shift = _at(step)
    j_J = tl.arange(0, DIGIT)
    if tl.program_id(1) == 0:
        state = left[2] + at * 4
        tl.store(state, edge.to(tl.float32, bitcast=True))
        tl.store(state + 1, above)
        tl.store(state + 2, wanted)
        tl.store(state + 3, floor.to(tl.float32, bitcast=True))
    on_J, have_J = tl.zeros([DIGIT], tl.int32), tl.zeros([DIGIT], tl.float32)
    if not is_empty:
        _, x_V = tile(logits, settings[0], BLOCK)
        key_V = ordered(x_V)
        digit_V = (key_V - edge) >> shift
        digit_V = tl.where((digit_V < DIGIT) & (key_V > floor), digit_V.to(tl.int32), -1)
        on_J = tl.histogram(digit_V, DIGIT, mask=digit_V >= 0)
        if by_mass:
            weight_JV = tl.where(digit_V[None, :] >= j_J[:, None], tl.exp(x_V - top)[None, :], 0.0)
            have_J = tl.sum(weight_JV, 1)
        else:
            have_J = tl.cumsum(on_J, 0, reverse=True).to(tl.float32)
    to_J = left[1] + (at * tl.num_programs(1) + tl.program_id(1)) * (2 * DIGIT) + j_J
    tl.store(to_J, have_J)
    tl.store(to_J + DIGIT, on_J.to(tl.float32))


@triton.jit
def _edge(logits, settings, left, top, SPLITS: tl.constexpr):
    """The key above which all is kept, and how many of those of this split that lie on it."""
    top_k, top_p, has_k, has_p = _load_settings(logits, settings)
    edge, num_on_it = tl.full([], 0, tl.uint32), 0.0
    if has_k | has_p:
        step, s_S = 7, tl.arange(0, SPLITS)
        edge, above, wanted, _ = _next_state(left, step, False, top_p, SPLITS)
        num_on_it = tl.where(has_k, top_k - above, float("inf"))
        if has_k & has_p:
            edge_p, above, wanted, _ = _next_state(left, 15, True, top_p, SPLITS)
            if edge_p > edge:
                step, edge, num_on_it = 15, edge_p, top_k
        if has_p:
            on_it = tl.maximum(tl.exp(_number(edge) - top), 1e-30)
            num_on_it = tl.minimum(num_on_it, tl.maximum(tl.ceil((wanted - above) / on_it), 1.0))
        num_on_it -= tl.sum(_num_on(left, step, s_S, edge, s_S < tl.program_id(1)), 0)
    return edge, num_on_it


@triton.jit
def is_kept(logits, settings, left, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """The tokens of this split, and how far those that are kept are below the largest logit; -inf
    of others."""
    at_V, x_V = tile(logits, settings[0], BLOCK)
    key_V, top = ordered(x_V), _top(left, SPLITS)
    edge, num_on_it = _edge(logits, settings, left, top, SPLITS)
    is_on_V = (key_V == edge).to(tl.int32)
    is_kept_V = (key_V > edge) | ((is_on_V > 0) & (tl.cumsum(is_on_V, 0) <= num_on_it))
    min_p = tl.load(settings[3] + tl.program_id(0) // logits[3])
    is_kept_V &= (tl.exp(x_V - top) >= min_p) | (x_V == top)
    return at_V, tl.where(is_kept_V, x_V - top, float("-inf"))
