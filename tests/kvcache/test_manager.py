import random

import pytest

from intarsia.errors import PoolExhausted
from intarsia.kvcache.check import recount
from intarsia.kvcache.manager import CacheManager, RequestId
from intarsia.kvcache.plan import Group, MemoryPlan
from intarsia.kvcache.reach import Full, Reach, Sliding

A, B = RequestId(1), RequestId(2)


def manager(*reaches: Reach, blocks: int = 32, block_tokens: int = 4, caching: bool = True) -> CacheManager:
    groups = tuple(Group(reach, (n,), block_tokens) for n, reach in enumerate(reaches))
    return CacheManager(MemoryPlan("layered", groups, 1, 64, blocks, 0.0), prefix_caching=caching)


def run(m: CacheManager, request: RequestId, tokens: list[int], start: int = 0, chunk: int = 1000) -> None:
    """Compute all of `tokens` from `start` on, in chunks."""
    length = start
    while length < len(tokens):
        length = min(len(tokens), length + chunk)
        m.extend(request, length)
        m.commit(request, tokens, length)


def start(m: CacheManager, request: RequestId, tokens: list[int], chunk: int = 1000) -> int:
    """Open a request, run its prompt, return the tokens found in the cache."""
    hit = m.lookup(tokens)
    m.open(request, hit)
    run(m, request, tokens, hit.tokens, chunk)
    recount(m)
    return hit.tokens


def test_sliding_group_gives_back_what_no_later_token_reads():
    m = manager(Full(), Sliding(5))
    start(m, A, list(range(18)))
    full, sliding = m.table(A)
    assert 0 not in full
    assert [block != 0 for block in sliding] == [False, False, False, True, True]  # the next token sees 14, 15, 16, 17


def test_long_prompt_in_chunks_never_holds_more_of_a_window_than_window_and_chunk():
    m = manager(Sliding(5), blocks=8)
    m.open(A, m.lookup(range(200)))
    for length in range(4, 201, 4):
        m.extend(A, length)
        m.commit(A, range(200), length)
        assert recount(m).held <= 2


def test_repeated_prompt_hits_all_but_the_block_of_its_last_token():
    m = manager(Full(), Sliding(5))
    prompt = list(range(16))
    start(m, A, prompt)
    m.release(A)
    assert start(m, B, prompt) == 12


def test_running_requests_share_the_blocks_of_a_common_prefix():
    m = manager(Full())
    start(m, A, list(range(16)))
    start(m, B, list(range(8)) + [99] * 8)
    assert m.table(A)[0][:2] == m.table(B)[0][:2]
    assert recount(m).held == 6


def test_hit_is_shortened_to_where_the_sliding_group_can_go_on():
    m = manager(Full(), Sliding(5), blocks=24)
    prompt = list(range(40))
    start(m, A, prompt)
    m.release(A)
    start(m, B, list(range(100, 116)))  # evicts what was given back first: the oldest blocks of the window
    assert m.lookup(prompt).tokens == 36
    assert m.lookup(prompt[:17]).tokens == 0  # at 16 tokens the window needs block 3, which is gone


def test_lookup_changes_nothing():
    m = manager(Full(), Sliding(5))
    start(m, A, list(range(16)))
    before = recount(m), list(m.pool._kept)
    m.lookup(list(range(16)))
    assert (recount(m), list(m.pool._kept)) == before


def test_exhausted_pool_leaves_the_tables_unchanged():
    m = manager(Full(), Sliding(5), blocks=7)
    start(m, A, list(range(8)))
    before = m.table(A)
    with pytest.raises(PoolExhausted):
        m.extend(A, 40)
    assert m.table(A) == before
    recount(m)


def test_without_prefix_caching_nothing_is_kept():
    m = manager(Full(), caching=False)
    start(m, A, list(range(16)))
    m.release(A)
    assert start(m, B, list(range(16))) == 0
    assert recount(m).kept == 0


def test_reset_forgets_prefixes_and_keeps_running_requests():
    m = manager(Full())
    start(m, A, list(range(16)))
    m.reset_prefix_cache()
    assert m.lookup(list(range(16))).tokens == 0
    run(m, A, list(range(30)), start=16)
    recount(m)


def test_different_salts_never_share():
    m = manager(Full())
    tokens = list(range(16))
    m.open(A, m.lookup(tokens, b"tenant a"))
    run(m, A, tokens)
    assert m.lookup(tokens, b"tenant b").tokens == 0
    assert m.lookup(tokens, b"tenant a").tokens == 12


def test_random_use_keeps_every_block_in_one_place_and_every_hit_true():
    """A model of what each block holds: a hit must show every group the very tokens its mask lets it see."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(40):
        size = rng.choice([1, 3, 4])
        reaches = rng.sample([Full(), Sliding(1), Sliding(2), Sliding(5), Sliding(9)], rng.randint(1, 3))
        m = manager(*reaches, blocks=rng.randint(20, 60), block_tokens=size)
        content: dict[tuple[int, int], tuple[int, ...]] = {}  # (group, block) -> all tokens up to the block's end
        live: dict[RequestId, tuple[list[int], int]] = {}
        for n in range(200):
            action = rng.random()
            if action < 0.3 and len(live) < 4:
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 20))]
                hit = m.lookup(tokens)
                assert hit.tokens < len(tokens)
                for g, reach in enumerate(reaches):
                    for key in range(reach.oldest_needed(hit.tokens), hit.tokens):
                        assert content[g, hit.blocks[g][key // size]] == tuple(tokens[: (key // size + 1) * size])
                request = RequestId(n)
                m.open(request, hit)
                live[request] = tokens, hit.tokens
            elif action < 0.4 and live:
                request = rng.choice(list(live))
                m.release(request)
                del live[request]
            elif live:
                request = rng.choice(list(live))
                tokens, length = live[request]
                if length == len(tokens):
                    tokens.append(rng.randint(0, 1))
                new = rng.randint(length + 1, len(tokens))
                try:
                    m.extend(request, new)
                except PoolExhausted:
                    recount(m)
                    continue
                for g, row in enumerate(m.table(request)):
                    for position in range(length, new):
                        n_block = position // size
                        assert row[n_block] != 0
                        content[g, row[n_block]] = tuple(tokens[: (n_block + 1) * size])
                m.commit(request, tokens, new)
                live[request] = tokens, new
            recount(m)
        for request in list(live):
            m.release(request)
        assert recount(m).all_free
