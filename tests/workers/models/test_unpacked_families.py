"""Packed checkpoints whose weights are renamed, merged, stacked and cut: every rank's share is the plain twin's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from intarsia.tests.packing import FORMATS, RARE_FORMATS, make_twins, share

FAMILIES = (
    "llama", "gemma3", "gpt_oss", "qwen3_5", "qwen3_5_moe", "nemotron_h", "granite4", "jamba", "deepseek_v3",
    "lfm2_moe", "llama4",
)  # fmt: skip
USUAL = "fp8-blocks", "awq"
RANKS = (0, 1), (0, 2), (1, 2), (0, 4), (3, 4)
"""Rank and size."""

USUAL_RARE = ("qwen3_5_moe", "gptq-3-bits"), ("nemotron_h", "w4a16-modelopt")
"""Family and format."""

CASES = [
    pytest.param(family, name, marks=() if name in USUAL or (family, name) in USUAL_RARE else pytest.mark.slow)
    for family in FAMILIES
    for name in {**FORMATS, **RARE_FORMATS}
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_share_of_every_rank_is_that_of_the_plain_twin(family: str, name: str, tiny: Callable, tmp_path: Path):
    folder = make_twins(tiny(family).path, tmp_path, {**FORMATS, **RARE_FORMATS}[name])
    for rank, size in RANKS:
        packed, plain = (share(folder / kind, rank, size) for kind in ("packed", "plain"))
        assert packed.keys() == plain.keys()
        for parameter, wanted in plain.items():
            torch.testing.assert_close(
                packed[parameter], wanted, rtol=0, atol=0, msg=f"{parameter} of rank {rank} of {size}"
            )
