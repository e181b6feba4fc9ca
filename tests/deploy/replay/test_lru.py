"""The textbook rule against integers worked out elsewhere from the same published traces."""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from intarsia.deploy.replay.lru import replay_lru
from intarsia.deploy.replay.requests import replay_requests
from intarsia.deploy.replay.traces import TraceRequest, read_trace
from intarsia.kvcache.eviction import policy_named
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.prefix import GivenChain
from intarsia.kvcache.reach import Full
from intarsia.tests.kvcache.plans import plan_of

TRACES = Path(__file__).parents[3].parent / "shared" / "data" / "traces"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not beside the checkout")


@cache
def requests(name: str) -> list[TraceRequest]:
    if name == "agent64k":
        return list(read_trace(TRACES / "agentic_coding.jsonl.gz", longest_prompt=65_536))
    if name != "conv10min":
        return list(read_trace(TRACES / f"mooncake_{name}.jsonl.gz"))
    with gzip.open(TRACES / "mooncake_conversation.jsonl.gz", "rt") as lines:
        early = [json.loads(line)["timestamp"] < 600_000 for line in lines]
    return [request for request, is_early in zip(requests("conversation"), early, strict=True) if is_early]


@pytest.mark.parametrize(
    ("trace", "rule", "blocks", "hits", "evictions"),
    [
        ("conversation", "r1", 512, 12_168, 275_820),
        ("conversation", "r1", 8192, 52_381, 227_927),
        ("conversation", "r1", 32_768, 96_618, 159_114),
        ("conversation", "r1", None, 105_710, 0),
        ("conversation", "r2", 512, 12_173, 263_806),
        ("conversation", "r2", 8192, 54_387, 213_912),
        ("conversation", "r2", 32_768, 97_963, 145_760),
        ("conversation", "r2", None, 105_592, 0),
        ("conv10min", "r1", 512, 1_805, 46_354),
        ("conv10min", "r1", 8192, 8_891, 31_588),
        ("conv10min", "r1", 16_384, 11_974, 20_313),
        ("conv10min", "r1", None, 13_821, 0),
        ("conv10min", "r2", 512, 1_805, 44_606),
        ("conv10min", "r2", 8192, 9_026, 29_705),
        ("conv10min", "r2", 16_384, 12_076, 18_463),
        ("conv10min", "r2", None, 13_806, 0),
        ("synthetic", "r2", 512, 5_789, 111_587),
        ("synthetic", "r2", 8192, 47_153, 62_543),
        ("synthetic", "r2", 16_384, 65_837, 35_667),
        ("synthetic", "r2", None, 77_740, 0),
        ("agent64k", "r1", 1024, 314_994, 306_717),
        ("agent64k", "r2", 4096, 524_307, 94_332),
        ("agent64k", "r1", 8192, 553_702, 60_841),
        ("agent64k", "r2", None, 571_301, 0),
    ],
)
def test_lru_of_a_published_trace_finds_and_evicts_exactly_so_much(trace, rule, blocks, hits, evictions):
    result = replay_lru(requests(trace), blocks, full_blocks_only=rule == "r2")
    assert result == (hits, evictions)


@pytest.mark.parametrize("trace", ["conv10min", "synthetic"])
def test_the_manager_finds_in_unlimited_memory_what_the_rule_finds(trace: str):
    """One full layer, plain LRU. The rule caps a hit at a block border; the manager may go on inside the last block."""
    manager = CacheManager(plan_of(Full(), blocks=50_000, block_tokens=512), policy=policy_named("lru"))
    found = 0
    for number, request in enumerate(requests(trace)):
        full = request.length // 512
        hit = manager.lookup(GivenChain([block.to_bytes(8, "big") for block in request.ids[:full]], request.length))
        found += hit.tokens // 512
        manager.open(RequestId(number), hit)
        manager.extend(RequestId(number), request.length)
        manager.commit(RequestId(number))
        manager.release(RequestId(number))
    assert found == replay_lru(requests(trace), None, full_blocks_only=True).hit_blocks


def test_a_block_is_never_found_more_often_than_it_was_there_before():
    result, _ = replay_requests(requests("conv10min")[:300], _one_layer(), None)
    assert 0 < result.hit_tokens < result.tokens
    assert result.evictions == 0
    assert result.lost_tokens.get("evicted", 0) == 0


def _one_layer():
    from intarsia.deploy.tools.model_layers import ModelLayers
    from intarsia.kvcache.spec import LayerSpec

    return ModelLayers("one layer", (LayerSpec(0, Full(), 1, 8, 8, 2),), None, 0)
