"""Routing in Triton. A token's experts lie in a tile [groups, experts of a group]; both are padded to powers of two.

The best are found one after another. Numbers are compared as whole ones that are ordered alike, of which one is lower
than any number: that is what has been taken.
"""

import triton
import triton.language as tl

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)

TAKEN = tl.constexpr(-(2**31))


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    return x.to(DTYPE).to(tl.float32) if ROUNDS else x


@triton.jit
def _scored(x, live, SCORING: tl.constexpr, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    """In float32, of one dimension."""
    if SCORING == SOFTMAX:
        x = tl.where(live, x, float("-inf"))
        x = tl.exp(x - tl.max(x, 0))
        return _rounded(x / tl.sum(x, 0), DTYPE, ROUNDS)
    if SCORING == SIGMOID:
        return _rounded(tl.sigmoid(x), DTYPE, ROUNDS)
    # log(1 + power), to the last bits where the power is small (Kahan).
    power = tl.exp(tl.where(x > 20.0, 20.0, x))
    total = 1.0 + power
    softplus = tl.where(total == 1.0, power, tl.log(total) * (power / tl.where(total == 1.0, 1.0, total - 1.0)))
    return _rounded(tl.sqrt(_rounded(tl.where(x > 20.0, x, softplus), DTYPE, ROUNDS)), DTYPE, ROUNDS)


@triton.jit
def _ordered(x):
    """Whole numbers that are ordered as these float32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # there is one zero
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best(keys, places):
    """The place of the greatest key, the first of equal ones."""
    return tl.min(tl.where(keys == tl.max(keys, 0), places, 2**30), 0)


@triton.jit
def route(
    logits_ptr, bias_ptr, expert_scale_ptr, experts_ptr, shares_ptr, row_stride, least, scale,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    MOST_GROUPS: tl.constexpr, MOST: tl.constexpr, MOST_PADDED: tl.constexpr, SCORING: tl.constexpr,
    IS_OF_CHOSEN: tl.constexpr, ROUNDS: tl.constexpr, NORMALIZES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_EXPERT_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). As `protocol.Routing` says."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, GROUPS_PADDED * GROUP_PADDED)
    group, within = n // GROUP_PADDED, n % GROUP_PADDED
    expert = group * GROUP + within
    live = (group < GROUPS) & (within < GROUP)
    logits = tl.load(logits_ptr + row * row_stride + expert, mask=live, other=0.0)
    scores = logits.to(tl.float32)
    if not IS_OF_CHOSEN:
        scores = _scored(scores, live, SCORING, logits.dtype, ROUNDS)
    # What they are chosen by.
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=live, other=0.0)
    choice = tl.where(choice == choice, choice, float("inf"))  # its answer will be no number either
    keys = tl.where(live, _ordered(choice), TAKEN)
    # Where there are groups, a group is worth its two best, and the experts of the best groups alone keep their keys.
    if GROUPS > 1:
        tile = tl.reshape(tl.where(live, choice, float("-inf")), (GROUPS_PADDED, GROUP_PADDED))
        s = tl.arange(0, GROUP_PADDED)[None, :]
        first = tl.max(tile, 1)
        at = tl.min(tl.where(tile == first[:, None], s, GROUP_PADDED), 1)
        second = tl.max(tl.where(s == at[:, None], float("-inf"), tile), 1)
        g = tl.arange(0, GROUPS_PADDED)
        group_keys = tl.where(g < GROUPS, _ordered(first + second), TAKEN)
        for _ in tl.range(0, MOST_GROUPS):
            group_keys = tl.where(g == _best(group_keys, g), TAKEN, group_keys)
        is_chosen = tl.broadcast_to((group_keys == TAKEN)[:, None], (GROUPS_PADDED, GROUP_PADDED))
        lowest = tl.where(live, TAKEN + 1, TAKEN)
        keys = tl.where(tl.reshape(is_chosen, (GROUPS_PADDED * GROUP_PADDED,)), keys, lowest)
    # One after another, the best is taken.
    k = tl.arange(0, MOST_PADDED)
    experts, shares = tl.zeros((MOST_PADDED,), tl.int64), tl.zeros((MOST_PADDED,), tl.float32)
    for i in tl.range(0, MOST):
        is_best = n == _best(keys, n)
        experts = tl.where(k == i, tl.sum(tl.where(is_best, expert, 0), 0), experts)
        shares = tl.where(k == i, tl.sum(tl.where(is_best, scores, 0.0), 0), shares)
        keys = tl.where(is_best, TAKEN, keys)
    # Shares are made of the scores of those.
    if IS_OF_CHOSEN:
        shares = _scored(shares, k < MOST, SCORING, logits.dtype, ROUNDS)
    if NORMALIZES:
        total = _rounded(tl.sum(tl.where(k < MOST, shares, 0.0), 0), logits.dtype, ROUNDS)
        total = _rounded(total + least, logits.dtype, ROUNDS)
        shares = _rounded(shares / total, logits.dtype, ROUNDS)
    shares = _rounded(shares * scale, logits.dtype, ROUNDS)
    if HAS_EXPERT_SCALE:
        shares *= tl.load(expert_scale_ptr + experts, mask=k < MOST, other=0.0)
    tl.store(experts_ptr + row * MOST + k, experts, mask=k < MOST)
    tl.store(shares_ptr + row * MOST + k, shares.to(shares_ptr.dtype.element_ty), mask=k < MOST)
