"""What the cache manager costs and what it brings, without a model.

    python bench/kvcache.py [costs] [capacity] [reuse] [sessions] [waste] [traces --traces DIR]

Prints one JSON object; without a name all parts run, `traces` only when a directory is given. Layouts are those of real
models in bf16, blocks of 16 tokens unless said. Costs are medians, or means where said, of calls in one process.

    costs      microseconds: a decode step of 256 requests at 2k tokens, block borders included; the names of a 2k
               prompt; its prefill; lookups of a cached 128k prompt, and of 120k of it with the end of its windows
               evicted
    capacity   requests that a pool of 40 GiB took until it refused one, and bytes that one long prompt needs
    reuse      share of prompt tokens found: a chat of 8 turns, a document used 3 times, a prompt resent without its end
    sessions   of 16k tokens, used round after round: how many are found again, with fewer and with more than fit
    waste      bytes held for nothing, of all bytes held, for long documents on a Ministral-like model
    traces     hit rate on the Mooncake conversation trace in blocks of 512
"""

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from intarsia.deploy.replay.prefill import extend_by_chunk
from intarsia.errors import PoolExhausted
from intarsia.kvcache.eviction import policy_named
from intarsia.kvcache.ids import NULL_BLOCK, BlockId, RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import Group, PlanSettings
from intarsia.kvcache.prefix import Chain, GivenChain
from intarsia.kvcache.reach import Chunked, Full, Keeps, Reach, Sliding, State
from intarsia.kvcache.spec import LayerSpec, StateTensor
from intarsia.kvcache.strategies import plan_memory

GIB = 1 << 30
CHUNK_TOKENS = 8192


def _attention(index: int, reach: Reach, kv_heads: int, dim: int) -> LayerSpec:
    return LayerSpec(index, reach, kv_heads, dim, dim, item_bytes=2)


def _state(index: int, conv: tuple[int, int], recurrent: tuple[int, ...]) -> LayerSpec:
    return LayerSpec(index, State(), state=(StateTensor(conv, 2), StateTensor(recurrent, 4)))


MODELS: dict[str, list[LayerSpec]] = {
    "full-32": [_attention(n, Full(), 8, 128) for n in range(32)],
    "gpt-oss-20b": [_attention(n, Full() if n % 2 else Sliding(128), 8, 64) for n in range(24)],
    "gemma-3-27b": [_attention(n, Full() if n % 6 == 5 else Sliding(1024), 16, 128) for n in range(62)],
    "bamba-9b": [
        _attention(n, Full(), 8, 128) if n in (9, 18, 27) else _state(n, (8448, 3), (128, 64, 128)) for n in range(32)
    ],
    "jamba-1.5-mini": [
        _attention(n, Full(), 8, 128) if n % 8 == 4 else _state(n, (8192, 3), (8192, 16)) for n in range(32)
    ],
    "llama-4-scout": [_attention(n, Full() if n % 4 == 3 else Chunked(8192), 8, 128) for n in range(48)],
    "llama-4-scout, windows instead of chunks": [
        _attention(n, Full() if n % 4 == 3 else Sliding(8192), 8, 128) for n in range(48)
    ],
    "ministral-8b": [_attention(n, Full() if n % 4 == 0 else Sliding(32768), 8, 128) for n in range(36)],
}


class Cache:
    """A manager, and requests that run through it as an engine would run them."""

    def __init__(self, model: str, memory_gib: float, *, policy: str = "worth", block_tokens: int = 16):
        plan = plan_memory(MODELS[model], PlanSettings(int(memory_gib * GIB), block_tokens))
        self.manager = CacheManager(plan, policy=policy_named(policy))
        self.prompt_tokens = self.hit_tokens = 0
        self._requests = 0
        self._next_token = 1_000_000

    def unique(self, count: int) -> list[int]:
        self._next_token += count
        return list(range(self._next_token - count, self._next_token))

    def prefill(self, prompt: Chain | list[int]) -> RequestId:
        """Look up, open and compute a prompt. Raises `PoolExhausted`, with the request closed, when it does not fit."""
        manager = self.manager
        chain = manager.chain(prompt) if isinstance(prompt, list) else prompt
        self._requests += 1
        request = RequestId(self._requests)
        hit = manager.lookup(chain)
        manager.open(request, hit)
        self.prompt_tokens += chain.known
        self.hit_tokens += hit.tokens
        length = hit.tokens
        while length < chain.known:
            try:
                length = extend_by_chunk(manager, request, min(chain.known, length + CHUNK_TOKENS), length)
            except PoolExhausted:
                manager.release(request, length)
                raise
            manager.commit(request)
        return request

    def decode(self, request: RequestId, tokens: list[int], count: int) -> None:
        for token in self.unique(count):
            tokens.append(token)
            self.manager.extend(request, len(tokens), len(tokens) - 1)

    @property
    def hit_rate(self) -> float:
        return round(self.hit_tokens / self.prompt_tokens, 4)


# -- costs -------------------------------------------------------------------------------------------------------------


def costs(args: argparse.Namespace) -> dict[str, Any]:
    measured = ("full-32", "gpt-oss-20b", "gemma-3-27b", "bamba-9b")
    rows = [_step_costs(model, args.requests, args.tokens, args.steps) for model in measured]
    # A whole chunk, so that each request crosses one border, where it gives back 512 blocks.
    rows += [_step_costs(model, args.requests, 8192, 8192) for model in MODELS if model.startswith("llama-4-scout")]
    lookups = [_lookup_costs(model) for model in ("full-32", "gpt-oss-20b", "gemma-3-27b", "bamba-9b")]
    return {"steps": rows, "lookups": lookups}


def _step_costs(model: str, requests: int, tokens: int, count: int) -> dict[str, Any]:
    """Requests stand at different places in their blocks, so that every step has its share of block borders."""
    manager = Cache(model, 800).manager
    prompts = [[(n * 7919 + k) % 50_000 for k in range(tokens + n % 16)] for n in range(requests)]
    chains = [manager.chain(prompt) for prompt in prompts]
    names = [_us(chain.grow) for chain in chains]
    prefills = []
    for n, chain in enumerate(chains):

        def prefill(n: int = n, chain: Chain = chain) -> None:
            request = RequestId(n)
            manager.open(request, manager.lookup(chain))
            manager.extend(request, chain.known)
            manager.commit(request)

        prefills.append(_us(prefill))
    quiet_until = [0] * requests

    def step() -> None:
        for n, prompt in enumerate(prompts):
            length = len(prompt)
            if length >= quiet_until[n]:
                manager.extend(RequestId(n), length, length - 1)
                quiet_until[n] = manager.quiet_until(RequestId(n))

    steps = []
    for token in range(count):
        for prompt in prompts:
            prompt.append(token)
        steps.append(_us(step))
    return {
        "model": model,
        "tokens": tokens,
        "strategy": manager.plan.strategy,
        "groups": len(manager.plan.groups),
        "names_of_prompt_us": round(statistics.median(names), 1),
        "prefill_us": round(statistics.median(prefills), 1),
        "decode_step_mean_us": round(statistics.mean(steps), 1),
        "decode_step_median_us": round(statistics.median(steps), 1),
        "decode_step_max_us": round(max(steps), 1),
    }


def _lookup_costs(model: str) -> dict[str, Any]:
    cache = Cache(model, 200)
    manager = cache.manager
    tokens = cache.unique(131_072)
    manager.release(cache.prefill(tokens))
    warm, warm_tokens = _lookup_us(manager, [*tokens, 1])
    for g, group in enumerate(manager.plan.groups):
        if group.reach.keeps is Keeps.STATE or group.reach.window_tokens:
            index = manager.pool.groups[g].index
            for name in manager.chain(tokens).grow()[6000:7680]:
                if name in index:
                    manager.forget(g, BlockId(index[name]))
    gone, gone_tokens = _lookup_us(manager, tokens[:122_880] + cache.unique(3000))
    return {
        "model": model,
        "warm_128k_us": warm,
        "warm_128k_hit_tokens": warm_tokens,
        "120k_end_of_windows_evicted_us": gone,
        "120k_end_of_windows_evicted_hit_tokens": gone_tokens,
    }


def _lookup_us(manager: CacheManager, tokens: list[int], repeats: int = 9) -> tuple[float, int]:
    """Median of lookups whose names are known and that were not looked up before."""
    chains = [manager.chain(tokens) for _ in range(repeats)]
    for chain in chains:
        chain.grow()
    return (
        round(statistics.median(_us(lambda chain=chain: manager.lookup(chain)) for chain in chains), 1),
        manager.lookup(chains[0]).tokens,
    )


# -- capacity ----------------------------------------------------------------------------------------------------------


def capacity(args: argparse.Namespace) -> dict[str, Any]:
    taken = {str(context): _fill(context) for context in (2048, 8192, 32_768, 131_072)}
    return {"gemma-3-27b_in_40_gib": taken, "gemma-3-27b_131k_prompt_gib": _least_memory(131_072)}


def _fill(context: int) -> int:
    cache, taken = Cache("gemma-3-27b", 40), 0
    try:
        while True:
            cache.prefill(cache.unique(context))
            taken += 1
    except PoolExhausted:
        return taken


def _least_memory(context: int) -> float:
    """GiB, to 1/32, that a prompt needs while it is computed in chunks of up to 8192 tokens."""
    gib = 10.0
    while True:
        cache = Cache("gemma-3-27b", gib)
        try:
            cache.prefill(cache.unique(context))
            return gib
        except PoolExhausted:
            gib += 1 / 32


# -- reuse -------------------------------------------------------------------------------------------------------------


def reuse(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "8_turns_of_200_and_800": _chat(model),
            "8k_document_3_times": _document(model),
            "5000_tokens_resent_less_10": _resent(model, 10),
            "5000_tokens_resent_less_100": _resent(model, 100),
        }
        for model in ("gemma-3-27b", "gpt-oss-20b", "jamba-1.5-mini", "bamba-9b")
    ]


def _chat(model: str) -> float:
    cache, history = Cache(model, 40), []
    for _ in range(8):
        history += cache.unique(200)
        request = cache.prefill(history)
        cache.decode(request, history, 800)
        cache.manager.release(request)
    return cache.hit_rate


def _document(model: str) -> float:
    cache = Cache(model, 40)
    document = cache.unique(8192)
    for _ in range(3):
        cache.manager.release(cache.prefill(document + cache.unique(210)))
    return cache.hit_rate


def _resent(model: str, less: int) -> int:
    cache = Cache(model, 40)
    prompt = cache.unique(5000)
    cache.manager.release(cache.prefill(prompt))
    return cache.manager.lookup(prompt[:-less]).tokens


# -- sessions ----------------------------------------------------------------------------------------------------------


def sessions(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"policy": policy, "sessions": count, "found_in_last_round": _cycle(policy, count)}
        for policy in ("lru", "worth")
        for count in (22, 23, 24, 26, 30, 40)
    ]


def _cycle(policy: str, count: int, rounds: int = 5) -> int:
    cache = Cache("gemma-3-27b", 40, policy=policy)
    prompts = [cache.unique(16_384) for _ in range(count)]
    found = 0
    for _ in range(rounds):
        found = 0
        for prompt in prompts:
            before = cache.hit_tokens
            cache.manager.release(cache.prefill(prompt))
            found += cache.hit_tokens - before >= 16_000
    return found


# -- waste -------------------------------------------------------------------------------------------------------------


def waste(args: argparse.Namespace) -> dict[str, Any]:
    """Documents of 55k to 80k tokens, four questions each, shuffled, three requests at a time, 150 tokens generated."""
    rng = random.Random(1)
    cache = Cache("ministral-8b", 60)
    documents = [cache.unique(rng.randint(55_000, 80_000)) for _ in range(8)]
    questions = [document for document in documents for _ in range(4)]
    rng.shuffle(questions)
    running: list[tuple[RequestId, list[int]]] = []
    totals: dict[str, float] = {}
    for document in questions:
        tokens = document + cache.unique(16)
        running.append((cache.prefill(tokens), tokens))
        for step in range(150):
            for request, known in running:
                cache.decode(request, known, 1)
            if step % 10 == 0:
                for what, size in _account(cache.manager, running).items():
                    totals[what] = totals.get(what, 0) + size
        while len(running) > 2:
            cache.manager.release(running.pop(0)[0])
    held = totals["held"]
    return {
        "strategy": cache.manager.plan.strategy,
        "internal_unfilled": totals["unfilled"] / held,  # slots of blocks that no token was written to
        "internal_passed": totals["passed"] / held,  # tokens that share a block with visible ones
        "external": totals["blank"] / held,  # blocks set aside, or left over in large pages in use
        "internal_and_external": (totals["unfilled"] + totals["blank"]) / held,
        "all": (totals["unfilled"] + totals["passed"] + totals["blank"]) / held,
    }


def _account(manager: CacheManager, running: Sequence[tuple[RequestId, list[int]]]) -> dict[str, int]:
    """Bytes of the large pages that running requests use, and what of them serves none.

    held      all of it, less blocks that only keep a prefix for later
    unfilled  slots of held blocks that no token was written to
    passed    tokens that no query reads any more, in a block with some that one does
    blank     blocks that no request holds
    """
    totals: dict[str, int] = dict.fromkeys(("held", "unfilled", "passed", "blank"), 0)
    for g, group in enumerate(manager.plan.groups):
        visible: dict[BlockId, tuple[int, int]] = {}  # block -> first and last token in it that counts
        for request, tokens in running:
            for n, block in enumerate(manager.table(request)[g]):
                if block != NULL_BLOCK:
                    low, high = _visible(group, len(tokens), n)
                    old = visible.get(block, (group.block_tokens, 0))
                    visible[block] = min(old[0], low), max(old[1], high)
        token_bytes = group.content_bytes // group.block_tokens
        blank = manager.pool.groups[g].num_blank_in_use * group.block_bytes
        totals["unfilled"] += sum(group.block_tokens - high for _, high in visible.values()) * token_bytes
        totals["passed"] += sum(low for low, _ in visible.values()) * token_bytes
        totals["blank"] += blank
        totals["held"] += blank + len(visible) * group.block_bytes
    return totals


def _visible(group: Group, length: int, n: int) -> tuple[int, int]:
    """Of block `n` of a table: the first slot that a query still reads, and the end of those written to."""
    start, size = n * group.block_tokens, group.block_tokens
    low = min(max(group.reach.oldest_needed(length) - start, 0), size)
    return low, min(max(length - start, 0), size)


# -- traces ------------------------------------------------------------------------------------------------------------


def traces(args: argparse.Namespace) -> list[dict[str, Any]]:
    with gzip.open(Path(args.traces) / "mooncake_conversation.jsonl.gz") as lines:
        requests = [json.loads(line) for line in lines]
    rows = []
    for memory_gib in (160, 640, 2560, 20_000):  # the last is more than all of it
        cache = Cache("gemma-3-27b", memory_gib, block_tokens=512)
        for entry in requests:
            full = entry["input_length"] // 512
            names = [block.to_bytes(16, "big") for block in entry["hash_ids"][:full]]
            cache.manager.release(cache.prefill(GivenChain(names, entry["input_length"])))
        rows.append({"model": "gemma-3-27b", "memory_gib": memory_gib, "hit_rate": cache.hit_rate})
    return rows


def _us(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    part.__name__: part for part in (costs, capacity, reuse, sessions, waste, traces)
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--traces", help="directory with mooncake_conversation.jsonl.gz")
    args = parser.parse_args(argv)
    chosen = args.parts or [part for part in PARTS if part != "traces" or args.traces]
    result: dict[str, Any] = {"benchmark": "kvcache", "python": sys.version.split()[0]}
    json.dump(result | {part: PARTS[part](args) for part in chosen}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
