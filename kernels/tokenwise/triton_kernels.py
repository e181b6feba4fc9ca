"""Token-wise operations in Triton: a row is read once and written once, by one program.

What is rounded between two steps of a model as transformers computes it is rounded here too. Sums are in float32, each
in an order that the width alone gives, so that a token has the same bits whatever is computed beside it.

Numbers of a head that are rotated lie in two tiles, so that the two of a pair meet in one thread:

    HALVES    low low low high high high rest rest        PAIRS    low high low high low high rest rest
"""

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)


@triton.jit
def _scaled(x, shrink, scale, ROUNDS_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """x * shrink * scale, in DTYPE."""
    wide = x.to(tl.float32) * shrink
    if ROUNDS_FIRST:
        wide = wide.to(DTYPE).to(tl.float32)
    return (wide * scale).to(DTYPE)


@triton.jit
def _normed(
    x, scale_ptr, c, live, eps, WIDTH: tl.constexpr, ROUNDS_FIRST: tl.constexpr, IS_CENTERED: tl.constexpr
):  # fmt: skip
    """The norm of one row. Beyond WIDTH x is zero."""
    wide = x.to(tl.float32)
    if IS_CENTERED:
        wide = tl.where(live, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    shrink = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    return _scaled(wide, shrink, tl.load(scale_ptr + c, mask=live, other=0.0), ROUNDS_FIRST, x.dtype)


@triton.jit
def add_norm(
    x_ptr, added_ptr, sum_ptr, out_ptr, after_ptr, before_ptr,
    x_row_stride, added_row_stride, after_eps, before_eps, added_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_AFTER: tl.constexpr, HAS_BEFORE: tl.constexpr,
    AFTER_ROUNDS_FIRST: tl.constexpr, BEFORE_ROUNDS_FIRST: tl.constexpr,
    AFTER_IS_CENTERED: tl.constexpr, BEFORE_IS_CENTERED: tl.constexpr,
):  # fmt: skip
    """Grid (rows): sum = x + added_scale * after(added), out = before(sum). Without `added` the sum is x."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < WIDTH
    x = tl.load(x_ptr + row * x_row_stride + c, mask=live, other=0.0)
    if HAS_ADDED:
        added = tl.load(added_ptr + row * added_row_stride + c, mask=live, other=0.0)
        if HAS_AFTER:
            added = _normed(added, after_ptr, c, live, after_eps, WIDTH, AFTER_ROUNDS_FIRST, AFTER_IS_CENTERED)
        if HAS_SCALE:
            added = (added.to(tl.float32) * added_scale).to(x.dtype)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * WIDTH + c, x, mask=live)
    if HAS_BEFORE:
        normed = _normed(x, before_ptr, c, live, before_eps, WIDTH, BEFORE_ROUNDS_FIRST, BEFORE_IS_CENTERED)
        tl.store(out_ptr + row * WIDTH + c, normed, mask=live)


# -- activations -----------------------------------------------------------------------------------------------------


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """In float32. Numbered as in `protocol.py`."""
    if ACTIVATION == SILU:
        return x * tl.sigmoid(x)
    if ACTIVATION == GELU_TANH:  # 0.5 (1 + tanh(u)) is sigmoid(2u)
        return x * tl.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x))
    if ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067812))
    return tl.sigmoid(x)


@triton.jit
def activate(x_ptr, out_ptr, x_row_stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of WIDTH)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row_stride + c, mask=c < WIDTH, other=0.0)
    tl.store(out_ptr + row * WIDTH + c, _activated(x.to(tl.float32), ACTIVATION).to(x.dtype), mask=c < WIDTH)


@triton.jit
def _at_most(x, limit):
    """A number that is none stays none."""
    return tl.where(x > limit, limit, x)


@triton.jit
def gate(
    gate_up_ptr, out_ptr, gate_up_row_stride, limit, steepness, added,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, IS_STEEP: tl.constexpr, CUTS: tl.constexpr,
    IS_CUT_AFTER: tl.constexpr, BY_TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of WIDTH): of the gates and others of a row, as `protocol.Gating` says."""
    row_ptr = gate_up_ptr + tl.program_id(0).to(tl.int64) * gate_up_row_stride
    start = tl.program_id(1) * BLOCK
    c = start + tl.arange(0, BLOCK)
    if BY_TURNS:
        n = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(row_ptr + n, mask=n < 2 * WIDTH, other=0.0)
        gates, others = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        gates = tl.load(row_ptr + c, mask=c < WIDTH, other=0.0)
        others = tl.load(row_ptr + WIDTH + c, mask=c < WIDTH, other=0.0)
    wide, up = gates.to(tl.float32), others.to(tl.float32)
    if CUTS:
        up = -_at_most(-_at_most(up, limit), limit)
        if not IS_CUT_AFTER:
            wide = _at_most(wide, limit)
    # Each step is rounded, as transformers does it.
    if IS_STEEP:
        share = tl.sigmoid((steepness * wide).to(gates.dtype).to(tl.float32))
        wide = wide * share.to(gates.dtype).to(tl.float32)
    else:
        wide = _activated(wide, ACTIVATION)
    wide = wide.to(gates.dtype).to(tl.float32)
    up = (up + added).to(gates.dtype).to(tl.float32)
    if CUTS and IS_CUT_AFTER:
        wide = _at_most(wide, limit)
    out_ptr += tl.program_id(0).to(tl.int64) * WIDTH
    tl.store(out_ptr + c, (wide * up).to(gates.dtype), mask=c < WIDTH)


# -- queries and keys ------------------------------------------------------------------------------------------------


@triton.jit
def _prepare(
    from_ptr, to_ptr, to_head_stride, first_head, scale_ptr, cos_ptr, sin_ptr, factor_ptr, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    NORM_WIDTH: tl.constexpr, ROUNDS_FIRST: tl.constexpr, HAS_FACTOR: tl.constexpr,
    TURNED: tl.constexpr, TURNED_PADDED: tl.constexpr, STEP: tl.constexpr,
    PARTNER: tl.constexpr, ANGLE_PARTNER: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one token, normed and rotated.

    NORM_WIDTH      numbers that are normed together: none, a head's, or those of all heads
    TURNED          pairs of numbers that are rotated
    STEP, PARTNER   from a pair to the next, and from the first number of a pair to its other
    ANGLE_PARTNER   the same among the angles
    """
    h = first_head + tl.arange(0, BLOCK)[:, None]
    i = tl.arange(0, TURNED_PADDED)[None, :]
    r = 2 * TURNED + tl.arange(0, REST_PADDED)[None, :]
    head = from_ptr + h * HEAD_DIM
    is_pair, is_rest = (h < HEADS) & (i < TURNED), (h < HEADS) & (r < HEAD_DIM)
    low = tl.load(head + i * STEP, mask=is_pair, other=0.0)
    high = tl.load(head + i * STEP + PARTNER, mask=is_pair, other=0.0)
    rest = tl.load(head + r, mask=is_rest, other=0.0)
    if NORM_WIDTH > 0:
        a, b, c = low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)
        squares = tl.sum(a * a + b * b, 1) + tl.sum(c * c, 1)
        scales = scale_ptr + h * 0
        if NORM_WIDTH > HEAD_DIM:
            squares = tl.zeros((BLOCK,), tl.float32) + tl.sum(squares, 0)
            scales += h * HEAD_DIM
        shrink = tl.rsqrt(squares / NORM_WIDTH + eps)[:, None]
        low_scale = tl.load(scales + i * STEP, mask=is_pair, other=0.0)
        high_scale = tl.load(scales + i * STEP + PARTNER, mask=is_pair, other=0.0)
        rest_scale = tl.load(scales + r, mask=is_rest, other=0.0)
        low = _scaled(low, shrink, low_scale, ROUNDS_FIRST, low.dtype)
        high = _scaled(high, shrink, high_scale, ROUNDS_FIRST, high.dtype)
        rest = _scaled(rest, shrink, rest_scale, ROUNDS_FIRST, rest.dtype)
    if TURNED > 0:
        cos, sin = cos_ptr + i * STEP, sin_ptr + i * STEP
        cos_low = tl.load(cos, mask=i < TURNED, other=0.0).to(tl.float32)
        sin_low = tl.load(sin, mask=i < TURNED, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + ANGLE_PARTNER, mask=i < TURNED, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + ANGLE_PARTNER, mask=i < TURNED, other=0.0).to(tl.float32)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = (a * cos_low - b * sin_low).to(low.dtype), (b * cos_high + a * sin_high).to(low.dtype)
    if HAS_FACTOR:
        factor = tl.load(factor_ptr)
        low = (low.to(tl.float32) * factor).to(low.dtype)
        high = (high.to(tl.float32) * factor).to(high.dtype)
        rest = (rest.to(tl.float32) * factor).to(rest.dtype)
    # Where a head is changed in place, no thread may read what another has written.
    tl.debug_barrier()
    to = to_ptr + h * to_head_stride
    tl.store(to + i * STEP, low, mask=is_pair)
    tl.store(to + i * STEP + PARTNER, high, mask=is_pair)
    tl.store(to + r, rest, mask=is_rest)


@triton.jit
def prepare_heads(
    tokens_ptr, pages_ptr, page_ptr, offset_ptr, query_scale_ptr, key_scale_ptr, cos_ptr, sin_ptr, query_factor_ptr,
    token_stride, page_stride, place_stride, head_stride, cos_token_stride, sin_token_stride, query_eps, key_eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
    QUERY_NORM_WIDTH: tl.constexpr, KEY_NORM_WIDTH: tl.constexpr,
    QUERY_ROUNDS_FIRST: tl.constexpr, KEY_ROUNDS_FIRST: tl.constexpr,
    TURNED: tl.constexpr, TURNED_PADDED: tl.constexpr, STEP: tl.constexpr,
    PARTNER: tl.constexpr, ANGLE_PARTNER: tl.constexpr, REST_PADDED: tl.constexpr,
    HAS_FACTOR: tl.constexpr, WRITES: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of query heads, then of key heads): in place. If it WRITES, keys go into their pages instead, and
    with them the values behind them."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    queries = tokens_ptr + token * token_stride
    cos, sin = cos_ptr + token * cos_token_stride, sin_ptr + token * sin_token_stride
    QUERY_BLOCKS: tl.constexpr = (HEADS + QUERY_BLOCK - 1) // QUERY_BLOCK
    if block < QUERY_BLOCKS:
        _prepare(
            queries, queries, HEAD_DIM, block * QUERY_BLOCK, query_scale_ptr, cos, sin, query_factor_ptr + token,
            query_eps, HEADS, QUERY_BLOCK, HEAD_DIM, QUERY_NORM_WIDTH, QUERY_ROUNDS_FIRST, HAS_FACTOR,
            TURNED, TURNED_PADDED, STEP, PARTNER, ANGLE_PARTNER, REST_PADDED,
        )  # fmt: skip
    else:
        keys = queries + HEADS * HEAD_DIM
        first_head = (block - QUERY_BLOCKS) * KEY_BLOCK
        to, to_head_stride = keys, HEAD_DIM
        if WRITES:
            to = pages_ptr + tl.load(page_ptr + token) * page_stride + tl.load(offset_ptr + token) * place_stride
            to_head_stride = head_stride
        _prepare(
            keys, to, to_head_stride, first_head, key_scale_ptr, cos, sin, query_factor_ptr,
            key_eps, KV_HEADS, KEY_BLOCK, HEAD_DIM, KEY_NORM_WIDTH, KEY_ROUNDS_FIRST, False,
            TURNED, TURNED_PADDED, STEP, PARTNER, ANGLE_PARTNER, REST_PADDED,
        )  # fmt: skip
        if WRITES:
            h = first_head + tl.arange(0, KEY_BLOCK)[:, None]
            e = tl.arange(0, VALUE_PADDED)[None, :]
            live = (h < KV_HEADS) & (e < VALUE_DIM)
            value = tl.load(keys + KV_HEADS * HEAD_DIM + h * VALUE_DIM + e, mask=live)
            tl.store(to + h * head_stride + HEAD_DIM + e, value, mask=live)
