"""Radix select for top-k and top-p, which needs no sort.

The edge is the smallest logit that a filter keeps. The kernels find it and the number of tokens
with this logit that are kept. They are launched by sample.py; each program handles one split of a
row.

The edge's key, a uint32 in the order of the logits, is found digit by digit. Each launch first sums
the previous launch's results over all splits, in a fixed order. For every value of the next digit
it then stores two numbers of its split. One is the number of tokens, or the probability relative to
the best token, at or above this value. The other is the number of tokens with exactly this value.

Shape legend: X places, S splits, V tokens of a split, J values of a digit.

``settings`` are columns of SamplingRows. ``left`` has three tensors. The first is the largest key
and token of each split [X, S]. The second has the results of the splits [slots, X, S, 2, J]. The
third has states [slots, X, 4]. A state is the digits of the key found so far, the amount above that
key, the wanted amount, and the floor. Only tokens with keys above the floor count.
"""

import triton
import triton.language as tl

DIGIT = tl.constexpr(16)


@triton.jit
def ordered(x):
    """Map floats to uint32 keys of the same order. NaN maps to 0, and -0 to the key of +0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 0)


@triton.jit
def _number(key):
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tile(logits, temperatures, BLOCK: tl.constexpr):
    """Return the tokens of this split and their logits divided by temperature.

    Logits beyond the vocabulary are NaN.
    """
    start, stride_b, stride_q, num_places, num_tokens = logits
    block = tl.program_id(0).to(tl.int64)
    b = block // num_places
    q = block % num_places
    at_V = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    from_V = start + b * stride_b + q * stride_q + at_V
    x_V = tl.load(from_V, mask=at_V < num_tokens, other=float("nan"))
    if temperatures is not None:
        temperature = tl.load(temperatures + b)
        x_V = x_V / tl.where(temperature > 0, temperature, 1.0)
    return at_V, x_V


@triton.jit
def load_splits(values, other, SPLITS: tl.constexpr):
    s_S = tl.arange(0, SPLITS)
    num_splits = tl.num_programs(1)
    from_S = values + tl.program_id(0).to(tl.int64) * num_splits + s_S
    return tl.load(from_S, mask=s_S < num_splits, other=other)


@triton.jit
def _top(left, SPLITS: tl.constexpr):
    """Return the largest logit of the row."""
    return _number((tl.max(load_splits(left[0], 0, SPLITS), 0) >> 32).to(tl.uint32))


@triton.jit
def _load_settings(logits, settings):
    """Return top-k, top-p, whether top-k filters, and whether top-p filters."""
    b = tl.program_id(0) // logits[3]
    top_k = tl.load(settings[1] + b)
    top_p = tl.load(settings[2] + b)
    return top_k.to(tl.float32), top_p, (top_k > 0) & (top_k < logits[4]), top_p < 1


@triton.jit
def _at(step):
    """Return the index where a step's results are stored, and the bit shift of its digit."""
    slot = step // 8 * 2 + step % 2
    return slot * tl.num_programs(0) + tl.program_id(0).to(tl.int64), 28 - step % 8 * 4


@triton.jit
def _next_state(left, step, by_mass, top_p, SPLITS: tl.constexpr):
    """Return the state after a step.

    The step's digit is the largest value for which the tokens at or above it reach the wanted
    amount.
    """
    s_S = tl.arange(0, SPLITS)[:, None]
    j_J = tl.arange(0, DIGIT)
    num_splits = tl.num_programs(1)
    at, shift = _at(step)
    from_SJ = left[1] + (at * num_splits + s_S) * (2 * DIGIT) + j_J[None, :]
    have_J = tl.sum(tl.load(from_SJ, mask=s_S < num_splits, other=0.0), 0)
    state = left[2] + at * 4
    edge = tl.load(state).to(tl.uint32, bitcast=True)
    floor = tl.load(state + 3).to(tl.uint32, bitcast=True)
    above = tl.load(state + 1)
    target = tl.load(state + 2)
    if by_mass & (step % 8 == 0):
        # The total is known by now, except for the mass of the tokens at the floor.
        target = top_p * (tl.max(have_J, 0) + target)
    have_J += above
    digit = tl.max(tl.where(have_J >= target, j_J, 0), 0)
    above = tl.max(tl.where(j_J > digit, have_J, above), 0)
    return edge | (digit << shift).to(tl.uint32), above, target, floor


@triton.jit
def _num_on(left, step, split, edge, mask):
    """Return the number of tokens in ``split`` that match ``edge`` up to the digit of ``step``."""
    at, shift = _at(step)
    digit = ((edge >> shift) & (DIGIT - 1)).to(tl.int32)
    from_S = left[1] + (at * tl.num_programs(1) + split) * (2 * DIGIT) + DIGIT + digit
    return tl.load(from_S, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["step"])
def narrow(
    logits, settings, left, step, BLOCK: tl.constexpr, SPLITS: tl.constexpr, DRAWS: tl.constexpr
):
    """Find one digit of an edge.

    Steps 0 to 7 find the first edge: by count with top-k, otherwise by probability. Steps 8 to 15
    run only with both top-k and top-p. They find a second edge by probability, among the tokens
    that top-k keeps.
    """
    top_k, top_p, has_k, has_p = _load_settings(logits, settings)
    is_idle = not tl.where(step < 8, has_k | has_p, has_k & has_p)
    if DRAWS:
        is_idle |= tl.load(settings[0] + tl.program_id(0) // logits[3]) <= 0
    if is_idle:
        return
    top = _top(left, SPLITS)
    by_mass = (step >= 8) | (not has_k)
    is_empty = False
    edge = tl.full([], 0, tl.uint32)
    floor = tl.full([], 0, tl.uint32)
    above = 0.0
    target = tl.where(by_mass, 0.0, top_k)
    if step > 0:
        edge, above, target, floor = _next_state(left, step - 1, by_mass, top_p, SPLITS)
        if step == 8:
            target = tl.exp(_number(edge) - top) * (top_k - above)
            floor = edge
            edge = tl.full([], 0, tl.uint32)
            above = 0.0
        else:
            is_empty = _num_on(left, step - 1, tl.program_id(1), edge, True) == 0
    at, shift = _at(step)
    j_J = tl.arange(0, DIGIT)
    if tl.program_id(1) == 0:
        state = left[2] + at * 4
        tl.store(state, edge.to(tl.float32, bitcast=True))
        tl.store(state + 1, above)
        tl.store(state + 2, target)
        tl.store(state + 3, floor.to(tl.float32, bitcast=True))
    on_J = tl.zeros([DIGIT], tl.int32)
    have_J = tl.zeros([DIGIT], tl.float32)
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
    """Return the edge's key, above which all tokens are kept, and the number of tokens with this
    key that are kept in this split."""
    top_k, top_p, has_k, has_p = _load_settings(logits, settings)
    edge = tl.full([], 0, tl.uint32)
    num_on_it = 0.0
    if has_k | has_p:
        step = 7
        s_S = tl.arange(0, SPLITS)
        edge, above, target, _ = _next_state(left, step, False, top_p, SPLITS)
        num_on_it = tl.where(has_k, top_k - above, float("inf"))
        if has_k & has_p:
            edge_p, above, target, _ = _next_state(left, 15, True, top_p, SPLITS)
            if edge_p > edge:
                step = 15
                edge = edge_p
                num_on_it = top_k
        if has_p:
            on_it = tl.maximum(tl.exp(_number(edge) - top), 1e-30)
            num_on_it = tl.minimum(num_on_it, tl.maximum(tl.ceil((target - above) / on_it), 1.0))
        num_on_it -= tl.sum(_num_on(left, step, s_S, edge, s_S < tl.program_id(1)), 0)
    return edge, num_on_it


@triton.jit
def is_kept(logits, settings, left, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the tokens of this split, and their logits minus the largest; -inf if filtered out."""
    at_V, x_V = tile(logits, settings[0], BLOCK)
    key_V = ordered(x_V)
    top = _top(left, SPLITS)
    edge, num_on_it = _edge(logits, settings, left, top, SPLITS)
    is_on_V = (key_V == edge).to(tl.int32)
    is_kept_V = (key_V > edge) | ((is_on_V > 0) & (tl.cumsum(is_on_V, 0) <= num_on_it))
    min_p = tl.load(settings[3] + tl.program_id(0) // logits[3])
    is_kept_V &= (tl.exp(x_V - top) >= min_p) | (x_V == top)
    return at_V, tl.where(is_kept_V, x_V - top, float("-inf"))
