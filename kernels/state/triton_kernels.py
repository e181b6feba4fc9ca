"""Recurrences over states in pages, in Triton. Every kernel reads a state from its page and puts the new one there.

A program has one row and a part of its state that depends on no other part: some values of one head, or some channels.
It goes through the row's tokens in order, piece by piece, so the state never leaves the registers; heads go in chunks,
through matrix products, channels token by token. Rows, pieces and tiles are those of `kernels/state/worklist.py`; an
entry of zeros stands for none.

Suffixes in comments: T packed tokens    N rows    C channels    H heads    K key size    V value size    S state size
"""

import triton
import triton.language as tl

ROW: tl.constexpr = tl.constexpr(8)
PIECE: tl.constexpr = tl.constexpr(4)
TILE: tl.constexpr = tl.constexpr(4)


@triton.jit
def _row(rows_ptr, row, pages):
    """First token, tokens, page, is it new. Negative pages count from behind, as everywhere."""
    at = rows_ptr + row * ROW
    page = tl.load(at + 2).to(tl.int64)
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.where(page < 0, page + pages, page), tl.load(at + 3) != 0


@triton.jit
def _take(state_ptr, is_new, own):
    """A row's state in float32; zeros where it is new, though its page may hold NaN."""
    state = tl.load(state_ptr, mask=own, other=0.0).to(tl.float32)
    return tl.where(is_new, 0.0, state)


@triton.jit
def _save(state, pages, pieces_ptr, piece, page_stride, own):
    """The state after a piece, where it is to be saved."""
    saved = tl.load(pieces_ptr + piece * PIECE + 2).to(tl.int64)
    if saved >= 0:
        tl.store(pages + saved * page_stride, state.to(pages.dtype.element_ty), mask=own)


@triton.jit
def _numbers(first, kk, vv, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Where the state of a head lies in its page, and which of it is no padding."""
    return first + kk[:, None] * VALUES + vv[None, :], (kk < KEYS)[:, None] & (vv < VALUES)[None, :]


@triton.jit
def heads(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, pages_ptr, rows_ptr, pieces_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, out_token, out_head,
    page_stride, head_stride, pages,
    KEYS: tl.constexpr, KEYS_PADDED: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Linear attention, or with DELTA a gated delta net, in chunks of CHUNK tokens. Grid (N, H, V / VALUES_BLOCK).

    q, k [T,H/GROUP,K]  v, out [T,H,V]  g, beta [T,H]  pages [pages,H,K,V], dense within a head
    The arithmetic is that of `kernels/state/plain_torch.py`; the triangular system of a delta net is solved row by row,
    which is stable.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    group = head // GROUP
    start, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    kk = tl.arange(0, KEYS_PADDED)
    vv = tl.program_id(2) * VALUES_BLOCK + tl.arange(0, VALUES_BLOCK)
    inside, own = _numbers(head * head_stride, kk, vv, KEYS, VALUES)
    state = _take(pages_ptr + page * page_stride + inside, is_new, own)
    t = tl.arange(0, CHUNK)
    for piece in range(tl.load(rows_ptr + row * ROW + 4), tl.load(rows_ptr + row * ROW + 5)):
        start = tl.load(pieces_ptr + piece * PIECE).to(tl.int64)
        length = tl.load(pieces_ptr + piece * PIECE + 1)
        for at in range(0, length, CHUNK):
            live = at + t < length
            token = start + at + t
            # Keys are read the way a product takes them, as columns: turning them around costs more than reading them.
            k_columns = tl.load(
                k_ptr + token[None, :] * k_token + group * k_head + kk[:, None],
                mask=live[None, :] & (kk < KEYS)[:, None], other=0.0,
            )  # fmt: skip
            value_mask = live[:, None] & (vv < VALUES)[None, :]
            v = tl.load(v_ptr + token[:, None] * v_token + head * v_head + vv[None, :], mask=value_mask, other=0.0)
            g = tl.load(g_ptr + token * g_token + head * g_head, mask=live, other=0.0)
            total = tl.cumsum(g, 0)
            end = tl.sum(g, 0)
            is_past = t[:, None] >= t[None, :]
            between = tl.where(is_past, tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0.0)), 0.0)
            since_start = tl.exp(total)[:, None]
            rows = token[:, None] * q_token + group * q_head + kk[None, :]
            row_mask = live[:, None] & (kk < KEYS)[None, :]
            # In a delta net, what each token adds depends on what the tokens before it added.
            if DELTA:
                beta = tl.load(beta_ptr + token * beta_token + head * beta_head, mask=live, other=0.0)
                k = tl.load(k_ptr + token[:, None] * k_token + group * k_head + kk[None, :], mask=row_mask, other=0.0)
                depends = tl.dot(k, k_columns, input_precision=PRECISION) * between * beta[:, None]
                depends = tl.where(t[:, None] > t[None, :], depends, 0.0)
                v = (v - tl.dot(k, state, input_precision=PRECISION) * since_start) * beta[:, None]
                for row in range(1, CHUNK):
                    weights = tl.sum(tl.where((t == row)[:, None], depends, 0.0), 0)
                    known = tl.sum(weights[:, None] * v, 0)
                    v = tl.where((t == row)[:, None], v - known[None, :], v)
            q = tl.load(q_ptr + rows, mask=row_mask, other=0.0)
            out = tl.dot(q, state, input_precision=PRECISION) * since_start
            seen = tl.dot(q, k_columns, input_precision=PRECISION) * between
            out = tl.dot(seen, v, out, input_precision=PRECISION)
            to_end = tl.exp(end - total)[:, None]
            state = tl.dot(k_columns, v * to_end, state * tl.exp(end), input_precision=PRECISION)
            out_at = out_ptr + token[:, None] * out_token + head * out_head + vv[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=value_mask)
        _save(state, pages_ptr + inside, pieces_ptr, piece, page_stride, own)
    tl.store(pages_ptr + page * page_stride + inside, state.to(pages_ptr.dtype.element_ty), mask=own)


@triton.jit
def _times(a, b, total):
    """total + a b, where a is bfloat16 and b a sum of two of those: 16 bits of each number, and half the bytes."""
    high = b.to(tl.bfloat16)
    low = (b - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a, high, tl.dot(a, low, total))


@triton.jit
def shared_heads(
    q_ptr, k_ptr, v_ptr, g_ptr, out_ptr, pages_ptr, rows_ptr, pieces_ptr,
    q_head, k_head, v_head, g_token, g_head, out_head,
    page_stride, head_stride, pages,
    KEYS: tl.constexpr, KEYS_PADDED: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr,
    Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, OUT_TOKEN: tl.constexpr,
):  # fmt: skip
    """Linear attention in chunks of CHUNK tokens, where q and k are bfloat16. Grid (N, H, V / VALUES_BLOCK).

    q, k [T,H/GROUP,K]  v, out [T,H,V]  g [T,H], float32  pages [pages,H,K,V], dense within a head
    The arithmetic is that of `kernels/state/plain_torch.py`; of each number of float32 16 bits enter a product. Loads
    of the next chunks go on beside the products. Strides are constants, and what is the same for each chunk is computed
    anew, so that no registers are spilled.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    start, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    kk = tl.arange(0, KEYS_PADDED)
    vv = tl.program_id(2) * VALUES_BLOCK + tl.arange(0, VALUES_BLOCK)
    inside, own = _numbers(head * head_stride, kk, vv, KEYS, VALUES)
    state = _take(pages_ptr + page * page_stride + inside, is_new, own)
    t = tl.arange(0, CHUNK)
    q_ptr += head // GROUP * q_head
    k_ptr += head // GROUP * k_head
    v_ptr += head * v_head
    g_ptr += head * g_head
    out_ptr += head * out_head
    first, last = tl.load(rows_ptr + row * ROW + 4), tl.load(rows_ptr + row * ROW + 5)
    for piece in tl.range(first, last, disable_licm=True):
        start = tl.load(pieces_ptr + piece * PIECE).to(tl.int64)
        length = tl.load(pieces_ptr + piece * PIECE + 1)
        for at in tl.range(0, length, CHUNK, disable_licm=True):
            token = start + at
            live = t < length - at
            key_mask, value_mask = live[:, None], live[:, None]
            if KEYS < KEYS_PADDED:
                key_mask = key_mask & (kk < KEYS)[None, :]
            if VALUES % VALUES_BLOCK > 0:
                value_mask = value_mask & (vv < VALUES)[None, :]
            k_at = k_ptr + token * K_TOKEN + (t[:, None] * K_TOKEN + kk[None, :])
            q_at = q_ptr + token * Q_TOKEN + (t[:, None] * Q_TOKEN + kk[None, :])
            v_at = v_ptr + token * V_TOKEN + (t[:, None] * V_TOKEN + vv[None, :])
            g = tl.load(g_ptr + token * g_token + t * g_token, mask=live, other=0.0)
            k = tl.load(k_at, mask=key_mask, other=0.0)
            q = tl.load(q_at, mask=key_mask, other=0.0)
            v = tl.load(v_at, mask=value_mask, other=0.0).to(tl.float32)
            # What is left of a token when another reads it, and of the state.
            total = tl.cumsum(g, 0)
            end = tl.sum(g, 0)
            here = at + t  # and not t: what is the same for each chunk would be kept in registers
            between = tl.exp(tl.where(here[:, None] >= here[None, :], total[:, None] - total[None, :], float("-inf")))
            since_start = tl.exp(total)[:, None]
            to_end = tl.exp(end - total)[:, None]
            seen = tl.dot(q, tl.trans(k)) * between
            out = _times(q, state, tl.zeros((CHUNK, VALUES_BLOCK), tl.float32)) * since_start
            out = tl.dot(seen, v, out, input_precision="bf16x3")
            out_at = out_ptr + token * OUT_TOKEN + (t[:, None] * OUT_TOKEN + vv[None, :])
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=value_mask)
            state = _times(tl.trans(k), v * to_end, state * tl.exp(end))
        nothing = tl.load(pieces_ptr + piece * PIECE + 3)
        inside, own = _numbers(head * head_stride, kk + nothing, vv, KEYS, VALUES)
        _save(state, pages_ptr + inside, pieces_ptr, piece, page_stride, own)
    # Computed anew from a zero that the compiler does not know: kept for so long, they would take registers.
    nothing = tl.load(rows_ptr + row * ROW + 6)
    start, length, page, is_new = _row(rows_ptr, row + nothing, pages)
    inside, own = _numbers(head * head_stride, kk + nothing, vv, KEYS, VALUES)
    tl.store(pages_ptr + page * page_stride + inside, state.to(pages_ptr.dtype.element_ty), mask=own)


@triton.jit
def heads_step(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, pages_ptr, rows_ptr, pieces_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, out_token, out_head,
    page_stride, head_stride, pages,
    KEYS: tl.constexpr, KEYS_PADDED: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The same for rows of one token: no products of matrices, the state is read once and written once."""
    row, head = tl.program_id(0), tl.program_id(1)
    token, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    kk = tl.arange(0, KEYS_PADDED)
    vv = tl.program_id(2) * VALUES_BLOCK + tl.arange(0, VALUES_BLOCK)
    inside, own = _numbers(head * head_stride, kk, vv, KEYS, VALUES)
    state = _take(pages_ptr + page * page_stride + inside, is_new, own)
    q = tl.load(q_ptr + token * q_token + head // GROUP * q_head + kk, mask=kk < KEYS, other=0.0)
    k = tl.load(k_ptr + token * k_token + head // GROUP * k_head + kk, mask=kk < KEYS, other=0.0)
    v = tl.load(v_ptr + token * v_token + head * v_head + vv, mask=vv < VALUES, other=0.0)
    state *= tl.exp(tl.load(g_ptr + token * g_token + head * g_head))
    # A delta net adds what the state does not know yet.
    if DELTA:
        beta = tl.load(beta_ptr + token * beta_token + head * beta_head)
        v = (v - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * v[None, :]
    out = tl.sum(q[:, None] * state, 0)
    tl.store(out_ptr + token * out_token + head * out_head + vv, out.to(out_ptr.dtype.element_ty), mask=vv < VALUES)
    tl.store(pages_ptr + page * page_stride + inside, state.to(pages_ptr.dtype.element_ty), mask=own)
    _save(state, pages_ptr + inside, pieces_ptr, tl.load(rows_ptr + row * ROW + 4), page_stride, own)


@triton.jit
def keyed_heads(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, pages_ptr, rows_ptr, pieces_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, out_token, out_head,
    page_stride, head_stride, pages,
    KEYS: tl.constexpr, KEYS_PADDED: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A gated delta net in which each number of a key decays by itself, token by token. Grid (N, H, V / VALUES_BLOCK).

    As for `heads`, but g [T,H,K]. In chunks a decay could be written as a product of one number per token only where
    none is strong, and models know strong ones.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    start, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    kk = tl.arange(0, KEYS_PADDED)
    vv = tl.program_id(2) * VALUES_BLOCK + tl.arange(0, VALUES_BLOCK)
    inside, own = _numbers(head * head_stride, kk, vv, KEYS, VALUES)
    state = _take(pages_ptr + page * page_stride + inside, is_new, own)
    for piece in range(tl.load(rows_ptr + row * ROW + 4), tl.load(rows_ptr + row * ROW + 5)):
        start = tl.load(pieces_ptr + piece * PIECE).to(tl.int64)
        for t in range(tl.load(pieces_ptr + piece * PIECE + 1)):
            token = start + t
            q = tl.load(q_ptr + token * q_token + head // GROUP * q_head + kk, mask=kk < KEYS, other=0.0)
            k = tl.load(k_ptr + token * k_token + head // GROUP * k_head + kk, mask=kk < KEYS, other=0.0)
            g = tl.load(g_ptr + token * g_token + head * g_head + kk, mask=kk < KEYS, other=0.0)
            v = tl.load(v_ptr + token * v_token + head * v_head + vv, mask=vv < VALUES, other=0.0)
            state *= tl.exp(g)[:, None]
            known = tl.sum(k[:, None] * state, 0)
            state += k[:, None] * ((v - known) * tl.load(beta_ptr + token * beta_token + head * beta_head))[None, :]
            out_at = out_ptr + token * out_token + head * out_head + vv
            tl.store(out_at, tl.sum(q[:, None] * state, 0).to(out_ptr.dtype.element_ty), mask=vv < VALUES)
        _save(state, pages_ptr + inside, pieces_ptr, piece, page_stride, own)
    tl.store(pages_ptr + page * page_stride + inside, state.to(pages_ptr.dtype.element_ty), mask=own)


@triton.jit
def channels(
    A_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, out_ptr, pages_ptr, rows_ptr, pieces_ptr,
    x_token, dt_token, B_token, C_token, out_token, page_stride, pages, count,
    STATES: tl.constexpr, STATES_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A selective scan, token by token. Grid (N, C / BLOCK).  A [C,S]  x, dt [T,C]  B, C [T,S]  pages [pages,C,S]."""
    row = tl.program_id(0)
    start, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, STATES_PADDED)
    own = (c < count)[:, None] & (s < STATES)[None, :]
    inside = c[:, None] * STATES + s[None, :]
    state = _take(pages_ptr + page * page_stride + inside, is_new, own)
    A = tl.load(A_ptr + inside, mask=own, other=0.0)
    # Token by token, since each state depends on the one before.
    for piece in range(tl.load(rows_ptr + row * ROW + 4), tl.load(rows_ptr + row * ROW + 5)):
        start = tl.load(pieces_ptr + piece * PIECE).to(tl.int64)
        for t in range(tl.load(pieces_ptr + piece * PIECE + 1)):
            token = start + t
            x = tl.load(x_ptr + token * x_token + c, mask=c < count, other=0.0)
            dt = tl.load(dt_ptr + token * dt_token + c, mask=c < count, other=0.0)
            B = tl.load(B_ptr + token * B_token + s, mask=s < STATES, other=0.0)
            C = tl.load(C_ptr + token * C_token + s, mask=s < STATES, other=0.0)
            state = tl.exp(dt[:, None] * A) * state + (dt * x)[:, None] * B[None, :]
            out = tl.sum(state * C[None, :], 1)
            tl.store(out_ptr + token * out_token + c, out.to(out_ptr.dtype.element_ty), mask=c < count)
        _save(state, pages_ptr + inside, pieces_ptr, piece, page_stride, own)
    tl.store(pages_ptr + page * page_stride + inside, state.to(pages_ptr.dtype.element_ty), mask=own)


@triton.jit
def decaying_sums(
    x_ptr, g_ptr, out_ptr, pages_ptr, rows_ptr, pieces_ptr, x_token, g_token, out_token, page_stride, pages, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A sum of each channel that decays, token by token. Grid (N, C / BLOCK).  x, g, out [T,C]  pages [pages,C]."""
    row = tl.program_id(0)
    start, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = c < count
    state = _take(pages_ptr + page * page_stride + c, is_new, own)
    for piece in range(tl.load(rows_ptr + row * ROW + 4), tl.load(rows_ptr + row * ROW + 5)):
        start = tl.load(pieces_ptr + piece * PIECE).to(tl.int64)
        for t in range(tl.load(pieces_ptr + piece * PIECE + 1)):
            token = start + t
            x = tl.load(x_ptr + token * x_token + c, mask=own, other=0.0)
            state = tl.exp(tl.load(g_ptr + token * g_token + c, mask=own, other=0.0)) * state + x
            tl.store(out_ptr + token * out_token + c, state.to(out_ptr.dtype.element_ty), mask=own)
        _save(state, pages_ptr + c, pieces_ptr, piece, page_stride, own)
    tl.store(pages_ptr + page * page_stride + c, state.to(pages_ptr.dtype.element_ty), mask=own)


@triton.jit
def convolve(
    weight_ptr, bias_ptr, x_ptr, out_ptr, pages_ptr, rows_ptr, tiles_ptr, x_token, out_token, page_stride, pages, count,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A short convolution of each channel, and its SiLU. Grid (tiles, C / BLOCK), or (N, C / BLOCK) where TOKENS is 1.

    weight [C,WINDOW+1]  bias [C]  x, out [T,C]  pages [pages,C,WINDOW]: the latest inputs, which `shift` renews after.
    """
    row, first = tl.program_id(0), 0
    if TOKENS > 1:
        tile = tiles_ptr + row * TILE
        row, first = tl.load(tile), tl.load(tile + 1)
        if tl.load(tile + 2) == 0:
            return
    start, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = first + tl.arange(0, TOKENS)
    own = (t < length)[:, None] & (c < count)[None, :]
    bias = tl.load(bias_ptr + c, mask=c < count, other=0.0).to(tl.float32)
    total = tl.zeros((TOKENS, BLOCK), tl.float32) + bias[None, :]
    # Inputs before the row's first token of this step are in its page, unless it is new.
    for w in tl.static_range(0, WINDOW + 1):
        back = t + (w - WINDOW)
        weight = tl.load(weight_ptr + c * (WINDOW + 1) + w, mask=c < count, other=0.0).to(tl.float32)
        recent = tl.load(
            x_ptr + (start + back)[:, None] * x_token + c[None, :], mask=own & (back >= 0)[:, None], other=0.0
        )
        before = tl.load(
            pages_ptr + page * page_stride + c[None, :] * WINDOW + (back + WINDOW)[:, None],
            mask=own & (back < 0)[:, None],
            other=0.0,
        )
        before = tl.where(is_new, 0.0, before)
        total += tl.where((back >= 0)[:, None], recent, before).to(tl.float32) * weight[None, :]
    total = total.to(out_ptr.dtype.element_ty)
    if SILU:  # of what was rounded, as modules of transformers have it
        wide = total.to(tl.float32)
        total = (wide / (1.0 + tl.exp(-wide))).to(total.dtype)
    tl.store(out_ptr + (start + t)[:, None] * out_token + c[None, :], total, mask=own)


@triton.jit
def _shift(x_ptr, x_token, before_ptr, target_ptr, is_new, start, length, c, count, WINDOW: tl.constexpr):
    """The latest inputs of a row after `length` of its tokens; of few tokens also some that its page had, unless it is
    new."""
    for w in tl.static_range(0, WINDOW):
        back = tl.zeros_like(c) + (length - WINDOW + w)
        recent = tl.load(x_ptr + (start + back) * x_token + c, mask=(c < count) & (back >= 0), other=0.0)
        before = tl.load(before_ptr + c * WINDOW + w + length, mask=(c < count) & (back < 0), other=0.0)
        before = tl.where(is_new, 0.0, before)
        value = tl.where(back >= 0, recent, before).to(target_ptr.dtype.element_ty)
        tl.store(target_ptr + c * WINDOW + w, value, mask=c < count)


@triton.jit
def shift(
    x_ptr, pages_ptr, rows_ptr, pieces_ptr, x_token, page_stride, pages, count,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The latest inputs of each channel become the new state. Grid (N, C / BLOCK).

    What is saved on the way goes first, because it may need inputs that only the page has. Within the page a place is
    read before it is written: the oldest input goes first, and what it reads lies further on.
    """
    row = tl.program_id(0)
    start, length, page, is_new = _row(rows_ptr, row, pages)
    if length == 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own_ptr = pages_ptr + page * page_stride
    for piece in range(tl.load(rows_ptr + row * ROW + 4), tl.load(rows_ptr + row * ROW + 5)):
        at = pieces_ptr + piece * PIECE
        saved = tl.load(at + 2).to(tl.int64)
        if saved >= 0:
            until = (tl.load(at) - start + tl.load(at + 1)).to(tl.int32)
            _shift(x_ptr, x_token, own_ptr, pages_ptr + saved * page_stride, is_new, start, until, c, count, WINDOW)
    _shift(x_ptr, x_token, own_ptr, own_ptr, is_new, start, length, c, count, WINDOW)
