"""What a state mixer does around its recurrence, in Triton: each of `reference.py`'s operations in one kernel.

Suffixes in comments: T packed tokens    C channels    H heads    G heads of keys    K key size    V value size
"""

import triton
import triton.language as tl

NO_NORM = tl.constexpr(0)
NORM_FIRST = tl.constexpr(1)
"""Of `protocol.Order`; the other has the gate first."""

SOFTPLUS = tl.constexpr(0)
SILU = tl.constexpr(1)
"""Of `protocol.Function`; the other is a sigmoid."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + e^x); of small e^x without losing its last bits, of large x as torch has it."""
    e = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + e
    log = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def delta_inputs(
    qkv_ptr, a_ptr, b_ptr, A_ptr, bias_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,
    qkv_token, a_token, b_token, key_scale, least,
    KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, KEYS_PADDED: tl.constexpr,
    HEADS: tl.constexpr, VALUES: tl.constexpr, VALUES_PADDED: tl.constexpr,
    DECAYS: tl.constexpr, DECAYS_PADDED: tl.constexpr, HAS_LEAST: tl.constexpr,
):  # fmt: skip
    """Grid (T, 2 G + H): a head of queries, of keys, or of values with its gates.

    qkv [T,C]  a [T,H DECAYS]  b [T,H]  A, bias [H DECAYS]  q, k [T,G,K]  v [T,H,V]  g [T,H DECAYS]  beta [T,H]; all
    that is written is float32
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv_ptr + token * qkv_token
    if part < 2 * KEY_HEADS:
        d = tl.arange(0, KEYS_PADDED)
        x = tl.load(row + part * KEYS + d, mask=d < KEYS, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
        if part < KEY_HEADS:
            tl.store(q_ptr + (token * KEY_HEADS + part) * KEYS + d, x * key_scale, mask=d < KEYS)
        else:
            tl.store(k_ptr + (token * KEY_HEADS + part - KEY_HEADS) * KEYS + d, x, mask=d < KEYS)
    else:
        head = part - 2 * KEY_HEADS
        e = tl.arange(0, VALUES_PADDED)
        v = tl.load(row + 2 * KEY_HEADS * KEYS + head * VALUES + e, mask=e < VALUES, other=0.0).to(tl.float32)
        tl.store(v_ptr + (token * HEADS + head) * VALUES + e, v, mask=e < VALUES)
        n = tl.arange(0, DECAYS_PADDED)
        at, live = head * DECAYS + n, n < DECAYS
        a = tl.load(a_ptr + token * a_token + at, mask=live, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + at, mask=live, other=0.0)
        A = tl.load(A_ptr + at, mask=live, other=0.0)
        if HAS_LEAST:
            g = least * _sigmoid(-A * a)
        else:
            g = A * _softplus(a)
        tl.store(g_ptr + token * HEADS * DECAYS + at, g, mask=live)
        b = tl.load(b_ptr + token * b_token + head).to(tl.float32)
        tl.store(beta_ptr + token * HEADS + head, _sigmoid(b))


@triton.jit
def mamba2_inputs(
    x_ptr, dt_ptr, A_ptr, bias_ptr, v_ptr, g_ptr, x_token, dt_token, least, most,
    INNER: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, H V / BLOCK): numbers times the time steps of their heads.

    x [T,H V ..]  dt [T,H]  A, bias [H]  v [T,H,V]  g [T,H]; what is written is float32
    """
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < INNER
    head = c // VALUES
    dt = tl.load(dt_ptr + token * dt_token + head, mask=live, other=0.0).to(tl.float32)
    dt = _softplus(dt + tl.load(bias_ptr + head, mask=live, other=0.0))
    dt = tl.minimum(tl.maximum(dt, least), most)
    x = tl.load(x_ptr + token * x_token + c, mask=live, other=0.0).to(tl.float32)
    tl.store(v_ptr + token * INNER + c, x * dt, mask=live)
    first = live & (c % VALUES == 0)
    A = tl.load(A_ptr + head, mask=first, other=0.0)
    tl.store(g_ptr + token * (INNER // VALUES) + head, dt * A, mask=first)


@triton.jit
def lru_inputs(
    x_ptr, input_ptr, forget_ptr, rate_ptr, positions_ptr, out_ptr, g_ptr, x_token, input_token, forget_token,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, C / BLOCK).  x, input, forget [T,C]  rate [C]  positions [T]  out, g [T,C]: float32"""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < CHANNELS
    x = tl.load(x_ptr + token * x_token + c, mask=live, other=0.0)
    kind = x.dtype
    let_in = _sigmoid(tl.load(input_ptr + token * input_token + c, mask=live, other=0.0).to(tl.float32))
    forget = _sigmoid(tl.load(forget_ptr + token * forget_token + c, mask=live, other=0.0).to(tl.float32))
    g = tl.load(rate_ptr + c, mask=live, other=0.0) * forget.to(kind).to(tl.float32)
    x = (x.to(tl.float32) * let_in.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    is_first = tl.load(positions_ptr + token) == 0
    out = x * tl.where(is_first, 1.0, tl.sqrt(1.0 - tl.exp(2.0 * g)))
    tl.store(out_ptr + token * CHANNELS + c, out, mask=live)
    tl.store(g_ptr + token * CHANNELS + c, g, mask=live)


@triton.jit
def mapped(
    x_ptr, factor_ptr, out_ptr, x_token, factor_token,
    WIDTH: tl.constexpr, FUNCTION: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, C / BLOCK). Rounded to x's dtype; a softplus without a factor is not."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < WIDTH
    x = tl.load(x_ptr + token * x_token + c, mask=live, other=0.0)
    wide = x.to(tl.float32)
    if FUNCTION == SOFTPLUS:
        out = _softplus(wide)
    elif FUNCTION == SILU:
        out = wide * _sigmoid(wide)
    else:
        out = _sigmoid(wide)
    if HAS_FACTOR or FUNCTION != SOFTPLUS:
        out = out.to(x.dtype).to(tl.float32)
    if HAS_FACTOR:
        out *= tl.load(factor_ptr + token * factor_token + c, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + c, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def gated_norm(
    y_ptr, gate_ptr, weight_ptr, D_ptr, x_ptr, out_ptr, y_token, gate_token, x_token, eps,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ORDER: tl.constexpr, HAS_SKIP: tl.constexpr, ROUNDS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Grid (T, C / WIDTH): channels whose mean is taken together, or any where there is no norm.

    y [T,C] float32  gate, x, out [T,C]  weight, D [C] float32
    """
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    at = tl.program_id(1) * WIDTH + c
    live = (c < WIDTH) & (at < CHANNELS)
    kind = out_ptr.dtype.element_ty
    y = tl.load(y_ptr + token * y_token + at, mask=live, other=0.0).to(tl.float32)
    if HAS_SKIP:
        x = tl.load(x_ptr + token * x_token + at, mask=live, other=0.0).to(tl.float32)
        y += tl.load(D_ptr + at, mask=live, other=0.0) * x
    if ROUNDS:
        y = y.to(kind).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_token + at, mask=live, other=0.0).to(tl.float32)
    if GATE == SILU:
        gate *= _sigmoid(gate)
    else:
        gate = _sigmoid(gate)
    if ORDER != NORM_FIRST:
        y *= gate
    if ORDER != NO_NORM:
        y *= tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
        if ROUNDS:
            y = y.to(kind).to(tl.float32)
        y *= tl.load(weight_ptr + at, mask=live, other=0.0)
        if ROUNDS:
            y = y.to(kind).to(tl.float32)
    if ORDER == NORM_FIRST:
        y *= gate
    tl.store(out_ptr + token * CHANNELS + at, y.to(kind), mask=live)
