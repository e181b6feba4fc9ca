"""Blocks of GGUF files as codes have the bits of the gguf library's own numbers, in no more bytes than the file has."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.products import NativeLinear, PackedCodes
from intarsia.workers.models.gguf_blocks import BLOCK_FORMATS, codes_of_blocks

ROWS, BLOCKS_OF_256 = 70, 3
FACTORS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Where a block has float16 numbers, which must be finite."""


def random_rows(format: str, seed: int = 0) -> Tensor:
    """uint8 [70, bytes of 768 columns]"""
    print(f"seed {seed}")
    block = BLOCK_FORMATS[format]
    generator = np.random.default_rng(seed)
    blocks = BLOCKS_OF_256 * 256 // block.columns
    rows = generator.integers(0, 256, (ROWS, blocks, block.bytes), dtype=np.uint8)
    for start in FACTORS[format]:
        factors = generator.normal(0, 0.1, (ROWS, blocks, 1)).astype(np.float16)
        rows[..., start : start + 2] = factors.view(np.uint8)
    if format == "MXFP4":
        rows[..., 0] = rows[..., 0] % 40 + 100  # powers that bfloat16 and products can hold
    return torch.from_numpy(rows.reshape(ROWS, -1))


def meant_numbers(format: str, rows: Tensor) -> Tensor:
    kind: Any = gguf.GGMLQuantizationType[format]
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind))


def same_bits(found: Tensor, meant: Tensor, format: str) -> None:
    """But for the sign of MXFP4's zeros."""
    assert found.dtype == meant.dtype == torch.float32
    if format == "MXFP4":
        found, meant = found + 0.0, meant + 0.0
    assert torch.equal(found.view(torch.int32), meant.view(torch.int32))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_numbers_of_blocks_have_the_bits_of_the_library(format: str):
    rows = random_rows(format)
    same_bits(codes_of_blocks(format, rows).numbers(torch.float32), meant_numbers(format, rows), format)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("dim, start, stop", [(0, 3, 66), (1, 0, 256), (1, 256, 768), (1, 96, 480), (1, 400, 768)])
def test_a_rank_s_slice_of_blocks_has_the_bits_of_the_library(format: str, dim: int, start: int, stop: int):
    rows = random_rows(format)
    cut = codes_of_blocks(format, rows).cut(dim, start, stop)
    assert cut is not None
    meant = meant_numbers(format, rows).narrow(dim, start, stop - start)
    same_bits(cut.numbers(torch.float32), meant, format)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")
def test_packed_rows_have_the_bits_of_the_library_rounded_once(format: str):
    rows = random_rows(format)
    meant, codes = meant_numbers(format, rows), codes_of_blocks(format, rows)
    every = torch.arange(ROWS)
    same_bits(PackedCodes(codes, torch.float32).rows(every), meant, format)
    torch.testing.assert_close(PackedCodes(codes, torch.bfloat16).rows(every), meant.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("format", [name for name in BLOCK_FORMATS if name != "Q2_K"])
def test_codes_take_at_most_a_twentieth_more_bytes_than_the_file(format: str):
    rows = random_rows(format)
    assert codes_of_blocks(format, rows).nbytes <= 1.05 * rows.nbytes


def test_scales_of_q2_k_take_a_byte_where_the_file_has_four_bits():
    rows = random_rows("Q2_K")
    assert codes_of_blocks("Q2_K", rows).nbytes * 84 == rows.nbytes * 100
