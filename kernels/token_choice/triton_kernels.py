"""The choice in Triton: scores of index keys in pages, the best of them, and what is gathered of the chosen tokens.

    score         index heads times the keys of a tile, as one product, weighed and summed
    score_blocks  likewise, the highest of each block of tokens, for each head
    select        one program per choice: the score that so many reach, found by its digits; then who does, in order
    spread        the tokens of chosen blocks
    gather        entries of the chosen tokens side by side, a page for each choice

What there is to do follows from positions and tables on the device, so a recorded step chooses anew at each replay. No
sum depends on another query, so a query chooses the same in any company.

Suffixes in comments: N queries    R rows    I index heads    E size of an index key    L tokens of the longest row
                      B blocks of tokens    J choices of a query    K tokens of a choice    C numbers of an entry
"""

import triton
import triton.language as tl

DIGITS = tl.constexpr(256)
"""Of 8 bits. A score of 32 has four."""


@triton.jit
def _pages(table_ptr, starts_ptr, row, width, token, live, PAGE: tl.constexpr, HAS_STARTS: tl.constexpr):
    """int64: in which pages tokens of a row lie."""
    start = tl.load(starts_ptr + row) if HAS_STARTS else row.to(tl.int64) * width
    return tl.load(table_ptr + start + token // PAGE, mask=live, other=0).to(tl.int64)


@triton.jit
def score(
    q_ptr, keys_ptr, weights_ptr, table_ptr, starts_ptr, positions_ptr, scores_ptr,
    each, width, page_stride, token_stride, scores_stride,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, MOST: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, any): tiles of one query's row, each by one of the programs. Nothing is scored for queries that see no
    more than they choose. Strides in items.

    q [N,I,E]  keys [pages,tokens,E]  weights [N,I] float32  positions [N] int64  scores [N,L] float32
    each: queries of a row    width: pages of a row of the table, or with HAS_STARTS starts [R] int64
    """
    n = tl.program_id(0)
    seen = (tl.load(positions_ptr + n) + 1).to(tl.int32)
    if seen <= MOST:
        return
    i = tl.arange(0, HEADS_PADDED)
    e = tl.arange(0, SIZE_PADDED)
    k = tl.arange(0, KEYS)
    own = (i < HEADS)[:, None] & (e < SIZE)[None, :]
    q = tl.load(q_ptr + n.to(tl.int64) * HEADS * SIZE + i[:, None] * SIZE + e[None, :], mask=own, other=0.0)
    weights = tl.load(weights_ptr + n * HEADS + i, mask=i < HEADS, other=0.0)
    for tile in range(tl.program_id(1), tl.cdiv(seen, KEYS), tl.num_programs(1)):
        token = tile * KEYS + k
        live = token < seen
        page = _pages(table_ptr, starts_ptr, n // each, width, token, live, PAGE, HAS_STARTS)
        at = keys_ptr + page * page_stride + (token % PAGE) * token_stride
        keys = tl.load(at[:, None] + e[None, :], mask=live[:, None] & (e < SIZE)[None, :], other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(keys), input_precision=PRECISION), 0.0)
        tl.store(scores_ptr + n.to(tl.int64) * scores_stride + token, tl.sum(products * weights[:, None], 0), mask=live)


@triton.jit
def score_blocks(
    q_ptr, keys_ptr, table_ptr, starts_ptr, positions_ptr, scores_ptr,
    each, width, page_stride, token_stride, scores_stride, near,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, MOST: tl.constexpr, HAS_STARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, any): as `score`, the highest score in each block of BLOCK tokens, BLOCKS at a time. The last `near`
    blocks come first. scores [N,I,B]"""
    n = tl.program_id(0)
    seen = (tl.load(positions_ptr + n) + 1).to(tl.int32)
    blocks = tl.cdiv(seen, BLOCK)
    if blocks <= MOST:
        return
    i = tl.arange(0, HEADS_PADDED)
    e = tl.arange(0, SIZE_PADDED)
    b = tl.arange(0, BLOCKS)
    k = tl.arange(0, BLOCKS * BLOCK)
    own = (i < HEADS)[:, None] & (e < SIZE)[None, :]
    q = tl.load(q_ptr + n.to(tl.int64) * HEADS * SIZE + i[:, None] * SIZE + e[None, :], mask=own, other=0.0)
    for tile in range(tl.program_id(1), tl.cdiv(blocks, BLOCKS), tl.num_programs(1)):
        token = tile * BLOCKS * BLOCK + k
        live = token < seen
        page = _pages(table_ptr, starts_ptr, n // each, width, token, live, PAGE, HAS_STARTS)
        at = keys_ptr + page * page_stride + (token % PAGE) * token_stride
        keys = tl.load(at[:, None] + e[None, :], mask=live[:, None] & (e < SIZE)[None, :], other=0.0)
        products = tl.where(live[None, :], tl.dot(q, tl.trans(keys), input_precision=PRECISION), float("-inf"))
        highest = tl.max(tl.reshape(products, (HEADS_PADDED, BLOCKS, BLOCK)), 2)
        block = tile * BLOCKS + b
        highest = tl.where((block >= blocks - near)[None, :], float("inf"), highest)
        to = scores_ptr + (n.to(tl.int64) * HEADS + i[:, None]) * scores_stride + block[None, :]
        tl.store(to, highest, mask=(i < HEADS)[:, None] & (block < blocks)[None, :])


@triton.jit
def _order(score):
    """The uint32 of the same order: both zeros are equal."""
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _border(scores, seen, MOST: tl.constexpr, TILE: tl.constexpr):
    """The greatest score, as `_order` has it, that MOST tokens reach, and how many of those at it are taken."""
    k = tl.arange(0, TILE)
    digits = tl.arange(0, DIGITS)
    border = tl.zeros((), tl.uint32)
    needed = tl.full((), MOST, tl.int32)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((DIGITS,), tl.int32)
        for start in range(0, seen, TILE):
            live = start + k < seen
            order = _order(tl.load(scores + start + k, mask=live, other=0.0))
            if step > 0:  # else a shift by all bits would be asked for
                live = live & (order >> (shift + 8) == border >> (shift + 8))
            counts += tl.histogram(((order >> shift) & 255).to(tl.int32), DIGITS, mask=live)
        # Of the digits that enough tokens reach, the greatest.
        reach = tl.cumsum(counts, 0, reverse=True)
        digit = tl.sum((reach >= needed).to(tl.int32)) - 1
        needed -= tl.sum(tl.where(digits > digit, counts, 0))
        border = border | (digit.to(tl.uint32) << shift)
    return border, needed


@triton.jit
def select(
    scores_ptr, positions_ptr, chosen_ptr, scores_stride,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (N J): numbers of the blocks of BLOCK tokens that score highest, in order; the older ones of those that
    score alike; zeros behind those of a query that sees fewer.
    scores [N J,B]  positions [N], chosen [N J,MOST]: int64"""
    n = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions_ptr + n // CHOICES) // BLOCK + 1).to(tl.int32)
    scores, chosen = scores_ptr + n * scores_stride, chosen_ptr + n * MOST
    k = tl.arange(0, TILE)
    if seen <= MOST:
        for start in range(0, MOST, TILE):
            place = start + k
            tl.store(chosen + place, tl.where(place < seen, place, 0).to(tl.int64), mask=place < MOST)
        return
    border, at_border = _border(scores, seen, MOST, TILE)
    taken = tl.zeros((), tl.int32)
    for start in range(0, seen, TILE):
        live = start + k < seen
        order = _order(tl.load(scores + start + k, mask=live, other=0.0))
        is_at = (live & (order == border)).to(tl.int32)
        is_taken = live & ((order > border) | ((is_at == 1) & (tl.cumsum(is_at, 0) <= at_border)))
        place = taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        tl.store(chosen + place, (start + k).to(tl.int64), mask=is_taken)
        taken += tl.sum(is_taken.to(tl.int32))
        at_border -= tl.sum(is_at)


@triton.jit
def spread(
    blocks_ptr, positions_ptr, chosen_ptr,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (N J, any): positions of the tokens of chosen blocks, in order, and zeros behind them.
    blocks [N J,MOST]  positions [N]  chosen [N J,MOST BLOCK]: int64"""
    n = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + n // CHOICES)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    number = place // BLOCK
    block = tl.load(blocks_ptr + n * MOST + number, mask=number < MOST, other=0)
    token = block * BLOCK + place % BLOCK
    is_one = (number <= position // BLOCK) & (token <= position)
    tl.store(chosen_ptr + n * MOST * BLOCK + place, tl.where(is_one, token, 0), mask=number < MOST)


@triton.jit
def gather(
    entries_ptr, chosen_ptr, table_ptr, starts_ptr, positions_ptr, out_ptr,
    each, width, page_stride, token_stride, choice_stride,
    CHOICES: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    MOST: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Grid (N J, any): TOKENS chosen tokens at a time. Nothing is written behind those of a query that sees fewer.

    entries [pages,tokens,J,C], C dense  chosen [N J,K]  out [N J,K,C]; the others as in `score`
    """
    n = tl.program_id(0)
    query = n // CHOICES
    entries_ptr += (n % CHOICES) * choice_stride
    count = tl.minimum((tl.load(positions_ptr + query) + 1).to(tl.int32), MOST)
    c = tl.arange(0, SIZE_PADDED)
    own = (c < SIZE)[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(count, TOKENS), tl.num_programs(1)):
        place = tile * TOKENS + tl.arange(0, TOKENS)
        live = place < count
        token = tl.load(chosen_ptr + n.to(tl.int64) * MOST + place, mask=live, other=0)
        page = _pages(table_ptr, starts_ptr, query // each, width, token, live, PAGE, HAS_STARTS)
        at = entries_ptr + page * page_stride + (token % PAGE) * token_stride
        numbers = tl.load(at[:, None] + c[None, :], mask=live[:, None] & own, other=0.0)
        to = out_ptr + (n.to(tl.int64) * MOST + place) * SIZE
        tl.store(to[:, None] + c[None, :], numbers, mask=live[:, None] & own)
