"""Products of tokens with weights in fewer bits, in Triton: a program unpacks a tile just before its rows meet it.

The numbers of a tile are those of `Codes.numbers`, computed in float32 and rounded once, and they are summed as in
`triton_kernels.py`: in the same cuts, in the same order. So a result has the bits that the expanded weight would give.

A tile's codes lie in one piece of memory, and its scales lie along the outputs:

    codes [G, blocks, O, bytes of a block]      scales, zero points [G, groups of columns, O]

Floats of few bits become float16 by moving their bits, which is exact for numbers below the least normal one too; what
the exponents differ by is a power of two. Integers are put into the lowest bits of 2^23, which no conversion needs.

Suffixes in comments: R rows    I inputs    O outputs    G groups of rows, each with its weight    N rows of all groups
"""

import triton
import triton.language as tl

from .triton_kernels import _rows_from, _tile_of

# As `codes.py` counts kinds. Scales are numbers, floats of 8 bits, or powers of two.
E2M1 = tl.constexpr(1)
INT8 = tl.constexpr(2)
E4M3 = tl.constexpr(3)
SCALE_E4M3 = tl.constexpr(1)
SCALE_POWER = tl.constexpr(2)


@triton.jit
def _e4m3(code):
    """int32 -> float32"""
    moved = ((code & 128) << 8) | ((code & 127) << 7)
    number = moved.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 127) == 127, float("nan"), number)


@triton.jit
def _opened(code, KIND: tl.constexpr):
    """int32 codes -> float32, each by itself"""
    if KIND == E4M3:
        number = _e4m3(code)
    elif KIND == E2M1:
        moved = ((code & 8) << 12) | ((code & 7) << 9)
        number = moved.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif KIND == INT8:
        number = ((code ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return number


@triton.jit
def _scale(stored, SCALE_KIND: tl.constexpr):
    """As stored -> float32"""
    if SCALE_KIND == SCALE_E4M3:
        scale = _e4m3(stored.to(tl.int32))
    elif SCALE_KIND == SCALE_POWER:
        power = stored.to(tl.int32)
        bits = tl.where(power == 0, 0x00400000, power << 23)
        scale = tl.where(power == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _numbers(
    codes, scales, zeros, factor, at, o, is_output, outputs, dtype: tl.constexpr,
    KIND: tl.constexpr, EACH: tl.constexpr, MIDDLE: tl.constexpr, SCALE_KIND: tl.constexpr, HAS_ZERO: tl.constexpr,
    FACTOR: tl.constexpr, COLUMNS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, RUN: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a block of columns from `at` on, [BLOCK,OUTPUTS]. RUN columns side by side share a scale, if not more."""
    # Codes as they lie: of four bits, the even column's are the low ones.
    b = tl.arange(0, BLOCK // EACH)
    line = o.to(tl.int64) + (at // BLOCK) * outputs
    raw = tl.load(codes + line[:, None] * (BLOCK // EACH) + b[None, :], mask=is_output[:, None], other=0).to(tl.int32)
    code = tl.interleave(raw & 15, raw >> 4) if EACH == 2 else raw
    # What a run shares, as [OUTPUTS,runs]. Beyond the last column there is none.
    group = (at + tl.arange(0, BLOCK // RUN) * RUN + OFFSET) // COLUMNS
    place = group.to(tl.int64)[None, :] * outputs + o[:, None]
    is_there = is_output[:, None] & (group < SCALES)[None, :]
    scale = _scale(tl.load(scales + place, mask=is_there, other=0), SCALE_KIND)
    if FACTOR == 1:
        scale *= factor[:, None]
    elif FACTOR == 2:
        scale = tl.div_rn(scale, tl.broadcast_to(factor[:, None], scale.shape))
    # As in `Codes.numbers`: (code - zero) * scale, rounded once.
    number = tl.reshape(_opened(code, KIND), (OUTPUTS, BLOCK // RUN, RUN))
    if HAS_ZERO:
        number -= tl.load(zeros + place, mask=is_there, other=0).to(tl.float32)[:, :, None]
    if MIDDLE != 0:
        number -= MIDDLE
    number *= scale[:, :, None]
    return tl.trans(tl.reshape(number.to(dtype), (OUTPUTS, BLOCK)))


@triton.jit
def unpacked_product(
    x_ptr, code_ptr, scale_ptr, zero_ptr, factor_ptr, order_ptr, bias_ptr, out_ptr, parts_ptr, first_ptr, token_ptr,
    count, outputs, groups, x_stride,
    KIND: tl.constexpr, EACH: tl.constexpr, MIDDLE: tl.constexpr, SCALE_KIND: tl.constexpr, HAS_ZERO: tl.constexpr,
    FACTOR: tl.constexpr, HAS_ORDER: tl.constexpr, COLUMNS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    RUN: tl.constexpr,
    INPUTS: tl.constexpr, CUT: tl.constexpr, GROUPS_PADDED: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`product` of weights in fewer bits. Grid (tiles of rows, O / OUTPUTS, cuts if IS_CUT).

    x [R,I]  code, scale, zero: see above  factor [G,O] float32  order [I] int64: which column of x meets each
    EACH: codes of a byte  SCALES: groups of columns  FACTOR: 0 none, 1 scales are multiplied with it, 2 divided by it
    """
    # Which rows of which group, and which outputs.
    tile = tl.program_id(0)
    group, row, end = 0, tile * ROWS, count
    if GROUPS_PADDED > 0:
        group, row, end = _tile_of(tile, first_ptr, groups, GROUPS_PADDED, ROWS)
        if row >= end:
            return
    n, is_row, x_rows = _rows_from(row, end, x_ptr, token_ptr, x_stride, HAS_TOKENS, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    is_output = o < outputs
    # Where the group's weight lies.
    before = (group.to(tl.int64) if GROUPS_PADDED > 0 else 0) * outputs
    BLOCKS: tl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    codes, scales, zeros = code_ptr + before * BLOCKS * (BLOCK // EACH), scale_ptr + before * SCALES, zero_ptr
    if HAS_ZERO:
        zeros += before * SCALES
    factor = tl.full((OUTPUTS,), 1.0, tl.float32)
    if FACTOR > 0:
        factor = tl.load(factor_ptr + before + o, mask=is_output, other=1.0)
    # Cuts are summed by themselves, and added up in their order: here, or by `add_cuts`.
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    first_cut = tl.program_id(2) * CUT if IS_CUT else 0
    last = tl.minimum(first_cut + CUT, INPUTS) if IS_CUT else INPUTS
    for begin in range(first_cut, last, CUT):
        part = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for at in range(begin, tl.minimum(begin + CUT, INPUTS), BLOCK):
            column = at + k
            if HAS_ORDER:
                column = tl.load(order_ptr + at + k, mask=at + k < INPUTS, other=0)
            x = tl.load(x_rows + column[None, :], mask=is_row[:, None] & (at + k < INPUTS)[None, :], other=0.0)
            w = _numbers(
                codes, scales, zeros, factor, at, o, is_output, outputs, x.dtype, KIND, EACH, MIDDLE, SCALE_KIND,
                HAS_ZERO, FACTOR, COLUMNS, OFFSET, SCALES, RUN, OUTPUTS, BLOCK,
            )  # fmt: skip
            part = tl.dot(x, w, part, input_precision=PRECISION)
        total += part
    own = is_row[:, None] & is_output[None, :]
    place = n.to(tl.int64)[:, None] * outputs + o[None, :]
    if IS_CUT:
        tl.store(parts_ptr + tl.program_id(2).to(tl.int64) * count * outputs + place, total, mask=own)
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + group * outputs + o, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=own)
