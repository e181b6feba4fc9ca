"""Products of tokens with constant weights, in Triton: each output is summed in an order that its weight alone gives.

The inputs of a weight are cut at fixed places. A cut is summed from its first input to its last, and the cuts are added
up in their order: by one program that goes through all of them, where rows give work enough, or by one program for each
cut, where there are few. Both come to the same numbers.

    inputs   0 .. 1023   1024 .. 2047   2048 .. 3071        out = ((0 + first) + second) + third

Suffixes in comments: R rows    I inputs    O outputs    G groups, each with its weight    N rows of all groups
"""

import triton
import triton.language as tl


@triton.jit
def _tile_of(tile, first_ptr, groups, GROUPS_PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile among those of all groups: its group, its first row, the end of its group's rows. Beyond the last tile:
    no rows."""
    g = tl.arange(0, GROUPS_PADDED)
    begin = tl.load(first_ptr + g, mask=g < groups, other=0).to(tl.int32)
    end = tl.load(first_ptr + g + 1, mask=g < groups, other=0).to(tl.int32)
    tiles = (end - begin + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, 0) - tiles
    own = (before <= tile) & (tile < before + tiles)
    group = tl.sum(tl.where(own, g, 0), 0)
    row = tl.sum(tl.where(own, begin + (tile - before) * ROWS, 0), 0)
    return group, row, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def _part(
    x_rows, weights, is_row, is_output, k, begin,
    CUT: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over one cut, from its first input to its last."""
    part = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for at in range(begin, tl.minimum(begin + CUT, INPUTS), BLOCK):
        x = tl.load(x_rows + (at + k)[None, :], mask=is_row[:, None] & (at + k < INPUTS)[None, :], other=0.0)
        w = tl.load(weights + (at + k)[:, None], mask=is_output[None, :] & (at + k < INPUTS)[:, None], other=0.0)
        part = tl.dot(x, w, part, input_precision=PRECISION)
    return part


@triton.jit
def _rows_from(row, end, x_ptr, token_ptr, x_stride, HAS_TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """A tile's rows among those of all groups, which of them there are, and where they lie in x."""
    n = row + tl.arange(0, ROWS)
    is_row = n < end
    token = n
    if HAS_TOKENS:
        token = tl.load(token_ptr + n, mask=is_row, other=0)
    return n, is_row, x_ptr + token.to(tl.int64)[:, None] * x_stride


@triton.jit
def product(
    x_ptr, weight_ptr, bias_ptr, out_ptr, parts_ptr, first_ptr, token_ptr, count, outputs, groups, x_stride,
    INPUTS: tl.constexpr, CUT: tl.constexpr, GROUPS_PADDED: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, O / OUTPUTS, cuts if IS_CUT).

    x [R,I]  weight [G,O,I]  bias [G,O]  out [N,O]  parts [cuts,N,O] float32  first [G+1]  token [N]: row of x
    GROUPS_PADDED: 0 if there is one group, of `count` rows
    """
    tile = tl.program_id(0)
    group, row, end = 0, tile * ROWS, count
    if GROUPS_PADDED > 0:
        group, row, end = _tile_of(tile, first_ptr, groups, GROUPS_PADDED, ROWS)
        if row >= end:
            return
    n, is_row, x_rows = _rows_from(row, end, x_ptr, token_ptr, x_stride, HAS_TOKENS, ROWS)
    first_output = tl.program_id(1) * OUTPUTS
    o = first_output + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    is_output = o < outputs
    weights = weight_ptr + (group.to(tl.int64) if GROUPS_PADDED > 0 else 0) * outputs * INPUTS
    weights += first_output.to(tl.int64) * INPUTS
    weights += tl.arange(0, OUTPUTS)[None, :] * INPUTS  # within a tile 32 bits are enough, in fewer registers
    place = n.to(tl.int64)[:, None] * outputs + o[None, :]
    own = is_row[:, None] & is_output[None, :]
    if IS_CUT:
        cut = tl.program_id(2)
        part = _part(x_rows, weights, is_row, is_output, k, cut * CUT, CUT, INPUTS, ROWS, OUTPUTS, BLOCK, PRECISION)
        tl.store(parts_ptr + cut.to(tl.int64) * count * outputs + place, part, mask=own)
    else:
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for begin in range(0, INPUTS, CUT):
            total += _part(x_rows, weights, is_row, is_output, k, begin, CUT, INPUTS, ROWS, OUTPUTS, BLOCK, PRECISION)
        if HAS_BIAS:
            total += tl.load(bias_ptr + group * outputs + o, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=own)


@triton.jit
def add_cuts(
    parts_ptr, bias_ptr, out_ptr, first_ptr, count, outputs, groups,
    CUTS: tl.constexpr, GROUPS_PADDED: tl.constexpr, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Grid (N, O / OUTPUTS). Cuts of a row are added up in their order, from zero as in `product`."""
    n = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS,), tl.float32)
    for cut in tl.static_range(0, CUTS):
        total += tl.load(parts_ptr + (cut * count + n) * outputs + o, mask=o < outputs, other=0.0)
    if HAS_BIAS:
        group = 0
        if GROUPS_PADDED > 0:
            g = tl.arange(0, GROUPS_PADDED)
            ends = tl.load(first_ptr + g + 1, mask=g < groups, other=count).to(tl.int64)
            group = tl.sum((ends <= n).to(tl.int32), 0)
        total += tl.load(bias_ptr + group * outputs + o, mask=o < outputs, other=0.0).to(tl.float32)
    tl.store(out_ptr + n * outputs + o, total.to(out_ptr.dtype.element_ty), mask=o < outputs)


@triton.jit
def combine(
    x_ptr, row_ptr, share_ptr, out_ptr, width, row_stride, share_stride, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of x, added up by their shares. Grid (R, D / BLOCK).  x [N,D]  row, share [R,EXPERTS]  out [R,D]"""
    r = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for e in tl.static_range(0, EXPERTS):
        row = tl.load(row_ptr + r * row_stride + e).to(tl.int64)
        share = tl.load(share_ptr + r * share_stride + e).to(tl.float32)
        total += tl.load(x_ptr + row * width + d, mask=d < width, other=0.0).to(tl.float32) * share
    tl.store(out_ptr + r.to(tl.int64) * width + d, total.to(out_ptr.dtype.element_ty), mask=d < width)


@triton.jit
def sort_rows(
    group_ptr, first_ptr, token_ptr, place_ptr, count, groups,
    PICKS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of one group side by side, in the order in which they come. One program, which counts, then places.

    group [N]: of each row  first [G+1]  token [N]: which PICKS neighbours each place came from  place [N]: of each row
    """
    g = tl.arange(0, GROUPS_PADDED)
    n = tl.arange(0, BLOCK)
    rows_of = tl.zeros((GROUPS_PADDED,), tl.int32)
    for at in range(0, count, BLOCK):
        group = tl.load(group_ptr + at + n, mask=at + n < count, other=-1)
        rows_of += tl.sum((group[:, None] == g[None, :]).to(tl.int32), 0)
    end = tl.cumsum(rows_of, 0)
    tl.store(first_ptr + g + 1, end.to(tl.int64), mask=g < groups)
    tl.store(first_ptr + g, (end - rows_of).to(tl.int64), mask=g == 0)
    next_place = end - rows_of
    for at in range(0, count, BLOCK):
        group = tl.load(group_ptr + at + n, mask=at + n < count, other=-1)
        is_own = (group[:, None] == g[None, :]).to(tl.int32)
        place = tl.sum((tl.cumsum(is_own, 0) - 1 + next_place[None, :]) * is_own, 1)
        tl.store(place_ptr + at + n, place.to(tl.int64), mask=at + n < count)
        tl.store(token_ptr + place, ((at + n) // PICKS).to(tl.int64), mask=at + n < count)
        next_place += tl.sum(is_own, 0)
