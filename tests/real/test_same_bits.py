"""Two real models: an answer has the same bits in any company, however its prompt is cut, found, preempted or swapped,
and with any number of threads. Skipped where their weights are not installed (`test_real_weights.py`)."""

from collections.abc import Sequence
from typing import Any

import pytest

from intarsia.kernels.products import NativeLinear
from intarsia.proto.request import SamplingParams
from intarsia.tests.conftest import Loop
from intarsia.tests.local import bits, complete, make_engine

from .loading import Real
from .test_real_weights import SLOW_S

pytestmark = pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")

NEW_TOKENS = 64
LENGTHS = [round(20 * 30 ** (n / 23)) for n in range(24)]
"""Tokens of the prompts: 20 to 600."""

FEW_LENGTHS, FEW_NEW_TOKENS = LENGTHS[::6], 16

Bits = list[list[tuple[int, Any]]]


def differing(found: Bits, wanted: Bits) -> dict[int, int]:
    """Of each answer that differs, the first token that does."""
    pairs = enumerate(zip(found, wanted, strict=True))
    return {n: next(k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y) for n, (a, b) in pairs if a != b}


async def check(real: Real, dtype: str, lengths: Sequence[int], new: int, memory: str, chunks: Sequence[int]) -> None:
    """memory: in which the longest fits, but not all of them"""
    prompts = real.pieces(lengths)
    asked = SamplingParams(temperature=0, max_tokens=new, logprobs=2, ignore_eos=True)
    usual: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 32, "kv_cache_memory": "512MiB", "same_bits": True}
    engine = await make_engine(real.path, cpu_threads=2, enable_prefix_caching=False, **usual)
    wanted = bits(await complete(engine, prompts, asked))
    alone = [bits(await complete(engine, [prompt], asked))[0] for prompt in prompts]
    assert differing(alone, wanted) == {}, "alone"
    for chunk in chunks:
        engine = await make_engine(real.path, cpu_threads=1, max_prefill_chunk_tokens=chunk, **usual)
        assert differing(bits(await complete(engine, prompts, asked)), wanted) == {}, f"in chunks of {chunk}"
        again = await complete(engine, prompts, asked)
        assert sum(answer.num_cached_tokens for answer in again) > 0
        assert differing(bits(again), wanted) == {}, f"found, after chunks of {chunk}"
    for swap in ("0", "256MiB"):
        settings = usual | {"kv_cache_memory": memory, "swap_space": swap}
        engine = await make_engine(real.path, **settings)
        assert differing(bits(await complete(engine, prompts, asked)), wanted) == {}, f"preempted, swap space {swap}"
        assert engine.stats.preemptions > 0
        assert engine.recount().all_free


FEW = [
    ("gemma-3-270m", "bfloat16"),
    pytest.param("gemma-3-270m", "float32", marks=pytest.mark.slow),
    ("smollm2-135m-instruct", "float32"),
    pytest.param("smollm2-135m-instruct", "bfloat16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("real", "dtype"), FEW, indirect=["real"])
def test_a_few_answers_have_the_same_bits_whatever_happens_beside(real: Real, dtype: str, loop: Loop):
    # The longest fits and hardly more, so that others give way whatever the timing.
    mib = (6 if "gemma" in str(real.path) else 8) * (2 if dtype == "float32" else 1)
    loop.run(check(real, dtype, FEW_LENGTHS, FEW_NEW_TOKENS, f"{mib}MiB", [64]))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_have_the_same_bits_whatever_happens_beside(real: Real, dtype: str, loop: Loop):
    memory = "24MiB" if dtype == "bfloat16" else "48MiB"
    loop.run(check(real, dtype, LENGTHS, NEW_TOKENS, memory, [7, 64, 2048]), limit_s=SLOW_S)
