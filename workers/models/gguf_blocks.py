"""Blocks of GGUF files as `Codes`: the same numbers, with codes, scales and leasts each in a tensor of their own.

A file keeps a row as blocks of 32 or 256 columns, each with its codes and scales side by side. Where a block has codes
of 32 columns, those of the columns n and n + 16 share a byte; `Codes` wants neighbours in one. Numbers are those that
the format's arithmetic gives in float32, bit for bit; only zeros of MXFP4 may have another sign. Who reads such files
elsewhere rounds inputs to 8 bits, so they may be here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.products.codes import CodeKind, Codes, in_fewer_bits


class BlockFormat(NamedTuple):
    """How many columns a block has, how many bytes, and what makes codes of blocks."""

    columns: int
    bytes: int
    read: Callable[[Tensor], Codes]  # of bytes [N, blocks, bytes]


def codes_of_blocks(format: str, rows: Tensor) -> Codes:
    """A weight of whole blocks.

    format: one of `BLOCK_FORMATS`
    rows:   uint8 [N, bytes of a row], as the file has them
    """
    block = BLOCK_FORMATS[format]
    count, row_bytes = rows.shape
    assert row_bytes % block.bytes == 0, f"{row_bytes} bytes are no whole blocks of {block.bytes}"
    codes = block.read(rows.reshape(count, row_bytes // block.bytes, block.bytes))
    return replace(codes, rounds_inputs=True)


# -- blocks of 32 columns, each with a scale ---------------------------------------------------------------------------


def _q4_0(blocks: Tensor) -> Codes:
    return _of_32(CodeKind.INT4, blocks[..., :2], _halves(blocks[..., 2:]), middle=8)


def _q4_1(blocks: Tensor) -> Codes:
    return _of_32(CodeKind.INT4, blocks[..., :2], _halves(blocks[..., 4:]), added=blocks[..., 2:4])


def _q5_0(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 6:]) | _bits_of_columns(blocks[..., 2:6])
    return _of_32(CodeKind.INT5, blocks[..., :2], codes, middle=16)


def _q5_1(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 8:]) | _bits_of_columns(blocks[..., 4:8])
    return _of_32(CodeKind.INT5, blocks[..., :2], codes, added=blocks[..., 2:4])


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(CodeKind.INT8, blocks[..., 2:].flatten(1), _float16(blocks[..., :2]).flatten(1), 32)


def _iq4_nl(blocks: Tensor) -> Codes:
    return _of_32(CodeKind.IQ4, blocks[..., :2], _halves(blocks[..., 2:]))


def _mxfp4(blocks: Tensor) -> Codes:
    codes, _ = in_fewer_bits(CodeKind.E2M1, _halves(blocks[..., 1:]).flatten(1))
    return Codes(CodeKind.E2M1, codes, blocks[..., 0].contiguous(), 32)


def _of_32(kind: CodeKind, scale: Tensor, codes: Tensor, middle: int = 0, added: Tensor | None = None) -> Codes:
    """added: float16 bytes of what the file adds to a product, where `Codes` subtracts"""
    packed, high = in_fewer_bits(kind, codes.flatten(1))
    least = None if added is None else -_float16(added).flatten(1)
    return Codes(kind, packed, _float16(scale).flatten(1), 32, middle=middle, high=high, least=least)


def _halves(codes: Tensor) -> Tensor:
    """[..,16] -> [..,32]: the low four bits of all bytes, then the high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _bits_of_columns(stored: Tensor) -> Tensor:
    """[..,4] -> [..,32]: the fifth bit of each column, where it belongs in a code."""
    return (stored.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


# -- blocks of 256 columns, with scales of 16 or 32 columns and a factor for all of them -------------------------------


def _q4_k(blocks: Tensor) -> Codes:
    return _with_leasts(CodeKind.INT4, blocks, _planes(blocks[..., 16:], 32, 4))


def _q5_k(blocks: Tensor) -> Codes:
    high = _planes(blocks[..., 16:48], 32, 1) << 4
    return _with_leasts(CodeKind.INT5, blocks, _planes(blocks[..., 48:], 32, 4) | high)


def _q6_k(blocks: Tensor) -> Codes:
    codes = _planes(blocks[..., :128], 64, 4) | (_planes(blocks[..., 128:192], 32, 2) << 4)
    packed, high = in_fewer_bits(CodeKind.INT6, codes.flatten(1))
    scale, factor = blocks[..., 192:208].flatten(1).view(torch.int8), _float16(blocks[..., 208:]).flatten(1)
    return Codes(CodeKind.INT6, packed, scale, 16, middle=32, high=high, block_scale=factor, block_groups=16)


def _q2_k(blocks: Tensor) -> Codes:
    """A scale and a least have four bits each in the file, and a byte each here: 100 bytes in place of 84."""
    packed, _ = in_fewer_bits(CodeKind.INT2, _planes(blocks[..., 16:80], 32, 2).flatten(1))
    both = blocks[..., :16].flatten(1)
    return Codes(
        CodeKind.INT2,
        packed,
        (both & 15).view(torch.int8),
        16,
        least=(both >> 4).view(torch.int8),
        block_scale=_float16(blocks[..., 80:82]).flatten(1),
        block_least=_float16(blocks[..., 82:84]).flatten(1),
        block_groups=16,
    )


def _q3_k(blocks: Tensor) -> Codes:
    """A high bit that is set stands for 4, and 4 is subtracted from all codes."""
    codes = _planes(blocks[..., 32:96], 32, 2) | (_planes(blocks[..., :32], 32, 1) << 2)
    packed, high = in_fewer_bits(CodeKind.INT3, codes.flatten(1))
    scale = _planes(blocks[..., 96:104], 8, 4) | (_planes(blocks[..., 104:108], 4, 2) << 4)
    scale, factor = scale.flatten(1).view(torch.int8) - 32, _float16(blocks[..., 108:]).flatten(1)
    return Codes(CodeKind.INT3, packed, scale, 16, middle=4, high=high, block_scale=factor, block_groups=16)


def _iq4_xs(blocks: Tensor) -> Codes:
    """Eight scales of six bits: two high bits of each come first, then their low ones."""
    codes = _halves(blocks[..., 8:].unflatten(-1, (-1, 16))).flatten(1)
    scale = _planes(blocks[..., 2:4], 1, 2) << 4 | _planes(blocks[..., 4:8], 1, 4)
    scale, factor = scale.flatten(1).view(torch.int8) - 32, _float16(blocks[..., :2]).flatten(1)
    packed, _ = in_fewer_bits(CodeKind.IQ4, codes)
    return Codes(CodeKind.IQ4, packed, scale, 32, block_scale=factor, block_groups=8)


def _with_leasts(kind: CodeKind, blocks: Tensor, codes: Tensor) -> Codes:
    """The factors of scales and of leasts come first, then eight of each in six bits."""
    packed, high = in_fewer_bits(kind, codes.flatten(1))
    scales, leasts, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((scales & 63, (both & 15) | (scales >> 2 & 48)), dim=-1)
    least = torch.cat((leasts & 63, (both >> 4) | (leasts >> 2 & 48)), dim=-1)
    return Codes(
        kind,
        packed,
        scale.flatten(1).view(torch.int8),
        32,
        high=high,
        least=least.flatten(1).view(torch.int8),
        block_scale=_float16(blocks[..., :2]).flatten(1),
        block_least=_float16(blocks[..., 2:4]).flatten(1),
        block_groups=8,
    )


def _planes(stored: Tensor, run_bytes: int, bits: int) -> Tensor:
    """Codes of `bits` bits: of each run of bytes, the lowest bits of all of them, then the next ones. [.., columns]"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    runs = stored.unflatten(-1, (-1, 1, run_bytes))
    return (runs >> shifts & ((1 << bits) - 1)).flatten(-3)


def _float16(stored: Tensor) -> Tensor:
    """[..,2] -> [..,1]"""
    return stored.contiguous().view(torch.float16)


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, _iq4_xs),
    "MXFP4": BlockFormat(32, 17, _mxfp4),
}
"""By the names that the format has for them."""
