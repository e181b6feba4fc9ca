"""Attention to chosen tokens: how the queries of a step are laid out."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch

from intarsia.errors import UnsupportedModel
from intarsia.kernels.token_choice import BlockRule, ChoiceBatch, choose_blocks
from intarsia.proto.request import SamplingParams
from intarsia.tests.local import complete, make_engine
from intarsia.workers.layers import gathering
from intarsia.workers.layers.chosen import Kind


def test_a_query_attends_to_all_it_sees_until_that_is_too_many():
    assert Kind(4).counts(np.arange(6)).tolist() == [1, 2, 3, 4, 4, 4]


@pytest.mark.parametrize("rule", [BlockRule(4, 3, 1), BlockRule(3, 2, 2), BlockRule(5, 1, 1)], ids=str)
def test_as_many_tokens_are_counted_as_are_chosen_in_blocks(rule: BlockRule):
    positions = torch.arange(40)
    batch = ChoiceBatch(torch.arange(8)[None], positions, 40, 5)
    found = choose_blocks(torch.randn(40, 1, 8), torch.randn(8, 5, 8), batch, rule)[:, 0]
    counts = Kind(rule.most * rule.size, size=rule.size).counts(positions.numpy())
    for tokens, count in zip(found.tolist(), counts.tolist(), strict=True):
        assert tokens[:count] == sorted(set(tokens[:count])) and not any(tokens[count:])


def test_tokens_behind_the_last_whole_pool_are_counted_beside_those_of_chosen_pools():
    kind = Kind(2 * 3 + 2, size=3, is_of_whole=True)  # two pools of three tokens
    assert kind.counts(np.arange(13)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 6, 7]


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_queries_of_a_step_may_be_gathered_in_any_number_of_parts(
    family: str, tiny: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gathering, "GATHERED_TOKENS", 40)  # of three queries

    async def run() -> list[list[int]]:
        engine = await make_engine(tiny(family).path, block_size=5, max_prefill_chunk_tokens=26)
        greedy = SamplingParams(temperature=0, max_tokens=24)
        return [answer.token_ids for answer in await complete(engine, tiny(family).prompts, greedy)]

    assert asyncio.run(run()) == tiny(family).expected


def test_torch_compile_is_refused(tiny: Callable):
    with pytest.raises(UnsupportedModel, match="Start without torch_compile"):
        asyncio.run(make_engine(tiny("deepseek_v32").path, torch_compile=True))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_ignoring_the_index_changes_the_oracle_tokens(family: str, tiny: Callable):
    model = tiny(family)
    for expected, blind in zip(model.expected, model.window_ignored, strict=True):
        assert blind != expected
