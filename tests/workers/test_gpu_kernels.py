"""Whole models through the kernels of GPUs, which Triton's interpreter runs on a CPU."""

import asyncio
from collections.abc import Callable

import pytest

from intarsia.kernels.toolchain import triton as gpu
from intarsia.proto.request import SamplingParams
from intarsia.tests.local import complete, make_engine

pytestmark = [
    pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing())),
    pytest.mark.usefixtures("as_on_a_gpu"),
]

NEW_TOKENS = 4


@pytest.mark.parametrize(
    "family",
    ["bamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gpt_oss", "llama4", "deepseek_v3"))]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("jamba", "qwen3_next", "lfm2", "minimax")]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3", "cohere2", "olmo3", "gemma3n")],
)
def test_first_tokens_are_those_of_the_oracle(family: str, tiny: Callable):
    model = tiny(family)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)

    async def run() -> None:
        engine = await make_engine(model.path, attention_backend="triton", max_prefill_chunk_tokens=20)
        answers = await complete(engine, model.prompts[:2], params)
        assert [answer.token_ids for answer in answers] == [tokens[:NEW_TOKENS] for tokens in model.expected[:2]]

    asyncio.run(run())
