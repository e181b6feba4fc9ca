"""Residual streams in Triton: the product by tiles of tokens and parts of the width, then the rest of a token in one
program. Sums are in float32, in an order that the widths alone give."""

import triton
import triton.language as tl


@triton.jit
def multiply(
    streams_ptr, product_ptr, parts_ptr, tokens,
    WIDTH: tl.constexpr, WEIGHTS: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TOKENS, PARTS): of a part of the width, products with all weights and the sum of squares, which is
    the last of PADDED."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part, m = tl.program_id(1), tl.arange(0, PADDED)
    live = token < tokens
    sums = tl.zeros((TOKENS, PADDED), dtype=tl.float32)
    squares = tl.zeros((TOKENS,), dtype=tl.float32)
    for start in range(0, PART, BLOCK):
        d = part * PART + start + tl.arange(0, BLOCK)
        inside = (d < WIDTH) & (start + tl.arange(0, BLOCK) < PART)
        x = tl.load(
            streams_ptr + token.to(tl.int64)[:, None] * WIDTH + d[None, :],
            mask=live[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        w = tl.load(
            product_ptr + m[None, :] * WIDTH + d[:, None], mask=(m < WEIGHTS)[None, :] & inside[:, None], other=0.0
        )
        sums += tl.dot(x, w, input_precision="ieee")
        squares += tl.sum(x * x, 1)
    sums = tl.where((m == PADDED - 1)[None, :], squares[:, None], sums)
    to = parts_ptr + (token.to(tl.int64)[:, None] * PARTS + part) * PADDED + m[None, :]
    tl.store(to, sums, mask=live[:, None])


@triton.jit
def finish(
    streams_ptr, parts_ptr, base_ptr, scale_ptr, collapsed_ptr, after_ptr, mixed_ptr, norm_eps, eps,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Grid (tokens): what becomes of a token's streams. COUNT is a power of two."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, COUNT)
    pair = n[:, None] * COUNT + n[None, :]
    squares = 0.0
    first = tl.zeros((COUNT,), dtype=tl.float32)
    second = tl.zeros((COUNT,), dtype=tl.float32)
    third = tl.zeros((COUNT, COUNT), dtype=tl.float32)
    for part in range(PARTS):
        here = parts_ptr + (token * PARTS + part) * PADDED
        squares += tl.load(here + PADDED - 1)
        first += tl.load(here + n)
        if not IS_LAST:
            second += tl.load(here + COUNT + n)
            third += tl.load(here + 2 * COUNT + pair)
    shrink = tl.rsqrt(squares / WIDTH + norm_eps)
    before = tl.sigmoid(first * shrink * tl.load(scale_ptr) + tl.load(base_ptr + n)) + eps
    for start in range(0, CHANNELS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        live = c < CHANNELS
        x = tl.load(streams_ptr + token * WIDTH + n[:, None] * CHANNELS + c[None, :], mask=live[None, :], other=0.0)
        total = tl.sum(before[:, None] * x.to(tl.float32), 0)
        tl.store(collapsed_ptr + token * CHANNELS + c, total.to(x.dtype), mask=live)
    if not IS_LAST:
        logits = second * shrink * tl.load(scale_ptr + 1) + tl.load(base_ptr + COUNT + n)
        tl.store(after_ptr + token * COUNT + n, 2.0 * tl.sigmoid(logits))
        mixed = third * shrink * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * COUNT + pair)
        mixed = tl.exp(mixed - tl.max(mixed, 1)[:, None])
        mixed = mixed / tl.sum(mixed, 1)[:, None] + eps
        mixed = mixed / (tl.sum(mixed, 0)[None, :] + eps)
        for _ in range(ROUNDS - 1):
            mixed = mixed / (tl.sum(mixed, 1)[:, None] + eps)
            mixed = mixed / (tl.sum(mixed, 0)[None, :] + eps)
        tl.store(mixed_ptr + token * COUNT * COUNT + pair, mixed)
