"""Models that torch compiles."""

import asyncio
from collections.abc import Callable

import pytest

from intarsia.errors import InvalidSetting
from intarsia.proto.request import SamplingParams
from intarsia.tests.local import complete, make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "bamba", "deepseek_v3", "gpt_oss"])
def test_tokens_of_a_compiled_model_are_those_of_the_oracle(family: str, tiny: Callable):
    model = tiny(family)

    async def run() -> None:
        engine = await make_engine(model.path, torch_compile=True, max_prefill_chunk_tokens=7)
        for _ in range(2):
            answers = await complete(engine, model.prompts, GREEDY)
            assert [answer.token_ids for answer in answers] == model.expected

    asyncio.run(run())


def test_compiling_and_running_as_written_at_once_is_refused(tiny: Callable):
    with pytest.raises(InvalidSetting, match="leave one of them out") as refused:
        asyncio.run(make_engine(tiny("gemma3").path, torch_compile=True, enforce_eager=True))
    assert refused.value.field == "torch_compile"
