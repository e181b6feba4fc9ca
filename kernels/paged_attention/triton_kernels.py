"""Paged attention in Triton: prompts and single queries in one kernel, long rows cut into items and merged.

A tile is ROWS rows of a matrix product: the queries of one request times the query heads that share a kv head, heads
first, so that a single query of a grouped model still fills a tile.

    GROUP 4, ROWS 16:    tile 0 = queries 0 1 2 3, tile 1 = queries 4 5 6 7, ..     row m is query m / 4, head m % 4

Keys are read KEYS at a time by token, so any page size will do. What the queries of a tile see of their keys:

    first            every query sees all            end
      |  some see  |  no mask, no bounds   |  some see  |      three loops over one body; outside, nothing is read

Of several queries it is one loop instead, if so asked, which branches around its mask: nothing stops between the parts,
and softmax is computed while matrices are multiplied (`_see_at_once`).

A launch has as many programs as keep the device busy, and each takes one item of a list after another (`worklist.py`):
what there is to do may change without another launch, and a program that finds nothing returns at once.

Bytes that are no live token of the row never enter the arithmetic: they may be NaN (`protocol.py`). Numbers are
multiplied in their own kind and summed in float32. Head sizes are cut into a power of two and a rest (192 = 128 + 64,
80 = 64 + 16), so that little is padded.

Suffixes in comments: T packed tokens    H query heads    K kv heads    D head size    P pages of a row
"""

import triton
import triton.language as tl

EVERYTHING = tl.constexpr(0)
WINDOW = tl.constexpr(1)
CHUNK = tl.constexpr(2)
ENCODER = tl.constexpr(3)

NOWHERE = tl.constexpr(-1e30)
"""Stands for minus infinity, whose differences would be NaN."""
FLOOR = tl.constexpr(-1e20)
"""Far above nowhere, far below every score."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""The hardware's exponential is of base 2."""

COLUMNS = tl.constexpr(8)
"""Numbers of an entry of a list."""


@triton.jit
def _load(pointers, dims, live, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """[rows, PADDED] numbers, zero where the row is not live or the number is padding."""
    if MASKED:
        if SIZE < PADDED:
            return tl.load(pointers, mask=live[:, None] & (dims < SIZE)[None, :], other=0.0)
        return tl.load(pointers, mask=live[:, None], other=0.0)
    if SIZE < PADDED:
        return tl.load(pointers, mask=(dims < SIZE)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_parts(rows, live, SIZE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """[rows, MAIN] numbers and the [rows, REST] behind them, zero where the row is not live."""
    d = tl.arange(0, MAIN)
    main = _load(rows + d[None, :], d, live, SIZE, MAIN, True)
    rest = main  # is not read where REST is 0
    if REST > 0:
        r = tl.arange(0, REST)
        rest = _load(rows + MAIN + r[None, :], r, live, SIZE - MAIN, REST, True)
    return main, rest


@triton.jit
def _see(
    acc, acc_rest, total, top, q, q_rest, position, oldest, slope, bias, low, high, table, pages,
    page_stride, token_stride, scale, softcap,
    KEYS: tl.constexpr, PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr, VALUE_AT: tl.constexpr,
    HIDES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, EXTENT: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys [low, high): scores, softmax as it goes, sums of values. Without MASKED they are whole runs of KEYS and
    every query sees all of them; with HIDES each query sees only those from `oldest` to its position."""
    d = tl.arange(0, KEY_MAIN)
    e = tl.arange(0, VALUE_MAIN)
    for start in range(low, high, KEYS):
        n = start + tl.arange(0, KEYS)
        live = n < high
        if MASKED:
            page = tl.load(table + n // PAGE, mask=live, other=0)
        else:
            page = tl.load(table + n // PAGE)
        # Scores of KEYS keys: a product for the main part of a head, and one for its rest.
        token = pages + page.to(tl.int64)[:, None] * page_stride + (n % PAGE)[:, None] * token_stride
        key = _load(token + d[None, :], d, live, KEY_DIM, KEY_MAIN, MASKED)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        if KEY_REST > 0:
            r = tl.arange(0, KEY_REST)
            rest = _load(token + KEY_MAIN + r[None, :], r, live, KEY_DIM - KEY_MAIN, KEY_REST, MASKED)
            score = tl.dot(q_rest, tl.trans(rest), score, input_precision=PRECISION)
        score *= scale
        if HAS_SOFTCAP:  # a tangent hyperbolic by way of an exponential that may overflow to its limit
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E) / softcap) + 1.0))
        far = position[:, None] - n[None, :]
        if HAS_SLOPES:
            score -= slope[:, None] * far.to(tl.float32)
        if EXTENT > 0:
            score += tl.load(bias[:, None] + far, mask=(far >= 0) & (far < EXTENT), other=0.0)
        score *= LOG2_E
        if MASKED:
            visible = live[None, :]
            if HIDES:
                visible = visible & (n[None, :] <= position[:, None]) & (n[None, :] >= oldest[:, None])
            score = tl.where(visible, score, NOWHERE)
        # Softmax as it goes: sums so far shrink when a higher score comes.
        highest = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - highest[:, None])
        if MASKED:
            weight = tl.where(visible, weight, 0.0)
        shrink = tl.exp2(top - highest)
        top = highest
        total = total * shrink + tl.sum(weight, 1)
        # Of a latent, the keys just read are the values.
        if VALUE_AT == 0 and VALUE_MAIN == KEY_MAIN:
            value = key
        else:
            value = _load(token + VALUE_AT + e[None, :], e, live, VALUE_DIM, VALUE_MAIN, MASKED)
        weight = weight.to(value.dtype)
        acc = tl.dot(weight, value, acc * shrink[:, None], input_precision=PRECISION)
        if VALUE_REST > 0:
            f = tl.arange(0, VALUE_REST)
            rest = _load(
                token + VALUE_AT + VALUE_MAIN + f[None, :], f, live, VALUE_DIM - VALUE_MAIN, VALUE_REST, MASKED
            )
            acc_rest = tl.dot(weight, rest, acc_rest * shrink[:, None], input_precision=PRECISION)
    return acc, acc_rest, total, top


@triton.jit
def _hidden(
    score, n, oldest, newest, is_hidden, scale, softcap,
    HIDES: tl.constexpr, RULE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores, with the softcap if there is one; nowhere if keys may be hidden that are not of `oldest` to `newest`."""
    if HAS_SOFTCAP:  # a tangent hyperbolic by way of an exponential that may overflow to its limit
        score = softcap * (1.0 - 2.0 / (tl.exp2(score * (scale * 2.0 * LOG2_E) / softcap) + 1.0))
    if is_hidden:
        score = tl.where(n[None, :] <= newest[:, None], score, NOWHERE)
        if HIDES and RULE != EVERYTHING:
            score = tl.where(n[None, :] >= oldest[:, None], score, NOWHERE)
    return score


@triton.jit
def _weigh(score, total, top, unit):
    """Softmax as it goes: weights, by how much sums so far shrink, and the new sums and highest scores. Scores are
    scaled within the exponential, in one instruction."""
    highest = tl.maximum(top, tl.max(score, 1))
    # Where a query has seen nothing yet, its hidden scores are to come out far below the highest, not at it.
    base = tl.maximum(highest, FLOOR) * unit
    weight = tl.exp2(tl.fma(score, unit, -base[:, None]))
    shrink = tl.exp2((top - highest) * unit)
    return weight, shrink, total * shrink + tl.sum(weight, 1), highest


@triton.jit
def _place(page, token, page_stride, token_stride):
    """Where tokens of pages lie, in numbers from the first. Nothing is negative, which takes fewer instructions."""
    first = page.to(tl.uint32).to(tl.uint64) * page_stride.to(tl.uint64)
    return first + (token * token_stride.to(tl.uint32)).to(tl.uint64)


@triton.jit
def _see_at_once(
    acc, acc_rest, total, top, q, q_rest, position, oldest, low, inner, inner_end, high, table, pages,
    page_stride, token_stride, scale, softcap,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr, VALUE_AT: tl.constexpr,
    HIDES: tl.constexpr, RULE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) in one loop, which hides what is to be hidden before `inner` and from `inner_end`. It reads live
    tokens only: the last one again where there are none.

    With AHEAD a turn multiplies queries by its keys, and the weights of the turn before by their values; its softmax is
    computed while that second product goes on. So the first turn has no weights yet, and there is a turn more.
    """
    k = tl.arange(0, KEYS)
    d = tl.arange(0, KEY_MAIN)
    e = tl.arange(0, VALUE_MAIN)
    unit = LOG2_E if HAS_SOFTCAP else scale * LOG2_E
    last = high - 1
    newest = tl.minimum(position, last) if HIDES else position * 0 + last
    # Page numbers are read a turn before they are needed.
    at = tl.minimum(low + k, last).to(tl.uint32)
    page = tl.load(table + at // PAGE)
    place = _place(page, at % PAGE, page_stride, token_stride)
    weight = tl.zeros((ROWS, KEYS), tl.float32)  # is rounded in the turn that multiplies it: else products wait for it
    shrink = tl.full((ROWS,), 1.0, tl.float32)
    for start in range(low, high + KEYS if AHEAD else high, KEYS):
        n = start + k
        token = _place(page, tl.minimum(n, last).to(tl.uint32) % PAGE, page_stride, token_stride)
        page = tl.load(table + tl.minimum(n + KEYS, last).to(tl.uint32) // PAGE)
        # Scores of KEYS keys: a product for the main part of a head, and one for its rest.
        key = _load((pages + d[None, :]) + token[:, None], d, k, KEY_DIM, KEY_MAIN, False)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        if KEY_REST > 0:
            r = tl.arange(0, KEY_REST)
            rest = _load((pages + KEY_MAIN + r[None, :]) + token[:, None], r, k, KEY_DIM - KEY_MAIN, KEY_REST, False)
            score = tl.dot(q_rest, tl.trans(rest), score, input_precision=PRECISION)
        score = _hidden(
            score, n, oldest, newest, start < inner or start >= inner_end, scale, softcap, HIDES, RULE, HAS_SOFTCAP
        )  # fmt: skip
        if not AHEAD:
            place = token
            weight, shrink, total, top = _weigh(score, total, top, unit)
        value = _load((pages + VALUE_AT + e[None, :]) + place[:, None], e, k, VALUE_DIM, VALUE_MAIN, False)
        factor = weight.to(value.dtype)
        acc = tl.dot(factor, value, acc * shrink[:, None], input_precision=PRECISION)
        if VALUE_REST > 0:
            f = tl.arange(0, VALUE_REST)
            rest = (pages + VALUE_AT + VALUE_MAIN + f[None, :]) + place[:, None]
            rest = _load(rest, f, k, VALUE_DIM - VALUE_MAIN, VALUE_REST, False)
            acc_rest = tl.dot(factor, rest, acc_rest * shrink[:, None], input_precision=PRECISION)
        if AHEAD:
            place = token
            weight, shrink, total, top = _weigh(score, total, top, unit)
    return acc, acc_rest, total, top * unit


@triton.jit
def _sight(position, earliest, latest, span, low, high, RULE: tl.constexpr, KEYS: tl.constexpr):
    """Of a tile and a cut of its keys, [low, high): the oldest key that each query sees; where the keys that every
    query sees begin and end in the cut, in whole runs of KEYS from `low`."""
    oldest = position * 0
    inner = 0
    if RULE == WINDOW:
        oldest = tl.maximum(position - span + 1, 0)
        inner = tl.maximum(latest - span + 1, 0)
    elif RULE == CHUNK:
        oldest = position - position % span
        inner = latest - latest % span
    inner = tl.minimum(low + tl.cdiv(tl.maximum(inner - low, 0), KEYS) * KEYS, high)
    # Only the earliest query's keys are seen by all.
    inner_end = inner + tl.maximum(tl.minimum(earliest + 1, high) - inner, 0) // KEYS * KEYS
    return oldest, inner, inner_end


@triton.jit
def _whole(acc, acc_rest, total, top, sinks, is_query, HAS_SINKS: tl.constexpr):
    """The means of the values: their weighted sums, divided by the sums of the weights."""
    if HAS_SINKS:  # one logit more, without a value
        sink = tl.load(sinks, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.maximum(top, sink)
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.exp2(sink - highest)
        acc *= shrink[:, None]
        acc_rest *= shrink[:, None]
    total = tl.where(is_query, total, 1.0)
    return acc / total[:, None], acc_rest / total[:, None]


@triton.jit
def _store(rows, main, rest, live, SIZE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Numbers [rows, MAIN] and [rows, REST] side by side, where the row is live, without their padding."""
    dtype = rows.dtype.element_ty
    e = tl.arange(0, MAIN)
    tl.store(rows + e[None, :], main.to(dtype), mask=live[:, None] & (e < SIZE)[None, :])
    if REST > 0:
        f = MAIN + tl.arange(0, REST)
        tl.store(rows + f[None, :], rest.to(dtype), mask=live[:, None] & (f < SIZE)[None, :])


@triton.jit
def attend(
    q_ptr, pages_ptr, out_ptr, partial_ptr, sinks_ptr, slopes_ptr, biases_ptr, table_ptr, items_ptr, query_start_ptr,
    kv_len_ptr, table_start_ptr,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, page_stride, token_stride, head_stride,
    scale, softcap, span,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr, VALUE_AT: tl.constexpr,
    RULE: tl.constexpr, ONE_QUERY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SINKS_OF_QUERIES: tl.constexpr, HAS_SLOPES: tl.constexpr, EXTENT: tl.constexpr,
    AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (K, any): the items of one kv head, each by one of the programs. Strides in items.

    q [T,H,Dk]  pages [pages,tokens,K,content]  out [T,H,Dv]  partial [records, K, Dv + 2], where something is merged
    items [1 + n, COLUMNS]: see `worklist.Work`    query_start [R+1], kv_len [R]: int32
    table: int32, the pages of all rows    table_start [R] int64: where those of each row begin
    span: of the window or chunk, in tokens    ONE_QUERY: each request of this launch has one
    sinks [H], or with SINKS_OF_QUERIES [T,H]    slopes [H] float32    biases [T,H,EXTENT] float32, where there are any
    """
    kv_head = tl.program_id(0)
    # What is the same for all items is computed anew for each: kept, it would cost more registers than time.
    for index in tl.range(tl.program_id(1), tl.load(items_ptr), tl.num_programs(1), disable_licm=True):
        item = items_ptr + (1 + index) * COLUMNS
        row = tl.load(item)
        first_row = tl.load(item + 1) * ROWS
        low, high, record = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        query_start = tl.load(query_start_ptr + row)
        queries = tl.load(query_start_ptr + row + 1) - query_start
        kv_len = tl.load(kv_len_ptr + row)

        m = first_row + tl.arange(0, ROWS)
        query, head = m // GROUP, kv_head * GROUP + m % GROUP
        is_query = query < queries
        context = kv_len - queries
        earliest = context + first_row // GROUP
        latest = context + tl.minimum((first_row + ROWS - 1) // GROUP, queries - 1)
        q_row = q_ptr + (query_start + query).to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride
        q, q_rest = _load_parts(q_row, is_query, KEY_DIM, KEY_MAIN, KEY_REST)
        # Of queries that there are not, those of the last one are read.
        of_query = (query_start + tl.minimum(query, queries - 1)).to(tl.int64) * (tl.num_programs(0) * GROUP) + head
        slope = tl.load(slopes_ptr + head) if HAS_SLOPES else of_query
        bias = biases_ptr + of_query * EXTENT if EXTENT > 0 else of_query
        acc, acc_rest, total, top = _sums(
            q, q_rest, context + query, slope, bias, earliest, latest, low, high,
            table_ptr + tl.load(table_start_ptr + row), pages_ptr + kv_head * head_stride,
            page_stride, token_stride, scale, softcap, span, ROWS, KEYS, PAGE, KEY_DIM, KEY_MAIN, KEY_REST,
            VALUE_DIM, VALUE_MAIN, VALUE_REST, VALUE_AT, RULE, ONE_QUERY, HAS_SOFTCAP, HAS_SLOPES, EXTENT,
            AT_ONCE, AHEAD, PRECISION,
        )  # fmt: skip

        # A tile of one item has the whole answer. Several leave to `merge` what it needs.
        if record < 0:
            sinks = sinks_ptr + (of_query if SINKS_OF_QUERIES else head)
            acc, acc_rest = _whole(acc, acc_rest, total, top, sinks, is_query, HAS_SINKS)
            out_row = out_ptr + (query_start + query).to(tl.int64)[:, None] * out_token_stride
            _store(
                out_row + head[:, None] * out_head_stride, acc, acc_rest, is_query, VALUE_DIM, VALUE_MAIN, VALUE_REST
            )
        else:
            place = (record + tl.arange(0, ROWS)).to(tl.int64) * tl.num_programs(0) + kv_head
            partial = partial_ptr + place * (VALUE_DIM + 2)
            _store(partial[:, None], acc, acc_rest, is_query, VALUE_DIM, VALUE_MAIN, VALUE_REST)
            tl.store(partial + VALUE_DIM, total, mask=is_query)
            tl.store(partial + VALUE_DIM + 1, top, mask=is_query)


@triton.jit
def _sums(
    q, q_rest, position, slope, bias, earliest, latest, low, high, table, pages,
    page_stride, token_stride, scale, softcap, span,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr, VALUE_AT: tl.constexpr,
    RULE: tl.constexpr, ONE_QUERY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    EXTENT: tl.constexpr,
    AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one item: sums of weighted values, sums of weights, and the highest scores."""
    hides: tl.constexpr = not ONE_QUERY and RULE != ENCODER  # an item of one query has the keys that it sees
    oldest, inner, inner_end = position, low, low + (high - low) // KEYS * KEYS
    if hides:
        oldest, inner, inner_end = _sight(position, earliest, latest, span, low, high, RULE, KEYS)
    acc = tl.zeros((ROWS, VALUE_MAIN), tl.float32)
    acc_rest = tl.zeros((ROWS, VALUE_REST if VALUE_REST > 0 else 1), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), NOWHERE, tl.float32)
    if AT_ONCE:
        return _see_at_once(
            acc, acc_rest, total, top, q, q_rest, position, oldest, low, inner, inner_end, high, table, pages,
            page_stride, token_stride, scale, softcap, ROWS, KEYS, PAGE, KEY_DIM, KEY_MAIN, KEY_REST,
            VALUE_DIM, VALUE_MAIN, VALUE_REST, VALUE_AT, hides, RULE, HAS_SOFTCAP, AHEAD, PRECISION,
        )  # fmt: skip
    for part in tl.static_range(3):  # keys that some queries see, that all see, and again that some see
        if part == 0:
            start, stop = low, inner
        elif part == 1:
            start, stop = inner, inner_end
        else:
            start, stop = inner_end, high
        # Without a limit no key at the lower end is hidden from any query.
        if part > 0 or (hides and RULE != EVERYTHING):
            acc, acc_rest, total, top = _see(
                acc, acc_rest, total, top, q, q_rest, position, oldest, slope, bias, start, stop, table, pages,
                page_stride, token_stride, scale, softcap, KEYS, PAGE, KEY_DIM, KEY_MAIN, KEY_REST,
                VALUE_DIM, VALUE_MAIN, VALUE_REST, VALUE_AT, hides, HAS_SOFTCAP, HAS_SLOPES, EXTENT, part != 1,
                PRECISION,
            )  # fmt: skip
    return acc, acc_rest, total, top


@triton.jit
def merge(
    partial_ptr, out_ptr, sinks_ptr, merges_ptr, query_start_ptr,
    out_token_stride, out_head_stride,
    GROUP: tl.constexpr, CUTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, HAS_SINKS: tl.constexpr, SINKS_OF_QUERIES: tl.constexpr,
):  # fmt: skip
    """Grid (K, any, rows of an entry): the cuts of one query and head, in their order, CUTS at a time, weighed by what
    each summed up. See `attend`, and `worklist.Work` for merges [1 + n, COLUMNS]."""
    kv_head, within = tl.program_id(0), tl.program_id(2)
    e = tl.arange(0, VALUE_PADDED)
    for index in range(tl.program_id(1), tl.load(merges_ptr), tl.num_programs(1)):
        entry = merges_ptr + (1 + index) * COLUMNS
        if within < tl.load(entry + 5):
            row, m = tl.load(entry), tl.load(entry + 1) + within
            first, cuts, step = tl.load(entry + 2) + within, tl.load(entry + 3), tl.load(entry + 4)
            acc = tl.zeros((VALUE_PADDED,), tl.float32)
            total = tl.zeros((1,), tl.float32)
            top = tl.full((1,), NOWHERE, tl.float32)
            for start in range(0, cuts, CUTS):
                cut = start + tl.arange(0, CUTS)
                is_cut = cut < cuts
                place = (first + cut * step).to(tl.int64) * tl.num_programs(0) + kv_head
                partial = partial_ptr + place * (VALUE_DIM + 2)
                tops = tl.load(partial + VALUE_DIM + 1, mask=is_cut, other=NOWHERE)
                highest = tl.maximum(top, tl.max(tops, 0))
                weight = tl.exp2(tops - highest)
                shrink = tl.exp2(top - highest)
                total = total * shrink + tl.sum(weight * tl.load(partial + VALUE_DIM, mask=is_cut, other=0.0), 0)
                sums = tl.load(
                    partial[:, None] + e[None, :], mask=is_cut[:, None] & (e < VALUE_DIM)[None, :], other=0.0
                )
                acc = acc * shrink + tl.sum(sums * weight[:, None], 0)
                top = highest
            query, head = m // GROUP, kv_head * GROUP + m % GROUP
            token = (tl.load(query_start_ptr + row) + query).to(tl.int64)
            if HAS_SINKS:  # one logit more, without a value
                at = token * (tl.num_programs(0) * GROUP) + head if SINKS_OF_QUERIES else head
                sink = tl.load(sinks_ptr + at).to(tl.float32) * LOG2_E
                highest = tl.maximum(top, sink)
                total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
                acc *= tl.exp2(top - highest)
            out = out_ptr + token * out_token_stride
            tl.store(out + head * out_head_stride + e, (acc / total).to(out_ptr.dtype.element_ty), mask=e < VALUE_DIM)


@triton.jit
def write(
    key_ptr, value_ptr, pages_ptr, page_ptr, offset_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    page_stride, token_stride, head_stride,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (T): one token's keys and values into its place of its page. A latent has VALUE_DIM 0."""
    token = tl.program_id(0).to(tl.int64)
    place = pages_ptr + tl.load(page_ptr + token) * page_stride + tl.load(offset_ptr + token) * token_stride
    h = tl.arange(0, HEADS_PADDED)[:, None]
    d = tl.arange(0, KEY_PADDED)[None, :]
    live = (h < HEADS) & (d < KEY_DIM)
    key = tl.load(key_ptr + token * key_token_stride + h * key_head_stride + d, mask=live)
    tl.store(place + h * head_stride + d, key, mask=live)
    if VALUE_DIM > 0:
        e = tl.arange(0, VALUE_PADDED)[None, :]
        live = (h < HEADS) & (e < VALUE_DIM)
        value = tl.load(value_ptr + token * value_token_stride + h * value_head_stride + e, mask=live)
        tl.store(place + h * head_stride + KEY_DIM + e, value, mask=live)
