"""Products of tokens with weights in fewer bits, in Triton: a program unpacks a tile just before its rows meet it.

The numbers of a tile are those of `Codes.numbers`, computed in float32 and rounded once, and they are summed as in
`triton_kernels.py`: in the same cuts, in the same order. So a result has the bits that the expanded weight would give.
One or two rows have a kernel of their own, `product_of_few`, without matrix instructions: it leaves the numbers in
float32 and sums columns that lie apart. For many rows `expand` writes the numbers down, for torch's product.

A tile's codes lie in one piece of memory, and its scales lie along the outputs:

    codes [G, blocks, O, words of a block]      scales, zero points [G, groups of columns, O]

A word is 32 bits: 4 codes of 8 bits, or 8 of 4. The first code of every word of a block comes first, then the second of
every word, and so on: words are opened side by side, and what comes of it are columns side by side.

    a block of 64 columns, codes of 8 bits: 16 words        word 0: columns 0, 16, 32, 48      word 1: 1, 17, 33, 49

Floats of few bits become float16 by moving the bits of two at once, which is exact for numbers below the least normal
one too; what the exponents differ by is a power of two, and is multiplied into the scales where these are not so large
that they would overflow. Integers are put into the lowest bits of 2^23, which no conversion needs; what is subtracted
from them takes that off, too.

Suffixes in comments: R rows    I inputs    O outputs    G groups of rows, each with its weight    N rows of all groups
"""

import triton
import triton.language as tl

from .triton_kernels import _rows_from, _tile_of

# As `codes.py` counts kinds. Scales are numbers, floats of 8 bits, or powers of two.
INT4 = tl.constexpr(0)
E2M1 = tl.constexpr(1)
INT8 = tl.constexpr(2)
E4M3 = tl.constexpr(3)
SCALE_E4M3 = tl.constexpr(1)
SCALE_POWER = tl.constexpr(2)
MAGIC = tl.constexpr(8388608.0)  # 2^23


@triton.jit
def _e4m3(code):
    """int32 -> float32"""
    moved = ((code & 128) << 8) | ((code & 127) << 7)
    number = moved.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 127) == 127, float("nan"), number)


@triton.jit
def _half(pair, IS_HIGH: tl.constexpr):
    """One of two float16 of a word -> float32"""
    half = pair >> 16 if IS_HIGH else pair & 0xFFFF
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _integer(word, base, N: tl.constexpr, BITS: tl.constexpr):
    """Code N of every word, less `base`. Its bits stay where they are in half a word, as those of a float."""
    half = word >> 16 if N * BITS >= 16 else word
    AT: tl.constexpr = N * BITS % 16
    number = ((half & (((1 << BITS) - 1) << AT)) | 0x4B000000).to(tl.float32, bitcast=True)
    UNIT: tl.constexpr = 1.0 / (1 << AT)
    return number * UNIT - (MAGIC * UNIT + base)


@triton.jit
def _opened(word, base, N: tl.constexpr, KIND: tl.constexpr, HAS_BASE: tl.constexpr, HAS_NAN: tl.constexpr):
    """Code N of every word less `base`, uint32 -> float32. HAS_BASE: of floats, which are else divided by `_unit`."""
    if KIND == E4M3:
        shifted = word >> 8 if N % 2 == 1 else word
        pair = ((shifted & 0x00800080) << 8) | ((shifted & 0x007F007F) << 7)
        number = _half(pair, N >= 2)
        if HAS_NAN:
            number = tl.where(((word >> (8 * N)) & 127) == 127, float("nan"), number)
    elif KIND == E2M1:
        shifted = word >> (4 * (N % 4)) if N % 4 > 0 else word
        pair = ((shifted & 0x00080008) << 12) | ((shifted & 0x00070007) << 9)
        number = _half(pair, N >= 4)
    else:
        number = _integer(word, base, N, 4 if KIND == INT4 else 8)
    if HAS_BASE:
        number = number * _unit(KIND) - base
    return number


@triton.jit
def _unit(KIND: tl.constexpr):
    """What a number opened is to be multiplied with."""
    return 256.0 if KIND == E4M3 else 16384.0 if KIND == E2M1 else 1.0


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
def _base(KIND: tl.constexpr, MIDDLE: tl.constexpr):
    """What is subtracted from all codes. The highest bit of INT8 is turned, so that the least code is 0."""
    return MIDDLE + 128.0 if KIND == INT8 else MIDDLE + 0.0


@triton.jit
def _scales(
    scales, factor, place, is_there,
    KIND: tl.constexpr, SCALE_KIND: tl.constexpr, FACTOR: tl.constexpr, HAS_BASE: tl.constexpr,
):  # fmt: skip
    """Of groups at `place`, as opened numbers are to be multiplied with them."""
    scale = _scale(tl.load(scales + place, mask=is_there, other=0), SCALE_KIND)
    if FACTOR == 1:
        scale *= factor
    elif FACTOR == 2:
        scale = tl.div_rn(scale, tl.broadcast_to(factor, scale.shape))
    return scale if HAS_BASE else scale * _unit(KIND)


@triton.jit
def _numbers(
    codes, scales, zeros, factor, at, o, is_output, outputs, dtype: tl.constexpr,
    KIND: tl.constexpr, EACH: tl.constexpr, MIDDLE: tl.constexpr, SCALE_KIND: tl.constexpr, HAS_ZERO: tl.constexpr,
    FACTOR: tl.constexpr, COLUMNS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, RUN: tl.constexpr,
    HAS_BASE: tl.constexpr, HAS_NAN: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a block of columns from `at` on, [BLOCK,OUTPUTS]. RUN columns side by side share a scale, if not more."""
    w = tl.arange(0, BLOCK // EACH)
    line = o.to(tl.int64) + (at // BLOCK) * outputs
    word = tl.load(codes + line[:, None] * (BLOCK // EACH) + w[None, :], mask=is_output[:, None], other=0)
    word = word.to(tl.uint32, bitcast=True)
    # The codes of a word come apart, each into columns of its own.
    base = _base(KIND, MIDDLE)
    first = tl.join(
        _opened(word, base, 0, KIND, HAS_BASE, HAS_NAN), _opened(word, base, 1, KIND, HAS_BASE, HAS_NAN)
    )  # fmt: skip
    second = tl.join(
        _opened(word, base, 2, KIND, HAS_BASE, HAS_NAN), _opened(word, base, 3, KIND, HAS_BASE, HAS_NAN)
    )  # fmt: skip
    number = tl.join(first, second)
    if EACH == 8:
        third = tl.join(
            _opened(word, base, 4, KIND, HAS_BASE, HAS_NAN), _opened(word, base, 5, KIND, HAS_BASE, HAS_NAN)
        )  # fmt: skip
        fourth = tl.join(
            _opened(word, base, 6, KIND, HAS_BASE, HAS_NAN), _opened(word, base, 7, KIND, HAS_BASE, HAS_NAN)
        )  # fmt: skip
        number = tl.permute(tl.join(number, tl.join(third, fourth)), (0, 4, 3, 2, 1))
    else:
        number = tl.permute(number, (0, 3, 2, 1))
    number = tl.reshape(number, (OUTPUTS, BLOCK // RUN, RUN))
    # As in `Codes.numbers`: (code - zero) * scale, rounded once. Beyond the last column there is no group.
    group = (at + tl.arange(0, BLOCK // RUN) * RUN + OFFSET) // COLUMNS
    place = group.to(tl.int64)[None, :] * outputs + o[:, None]
    is_there = is_output[:, None] & (group < SCALES)[None, :]
    if HAS_ZERO:
        number -= tl.load(zeros + place, mask=is_there, other=0).to(tl.float32)[:, :, None]
    number *= _scales(scales, factor[:, None], place, is_there, KIND, SCALE_KIND, FACTOR, HAS_BASE)[:, :, None]
    return tl.trans(tl.reshape(number.to(dtype), (OUTPUTS, BLOCK)))


@triton.jit
def unpacked_product(
    x_ptr, code_ptr, scale_ptr, zero_ptr, factor_ptr, order_ptr, bias_ptr, out_ptr, parts_ptr, first_ptr, token_ptr,
    count, outputs, groups, x_stride,
    KIND: tl.constexpr, EACH: tl.constexpr, MIDDLE: tl.constexpr, SCALE_KIND: tl.constexpr, HAS_ZERO: tl.constexpr,
    FACTOR: tl.constexpr, HAS_ORDER: tl.constexpr, COLUMNS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    RUN: tl.constexpr, HAS_BASE: tl.constexpr, HAS_NAN: tl.constexpr,
    INPUTS: tl.constexpr, CUT: tl.constexpr, GROUPS_PADDED: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`product` of weights in fewer bits. Grid (tiles of rows, O / OUTPUTS, cuts if IS_CUT).

    x [R,I]  code, scale, zero: see above  factor [G,O] float32  order [I] int64: which column of x meets each
    EACH: codes of a word  SCALES: groups of columns  FACTOR: 0 none, 1 scales are multiplied with it, 2 divided by it
    HAS_BASE: something is subtracted from codes that are floats, or their scales are too large for their power of two
    HAS_NAN: some codes are no number
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
                HAS_ZERO, FACTOR, COLUMNS, OFFSET, SCALES, RUN, HAS_BASE, HAS_NAN, OUTPUTS, BLOCK,
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


@triton.jit
def expand(
    code_ptr, scale_ptr, zero_ptr, factor_ptr, order_ptr, out_ptr, start, stop, outputs,
    KIND: tl.constexpr, EACH: tl.constexpr, MIDDLE: tl.constexpr, SCALE_KIND: tl.constexpr, HAS_ZERO: tl.constexpr,
    FACTOR: tl.constexpr, HAS_ORDER: tl.constexpr, COLUMNS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    RUN: tl.constexpr, HAS_BASE: tl.constexpr, HAS_NAN: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers of outputs [start, stop) of the first group, out [stop - start,I]. Grid (O / OUTPUTS, blocks)."""
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    o = start + row
    is_output = o < stop
    at = tl.program_id(1) * BLOCK
    column = at + tl.arange(0, BLOCK)
    is_there = is_output[None, :] & (column < INPUTS)[:, None]
    factor = tl.full((OUTPUTS,), 1.0, tl.float32)
    if FACTOR > 0:
        factor = tl.load(factor_ptr + o, mask=is_output, other=1.0)
    number = _numbers(
        code_ptr, scale_ptr, zero_ptr, factor, at, o, is_output, outputs, out_ptr.dtype.element_ty, KIND, EACH, MIDDLE,
        SCALE_KIND, HAS_ZERO, FACTOR, COLUMNS, OFFSET, SCALES, RUN, HAS_BASE, HAS_NAN, OUTPUTS, BLOCK,
    )  # fmt: skip
    if HAS_ORDER:
        column = tl.load(order_ptr + column, mask=column < INPUTS, other=0)
    tl.store(out_ptr + row.to(tl.int64)[None, :] * INPUTS + column[:, None], number, mask=is_there)


@triton.jit
def _row(row, end, x_ptr, token_ptr, x_stride, HAS_TOKENS: tl.constexpr):
    """Where a row lies in x. Beyond the last one: the last one again, which costs nothing and is not stored."""
    token = tl.minimum(row, end - 1)
    if HAS_TOKENS:
        token = tl.load(token_ptr + token)
    return x_ptr + token.to(tl.int64) * x_stride


@triton.jit
def _give(out_ptr, row, end, outputs, o, is_output, sums):
    own = is_output & (row + 0 * o < end)
    tl.store(out_ptr + row.to(tl.int64) * outputs + o, sums.to(out_ptr.dtype.element_ty), mask=own)


@triton.jit
def _of_a_run(
    at, o, w, is_output, scales, zeros, factor, outputs,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, SCALE_KIND: tl.constexpr, HAS_ZERO: tl.constexpr, FACTOR: tl.constexpr,
    COLUMNS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, RUN: tl.constexpr, HAS_BASE: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """The scale of codes from `at` on, and what is subtracted of them: [O,1] where words share it, else [O,W]."""
    base = _base(KIND, MIDDLE)
    if RUN >= WORDS:
        shared = (at + OFFSET) // COLUMNS + 0 * o
        place = shared.to(tl.int64) * outputs + o
        is_there = is_output & (shared < SCALES)
        scale = _scales(scales, factor, place, is_there, KIND, SCALE_KIND, FACTOR, HAS_BASE)[:, None]
        if HAS_ZERO:
            base += tl.load(zeros + place, mask=is_there, other=0).to(tl.float32)[:, None]
    else:
        shared = (at + w + OFFSET) // COLUMNS
        place = shared.to(tl.int64)[None, :] * outputs + o[:, None]
        is_there = is_output[:, None] & (shared < SCALES)[None, :]
        scale = _scales(scales, factor[:, None], place, is_there, KIND, SCALE_KIND, FACTOR, HAS_BASE)
        if HAS_ZERO:
            base += tl.load(zeros + place, mask=is_there, other=0).to(tl.float32)
    return scale, base


@triton.jit
def product_of_few(
    x_ptr, code_ptr, scale_ptr, zero_ptr, factor_ptr, order_ptr, bias_ptr, out_ptr, parts_ptr, first_ptr, token_ptr,
    count, outputs, groups, x_stride,
    KIND: tl.constexpr, EACH: tl.constexpr, MIDDLE: tl.constexpr, SCALE_KIND: tl.constexpr, HAS_ZERO: tl.constexpr,
    FACTOR: tl.constexpr, HAS_ORDER: tl.constexpr, COLUMNS: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    RUN: tl.constexpr, HAS_BASE: tl.constexpr, HAS_NAN: tl.constexpr,
    INPUTS: tl.constexpr, CUT: tl.constexpr, GROUPS_PADDED: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_CUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`unpacked_product` of one or two rows a tile: numbers meet both, and columns are summed apart until the end. The
    numbers are not rounded. CUT: whole blocks."""
    tile = tl.program_id(0)
    group, row, end = 0, tile * ROWS, count
    if GROUPS_PADDED > 0:
        group, row, end = _tile_of(tile, first_ptr, groups, GROUPS_PADDED, ROWS)
        if row >= end:
            return
    x0 = _row(row, end, x_ptr, token_ptr, x_stride, HAS_TOKENS)
    x1 = _row(row + 1, end, x_ptr, token_ptr, x_stride, HAS_TOKENS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = o < outputs
    WORDS: tl.constexpr = BLOCK // EACH
    w = tl.arange(0, WORDS)
    # Where the group's weight lies.
    before = (group.to(tl.int64) if GROUPS_PADDED > 0 else 0) * outputs
    BLOCKS: tl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    codes, scales, zeros = code_ptr + before * BLOCKS * WORDS, scale_ptr + before * SCALES, zero_ptr
    if HAS_ZERO:
        zeros += before * SCALES
    factor = tl.full((OUTPUTS,), 1.0, tl.float32)
    if FACTOR > 0:
        factor = tl.load(factor_ptr + before + o, mask=is_output, other=1.0)
    sum0 = tl.zeros((OUTPUTS, WORDS), tl.float32)
    sum1 = sum0
    first_cut = tl.program_id(2) * CUT if IS_CUT else 0
    last = tl.minimum(first_cut + CUT, INPUTS) if IS_CUT else INPUTS
    # Words' codes with one scale are opened one after the other.
    SHARING: tl.constexpr = RUN // WORDS if RUN >= WORDS else 1
    for at in tl.range(first_cut, last, BLOCK, num_stages=STAGES):
        line = o.to(tl.int64) + (at // BLOCK) * outputs
        word = tl.load(codes + line[:, None] * WORDS + w[None, :], mask=is_output[:, None], other=0)
        word = word.to(tl.uint32, bitcast=True)
        for run in tl.static_range(0, EACH // SHARING):
            run_at = at + run * SHARING * WORDS
            scale, base = _of_a_run(
                run_at, o, w, is_output, scales, zeros, factor, outputs, KIND, MIDDLE, SCALE_KIND, HAS_ZERO, FACTOR,
                COLUMNS, OFFSET, SCALES, RUN, HAS_BASE, WORDS,
            )  # fmt: skip
            for n in tl.static_range(run * SHARING, (run + 1) * SHARING):
                number = _opened(word, base, n, KIND, HAS_BASE, HAS_NAN) * scale
                column = at + n * WORDS + w
                is_there = column < INPUTS
                if HAS_ORDER:
                    column = tl.load(order_ptr + column, mask=is_there, other=0)
                sum0 += number * tl.load(x0 + column, mask=is_there, other=0.0).to(tl.float32)[None, :]
                if ROWS > 1:
                    sum1 += number * tl.load(x1 + column, mask=is_there, other=0.0).to(tl.float32)[None, :]
    bias = tl.zeros((OUTPUTS,), tl.float32)
    if HAS_BIAS and not IS_CUT:
        bias += tl.load(bias_ptr + group * outputs + o, mask=is_output, other=0.0).to(tl.float32)
    if IS_CUT:
        out_ptr = parts_ptr + tl.program_id(2).to(tl.int64) * count * outputs
    _give(out_ptr, row, end, outputs, o, is_output, tl.sum(sum0, 1) + bias)
    if ROWS > 1:
        _give(out_ptr, row + 1, end, outputs, o, is_output, tl.sum(sum1, 1) + bias)
