"""Whole engines of packed weights on a pretended CUDA device: kernels that unpack give the tokens of the plain twin."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from intarsia.kernels.toolchain import triton as gpu
from intarsia.tests import models
from intarsia.tests.packing import FORMATS, make_twins
from intarsia.tests.pretended_cuda.child import pretend
from intarsia.tests.pretended_cuda.guard import compiler
from intarsia.tests.workers.models.test_weight_map import make_four_bit_twins
from intarsia.tests.workers.test_on_pretended_cuda import SYNCS

pytestmark = [
    pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing())),
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]

SLOW = pytest.mark.slow
TOKENS, PROMPTS = 4, 1


CASES = [
    *(pytest.param("qwen3", name, marks=() if name == "w4a16-zero-points" else SLOW) for name in FORMATS),
    *(
        pytest.param(family, name, marks=SLOW)
        for family in ("gpt_oss", "qwen3_5_moe", "nemotron_h", "deepseek_v3", "granite4", "jamba", "llama4")
        for name in ("mxfp4", "fp8-blocks")
    ),
]


def check_tokens(family: str, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Of folder/packed, by our kernels, against transformers' with folder/plain. Returns what a recorded step costs."""
    oracle = models.load_oracle(folder / "plain", ())
    expected = [models.greedy(oracle, prompt, TOKENS) for prompt in prompts[:PROMPTS]]
    flags = f"--tokens={TOKENS}", f"--prompts={PROMPTS}", "--once"
    answer = pretend(family, folder / "packed", *flags, "--packed-products=triton")
    assert answer["refusal"] is None, answer["refusal"]
    assert answer["tokens"] == expected
    costs = answer["costs"]
    assert costs["unrecorded"]["steps"] == 0
    assert costs["replayed"]["most"]["sync"] == SYNCS
    return costs["replayed"]["most"]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_tokens_of_recorded_steps_are_those_of_the_plain_twin(family: str, name: str, tiny: Callable, tmp_path: Path):
    source = tiny(family)
    check_tokens(family, make_twins(source.path, tmp_path, FORMATS[name]), source.prompts)


@SLOW
def test_experts_of_four_bits_give_the_tokens_of_the_plain_twin(tiny: Callable, tmp_path: Path):
    source = tiny("gpt_oss")
    make_four_bit_twins(source.path, tmp_path)
    check_tokens("gpt_oss", tmp_path, source.prompts)


@SLOW
@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_a_recorded_step_launches_no_more_than_with_plain_weights(name: str, tiny: Callable, tmp_path: Path):
    """A launch takes the place of a kernel of torch."""
    source = tiny("qwen3")
    folder = make_twins(source.path, tmp_path, FORMATS[name])
    packed = check_tokens("qwen3", folder, source.prompts)
    flags = f"--tokens={TOKENS}", f"--prompts={PROMPTS}", "--once", "--same-bits"
    plain = pretend("qwen3", folder / "plain", *flags)["costs"]["replayed"]["most"]
    kinds = "recorded launch", "recorded torch kernel"
    print({kind: (packed[kind], plain[kind]) for kind in kinds})
    assert sum(packed[kind] for kind in kinds) <= sum(plain[kind] for kind in kinds)
