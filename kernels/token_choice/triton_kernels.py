"""The choice in Triton: scores of index keys in pages, the best of them, and what is gathered of the chosen tokens.

    score         index heads times the keys of a tile, as one product, weighed and summed
    score_blocks  likewise, the highest of each block of tokens, for each head
    select        one program per choice: the score that so many reach, found by its digits; then who does, in order
    spread        the tokens of chosen blocks
    gather        entries of the chosen tokens side by side, a page for each choice
    gather_sight  a window and entries of several tokens side by side, a page for each query

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
def _places(
    table_ptr, starts_ptr, row, width, number, live,
    PAGE: tl.constexpr, ENTRY: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """int64: in which pages of PAGE tokens entries of a row lie, and where in them. An entry of ENTRY tokens lies in
    the page of its last one."""
    start = tl.load(starts_ptr + row) if HAS_STARTS else row.to(tl.int64) * width
    block = ((number + 1) * ENTRY - 1) // PAGE
    page = tl.load(table_ptr + start + block, mask=live, other=0).to(tl.int64)
    return page, number - block * PAGE // ENTRY


@triton.jit
def score(
    q_ptr, keys_ptr, weights_ptr, table_ptr, starts_ptr, positions_ptr, scores_ptr,
    each, width, page_stride, token_stride, scores_stride,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    KEYS: tl.constexpr, PAGE: tl.constexpr, ENTRY: tl.constexpr, MOST: tl.constexpr, HAS_STARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, any): tiles of one query's row, each by one of the programs. Nothing is scored for queries that see no
    more than they choose. Strides in items. What are called tokens may be entries of ENTRY tokens each.

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
        page, place = _places(table_ptr, starts_ptr, n // each, width, token, live, PAGE, ENTRY, HAS_STARTS)
        at = keys_ptr + page * page_stride + place * token_stride
        keys = tl.load(at[:, None] + e[None, :], mask=live[:, None] & (e < SIZE)[None, :], other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(keys), input_precision=PRECISION), 0.0)
        tl.store(scores_ptr + n.to(tl.int64) * scores_stride + token, tl.sum(products * weights[:, None], 0), mask=live)


@triton.jit
def score_blocks(
    q_ptr, keys_ptr, table_ptr, starts_ptr, positions_ptr, scores_ptr,
    each, width, page_stride, token_stride, scores_stride, near,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, ENTRY: tl.constexpr, MOST: tl.constexpr,
    HAS_STARTS: tl.constexpr, PRECISION: tl.constexpr,
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
        page, place = _places(table_ptr, starts_ptr, n // each, width, token, live, PAGE, ENTRY, HAS_STARTS)
        at = keys_ptr + page * page_stride + place * token_stride
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
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


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
    ENTRY: tl.constexpr, MOST: tl.constexpr, HAS_STARTS: tl.constexpr,
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
        page, at_page = _places(table_ptr, starts_ptr, query // each, width, token, live, PAGE, ENTRY, HAS_STARTS)
        at = entries_ptr + page * page_stride + at_page * token_stride
        numbers = tl.load(at[:, None] + c[None, :], mask=live[:, None] & own, other=0.0)
        to = out_ptr + (n.to(tl.int64) * MOST + place) * SIZE
        tl.store(to[:, None] + c[None, :], numbers, mask=live[:, None] & own)


@triton.jit
def gather_sight(
    window_ptr, entries_ptr, chosen_ptr, table_ptr, window_starts_ptr, entry_starts_ptr, positions_ptr, out_ptr,
    window_page_stride, window_token_stride, entry_page_stride, entry_stride, span,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, ENTRY_PAGE: tl.constexpr, ENTRY: tl.constexpr, IS_CHOSEN: tl.constexpr,
):  # fmt: skip
    """Grid (N, any): the tokens of a window of `span`, and behind them the first MOST entries of ENTRY tokens that the
    query sees, or with IS_CHOSEN those of the numbers chosen [N,MOST]. Nothing is written behind these.

    window [pages,tokens,C]  entries [pages,entries,C]  starts [N] int64, both in `table`  out [N,WIDTH,C]
    """
    n = tl.program_id(0)
    position = tl.load(positions_ptr + n)
    oldest = tl.maximum(position - span + 1, 0)
    in_window = (position - oldest + 1).to(tl.int32)
    count = in_window + tl.minimum(((position + 1) // ENTRY).to(tl.int32), MOST)
    c = tl.arange(0, SIZE_PADDED)
    own = (c < SIZE)[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(count, TOKENS), tl.num_programs(1)):
        place = tile * TOKENS + tl.arange(0, TOKENS)
        live = place < count
        in_sight = place < in_window
        page, at = _places(table_ptr, window_starts_ptr, n, 0, oldest + place, in_sight, WINDOW_PAGE, 1, True)
        token = window_ptr + page * window_page_stride + at * window_token_stride
        number = (place - in_window).to(tl.int64)
        if IS_CHOSEN:
            number = tl.load(chosen_ptr + n.to(tl.int64) * MOST + number, mask=live & (number >= 0), other=0)
        page, at = _places(table_ptr, entry_starts_ptr, n, 0, number, live & ~in_sight, ENTRY_PAGE, ENTRY, True)
        entry = entries_ptr + page * entry_page_stride + at * entry_stride
        numbers = tl.load(tl.where(in_sight, token, entry)[:, None] + c[None, :], mask=live[:, None] & own, other=0.0)
        to = out_ptr + (n.to(tl.int64) * WIDTH + place) * SIZE
        tl.store(to[:, None] + c[None, :], numbers, mask=live[:, None] & own)
