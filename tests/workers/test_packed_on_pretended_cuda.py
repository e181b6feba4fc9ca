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

from .test_on_pretended_cuda import SYNCS

pytestmark = [
    pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing())),
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]

SLOW = pytest.mark.slow
TOKENS, PROMPTS = 5, 2


def answer_of(family: str, folder: Path, *flags: str) -> dict[str, Any]:
    return pretend(family, folder, f"--tokens={TOKENS}", f"--prompts={PROMPTS}", "--once", *flags)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "w4a16-zero-points"),
        *(pytest.param("qwen3", name, marks=SLOW) for name in FORMATS if name != "w4a16-zero-points"),
        *(
            pytest.param(family, name, marks=SLOW)
            for family in ("gpt_oss", "qwen3_5_moe", "nemotron_h", "deepseek_v3", "granite4", "jamba")
            for name in ("mxfp4", "fp8-blocks")
        ),
    ],
)
def test_tokens_of_recorded_steps_are_those_of_the_plain_twin(family: str, name: str, tiny: Callable, tmp_path: Path):
    """Recorded steps launch as many kernels as with plain weights of the same bits in any company."""
    source = tiny(family)
    folder = make_twins(source.path, tmp_path, FORMATS[name])
    oracle = models.load_oracle(folder / "plain", ())
    expected = [models.greedy(oracle, prompt, TOKENS) for prompt in source.prompts[:PROMPTS]]
    packed = answer_of(family, folder / "packed", "--packed-products=triton")
    assert packed["refusal"] is None, packed["refusal"]
    assert packed["tokens"] == expected
    costs = packed["costs"]
    assert costs["unrecorded"]["steps"] == 0
    assert costs["replayed"]["most"]["sync"] == SYNCS
