"""What the tools write with which people quantise models is read as they read it themselves.

None of them has to be there: they are run where they can be imported, each in a process of its own
(`tests/writers.py`).
"""

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from intarsia.proto.request import SamplingParams
from intarsia.tests import models, tiny_configs, writers
from intarsia.tests.local import complete, make_engine
from intarsia.tests.packing import share

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
"""Some tools take only whole groups of 128."""

MOST_ERROR = 1e-6
HALVES = 2e-3
"""Where a tool computes its scales in 32 bits and stores 16, or computes its weights in 16."""

AGAIN = 0.04
"""modelopt: modules of one input get one scale when they are saved, and are rounded anew."""

CASES: list[tuple[str, str, str, float]] = [
    *(("llmcompressor", "gemma3", scheme, MOST_ERROR) for scheme in (
        "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "W4A16_ASYM", "W2A16", "W3A16", "W5A16", "W6A16",
        "W7A16", "W4A8", "W4AFP8", "NVFP4A16", "MXFP4A16", "MXFP8A16",
    )),
    *(("llmcompressor", "qwen3_moe", scheme, MOST_ERROR) for scheme in ("W3A16", "W4A8", "FP8_BLOCK")),
    *(("auto-round", "gemma3", scheme, HALVES) for scheme in (
        'W4A16 auto_round {"group_size":32}', "W3A16 auto_round",
        "W2A16 auto_gptq", 'W4A16 auto_gptq {"group_size":32,"sym":false}', "W8A16 auto_gptq",
        'W4A16 auto_awq {"sym":false}', 'W4A16 auto_round {"layer_config":{"self_attn":{"bits":8}}}',
        "W4A16 llm_compressor", "FP8_BLOCK auto_round", "MXFP4 auto_round", "MXFP8 auto_round", "NVFP4 auto_round",
    )),
    ("auto-round", "qwen3_moe", "W3A16 auto_round", HALVES),
    *(("gptqmodel", "gemma3", scheme, HALVES) for scheme in (
        '{"bits":4,"group_size":32}', '{"bits":3,"group_size":32}', '{"bits":2,"group_size":32}',
        '{"bits":4,"group_size":32,"desc_act":true}', '{"bits":4,"group_size":32,"sym":false}',
    )),
    *(("modelopt", "gemma3", scheme, MOST_ERROR) for scheme in (
        "FP8_PER_CHANNEL_PER_TOKEN_CFG", "INT8_WEIGHT_ONLY_CFG", "INT8_SMOOTHQUANT_CFG",
        "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    )),
    ("modelopt", "gemma3", "FP8_DEFAULT_CFG", AGAIN),
    *(("torchao", "gemma3", scheme, MOST_ERROR) for scheme in (
        "int8", "int8 of groups", "int4 in bytes", "fp8",
    )),
]  # fmt: skip
"""Writer, family, scheme, and how far ours may be from the writer's own numbers, relative to their norm."""

EXPERT = re.compile(r"(?P<experts>.*experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a family, not quantised."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        if family not in made:
            few: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
            config: Any = (
                Qwen3MoeConfig(**tiny_configs.COMMON, **few) if family == "qwen3_moe" else tiny_configs.gemma3()
            )
            config.update({**SIZES, "layer_types": [tiny_configs.S, tiny_configs.F]} if family == "gemma3" else SIZES)
            torch.manual_seed(3)
            made[family] = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made[family])
        return made[family]

    return make


def run_writer(writer: str, scheme: str, source: Path, folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
    """The checkpoint that it writes, and its own numbers. Skips where it is not installed."""
    if importlib.util.find_spec(writers.WRITERS[writer][0]) is None:
        pytest.skip(f"{writer} is not installed")
    shutil.copytree(source, folder / "source")
    written, truth = folder / "written", folder / "truth.safetensors"
    command = [sys.executable, writers.__file__, writer, scheme, folder / "source", written, truth]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode == writers.NOT_INSTALLED:
        pytest.skip(f"{writer} cannot be imported here: {run.stdout.strip()}")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return written, load_file(truth)


def of_name(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """A weight by its name in files, where experts may be stored one by one and are held as one."""
    one = EXPERT.fullmatch(name)
    if one is None:
        return parameters[name]
    together = "down_proj" if one["part"] == "down" else "gate_up_proj"
    weight = parameters[f"{one['experts']}.{together}"][int(one["number"])]
    return weight if one["part"] == "down" else weight.chunk(2)[one["part"] == "up"]


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "family", "scheme", "most"), CASES, ids=lambda each: str(each).replace(" ", "-"))
def test_what_a_tool_writes_is_read_as_the_tool_reads_it(
    writer: str, family: str, scheme: str, most: float, plain: Callable[[str], Path], tmp_path: Path
):
    written, truth = run_writer(writer, scheme, plain(family), tmp_path)
    read, before = share(written, 0, 1), share(plain(family), 0, 1)
    truth = {name: numbers for name, numbers in truth.items() if not name.startswith("lm_head")}
    assert any(not torch.equal(truth[name], of_name(before, name)) for name in truth), "the tool has changed no weight"
    errors = {name: float((of_name(read, name) - wanted).norm() / wanted.norm()) for name, wanted in truth.items()}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= most, f"{worst}: {errors[worst]:.2g}"
    # Ranks and engines: with a twin that holds what one rank reads.
    twin = tmp_path / "twin"
    shutil.copytree(plain(family), twin)
    oracle = models.load_oracle(twin, ())
    oracle.load_state_dict(dict(read), strict=False)
    oracle.save_pretrained(twin)
    for rank in (0, 1):
        ours, whole = share(written, rank, 2), share(twin, rank, 2)
        for name, wanted in whole.items():
            torch.testing.assert_close(ours[name], wanted, rtol=0, atol=0, msg=f"{name} of rank {rank}")
    prompts = models.prompts(5, (7, 33))
    expected = [models.greedy(oracle, prompt, 8) for prompt in prompts]
    assert asyncio.run(answers(written, prompts)) == expected


async def answers(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    config = json.loads((path / "config.json").read_text())
    assert "quantization_config" in config or (path / "hf_quant_config.json").exists()
    engine = await make_engine(path, dtype="float32", packed_products="cpu")
    asked = SamplingParams(temperature=0, max_tokens=8)
    return [completion.token_ids for completion in await complete(engine, prompts, asked)]
