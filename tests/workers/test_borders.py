"""A second conversation with the same instructions finds them whole, whatever the layers keep."""

import asyncio
from collections.abc import Callable

import pytest

from intarsia.proto.request import RequestOptions, SamplingParams
from intarsia.tests.local import Completion, asking, make_engine
from intarsia.tests.models import is_greedy, load_oracle, prompts

BLOCK_TOKENS = 8
FAMILIES = (
    "gemma3",
    "gpt_oss",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "falcon_h1",
    "jamba",
    "lfm2",
    "gemma3n",
    "llama4",
    "deepseek_v4",
    "kimi_linear",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_conversation_finds_all_before_a_border_inside_a_block(family: str, tiny: Callable):
    model = tiny(family)
    instructions, *questions = prompts(11, (43, 30, 29))
    oracle = load_oracle(model.path)

    async def scenario() -> None:
        engine = await make_engine(model.path, block_size=BLOCK_TOKENS)
        serving = asyncio.ensure_future(engine.run())
        try:
            for found, question in zip((0, 43), questions, strict=True):
                prompt, completion = [*instructions, *question], Completion()
                options = RequestOptions(borders=(len(instructions),))
                sampling = SamplingParams(temperature=0, max_tokens=6)
                engine.submit(asking(prompt, sampling, options=options), 0, completion.sink)
                await completion.done.wait()
                assert completion.error is None and completion.num_cached_tokens == found
                assert is_greedy(oracle, prompt, completion.token_ids)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(scenario())
