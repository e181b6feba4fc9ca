"""What is drawn for a sequence depends on that sequence alone, to the last bit of its logits: not on who else is in a
step, on how a prompt is cut, on what is found in the cache, on preemption, swapping, or the number of threads."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from intarsia.proto.request import SamplingParams
from intarsia.tests.conftest import TinyModel
from intarsia.tests.least_memory import least_memory
from intarsia.tests.local import bits, complete, make_engine
from intarsia.tests.models import FAMILIES, WITH_IMAGES, prompts
from intarsia.tests.workers.test_families import LARGE_STATES

ASKED = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
"""Log-probabilities tell logits apart that differ in their last bit."""

LENGTHS = [5, 33, 47, 80, 130]
"""Of prompts: beyond a tile of keys, and beyond some chunks."""


ALL_FIT = {"mamba"}
"""Its requests need no more memory while they grow, so none has to give way."""


@pytest.fixture(params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITH_IMAGES))
def test_logits_have_the_same_bits_whatever_happens_beside(family: str, dtype: str, tiny: Callable):
    model: TinyModel = tiny(family)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    asked = prompts(seed, LENGTHS)
    kind: dict[str, Any] = {"dtype": dtype, "same_bits": True}  # else many rows may go torch's way

    async def run() -> None:
        engine = await make_engine(model.path, **kind, enable_prefix_caching=False, cpu_threads=2)
        wanted = bits(await complete(engine, asked, ASKED))
        alone = [bits(await complete(engine, [prompt], ASKED))[0] for prompt in asked]
        assert alone == wanted, "alone"
        # In pieces, one thread, then out of the cache.
        for chunk in (7, 64):
            engine = await make_engine(model.path, **kind, max_prefill_chunk_tokens=chunk, cpu_threads=1)
            assert bits(await complete(engine, asked, ASKED)) == wanted, f"chunks of {chunk}"
            again = await complete(engine, asked, ASKED)
            assert sum(each.num_cached_tokens for each in again) > 0
            assert bits(again) == wanted, f"found, after chunks of {chunk}"
        # In a pool that is too small for all at once. The longest comes last, and meets a pool that others use.
        block_size = 16 if family in LARGE_STATES else 5
        item_bytes = 2 if dtype == "bfloat16" else 4
        memory = least_memory(model, block_size, max(LENGTHS) + ASKED.max_tokens, item_bytes=item_bytes)
        small: dict[str, Any] = {"block_size": block_size, "kv_cache_memory": memory, "max_prefill_chunk_tokens": 7}
        for swap in ("0", "64MiB"):
            engine = await make_engine(model.path, **kind, swap_space=swap, **small)
            assert bits(await complete(engine, asked, ASKED)) == wanted, f"preempted, swap space {swap}"
            assert engine.stats.preemptions > 0 or family in ALL_FIT

    asyncio.run(run())
