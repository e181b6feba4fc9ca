"""Packed checkpoints whose weights are renamed, merged, stacked and cut: every rank's share is the plain twin's."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from intarsia.tests.packing import FORMATS, make_twins
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.families import WITH_ENCODER
from intarsia.workers.models.weights import fill_weights
from intarsia.workers.tensor_parallel import TensorParallel

FAMILIES = (
    "llama", "gemma3", "gpt_oss", "qwen3_5", "qwen3_5_moe", "nemotron_h", "granite4", "jamba", "deepseek_v3",
    "lfm2_moe",
)  # fmt: skip
USUAL = "fp8-blocks", "awq"
RANKS = (0, 1), (0, 2), (1, 2), (0, 4), (3, 4)
"""Rank and size."""

CASES = [
    pytest.param(family, name, marks=() if name in USUAL else pytest.mark.slow)
    for family in FAMILIES
    for name in FORMATS
]


def share(path: Path, rank: int, size: int) -> Mapping[str, Tensor]:
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    assert config.model_type not in WITH_ENCODER
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parallel = TensorParallel(rank, size)
    fill_weights(
        module, Checkpoint(path), parallel, config, torch.float32, torch.device("cpu"), lambda done, total: None
    )
    return dict(module.named_parameters())


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_share_of_every_rank_is_that_of_the_plain_twin(family: str, name: str, tiny: Callable, tmp_path: Path):
    folder = make_twins(tiny(family).path, tmp_path, FORMATS[name])
    for rank, size in RANKS:
        packed, plain = (share(folder / kind, rank, size) for kind in ("packed", "plain"))
        assert packed.keys() == plain.keys()
        for parameter, wanted in plain.items():
            torch.testing.assert_close(
                packed[parameter], wanted, rtol=0, atol=0, msg=f"{parameter} of rank {rank} of {size}"
            )
