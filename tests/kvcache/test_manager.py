"""The manager, through its verbs. Blocks of 4 tokens unless said."""

from collections.abc import Sequence

import pytest

from intarsia.errors import PoolExhausted
from intarsia.kvcache.check import recount
from intarsia.kvcache.hints import Retain
from intarsia.kvcache.ids import BlockId, RequestId
from intarsia.kvcache.lookup import Hit
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.misses import Miss
from intarsia.kvcache.plan import PlanSettings
from intarsia.kvcache.prefix import Encoder, GivenChain
from intarsia.kvcache.reach import Chunked, Cross, Full, Reach, Sliding, State
from intarsia.kvcache.settings import CacheSettings
from intarsia.kvcache.spec import LayerSpec, StateTensor
from intarsia.kvcache.strategies import plan_memory
from intarsia.tests.kvcache.plans import plan_of

A, B, C = RequestId(1), RequestId(2), RequestId(3)
GIB = 1 << 30


def manager(*reaches: Reach, caching: bool = True, clock=None, pinned_share: float = 0.1, **plan) -> CacheManager:
    settings = CacheSettings(prefix_caching=caching, pinned_share=pinned_share)
    return CacheManager(plan_of(*reaches, **plan), settings, **({"clock": clock} if clock else {}))


def run(m: CacheManager, request: RequestId, tokens: Sequence[int], start: int = 0, chunk: int = 1000) -> None:
    """Compute all of `tokens` from `start` on, in chunks."""
    length = start
    while length < len(tokens):
        length = min(len(tokens), length + chunk)
        m.extend(request, length)
        m.commit(request)


def start(
    m: CacheManager,
    request: RequestId,
    tokens: Sequence[int],
    chunk: int = 1000,
    salt: bytes = b"",
    borders: Sequence[int] = (),
) -> Hit:
    """Open a request and run its prompt."""
    hit = m.lookup(tokens, salt)
    m.open(request, hit, borders)
    run(m, request, tokens, hit.tokens, chunk)
    recount(m)
    return hit


def serve(m: CacheManager, tokens: Sequence[int], request: RequestId = C, borders: Sequence[int] = (), **retain) -> Hit:
    """A whole request: from lookup to release."""
    hit = start(m, request, tokens, borders=borders)
    m.release(request, retain=Retain(**retain))
    recount(m)
    return hit


# -- what a request holds ----------------------------------------------------------------------------------------------


def test_sliding_group_gives_back_what_no_later_token_reads():
    m = manager(Full(), Sliding(5))
    start(m, A, list(range(18)))
    full, sliding = m.table(A)
    assert 0 not in full
    assert [block != 0 for block in sliding] == [False, False, False, True, True]  # the next token sees 14, 15, 16, 17


def test_chunked_group_gives_back_a_chunk_when_it_is_over():
    m = manager(Chunked(8))
    start(m, A, list(range(15)))
    assert [block != 0 for block in m.table(A)[0]] == [False, False, True, True]
    m.extend(A, 16)
    m.commit(A)
    assert m.table(A)[0] == [0, 0, 0, 0]  # the next token begins a chunk and reads nothing


def test_state_group_holds_one_block_whatever_the_length():
    m = manager(State(), caching=False)
    start(m, A, list(range(50)), chunk=7)
    assert len(m.table(A)[0]) == 1


@pytest.mark.parametrize("per_large", [(1,), (3,)])
def test_long_prompt_in_chunks_never_holds_more_of_a_window_than_window_and_chunk(per_large: tuple[int]):
    m = manager(Sliding(5), blocks=8, per_large=per_large)
    m.open(A, m.lookup(range(200)))
    for length in range(4, 201, 4):
        m.extend(A, length)
        m.commit(A)
        assert m.pool.groups[0].num_held <= 2
        recount(m)


def test_a_step_below_the_watermark_touches_nothing():
    m = manager(Full(), Sliding(5))
    start(m, A, list(range(17)))
    version = m.pool.known.version
    assert m.quiet_until(A) == 21
    for length in (18, 19, 20):
        assert not m.extend(A, length)
        assert m.pool.known.version == version
    assert [len(blocks) for blocks in m.extend(A, 21, written=20).blocks] == [1, 1]


def test_states_alone_are_saved_where_they_are_wanted_however_short_steps_are():
    m = manager(State(), blocks=9)
    m.open(A, m.lookup(range(33)))
    for length in (7, 14, 21, 28, 33):
        m.extend(A, length)
        m.commit(A)
    m.open(B, m.lookup(range(100, 140)))
    m.extend(B, 4)
    m.expect(B, 20)
    for length in (12, 19, 26):
        m.extend(B, length)
        m.commit(B)
    assert m.lookup(range(33)).tokens == 32
    assert m.lookup([*range(100, 120), 7]).tokens == 20
    recount(m)


def test_states_alone_are_saved_where_prompts_part():
    m = manager(State(), blocks=9)
    serve(m, [*range(20), *range(50, 70)])
    serve(m, [*range(20), *range(80, 100)])
    assert m.lookup([*range(20), 7, 8, 9]).tokens == 20
    m.reset_prefix_cache()
    assert m.lookup([*range(20), 7, 8, 9]).tokens == 0
    serve(m, [*range(20), *range(110, 130)])  # names are remembered: it parts where others did
    assert m.lookup([*range(20), 7, 8, 9]).tokens == 20
    recount(m)


def test_exhausted_pool_leaves_the_tables_unchanged():
    m = manager(Full(), Sliding(5), blocks=7)
    start(m, A, list(range(8)))
    before = m.table(A)
    with pytest.raises(PoolExhausted):
        m.extend(A, 40)
    assert m.table(A) == before
    recount(m)


@pytest.mark.parametrize("per_large", [(1, 1), (2, 1), (3, 2)])
def test_room_to_grow_is_what_can_be_extended_and_not_one_block_more(per_large: tuple[int, int]):
    m = manager(Full(), Sliding(5), blocks=9, per_large=per_large)
    start(m, B, list(range(100, 108)))
    m.open(A, m.lookup(range(200)))
    room = m.room_to_grow(A, 200)
    with pytest.raises(PoolExhausted):
        m.extend(A, room + 1)
    m.extend(A, room)
    recount(m)


def test_a_chunk_that_would_cost_a_cached_prefix_for_blocks_it_passes_itself_is_shortened():
    m = manager(Full(), Sliding(64), blocks=1 + 1000)
    serve(m, list(range(1600)))
    m.open(A, m.lookup(range(5000, 8000)))
    assert m.chunk_end(A, 1000) == 1000  # blank blocks are enough
    assert m.chunk_end(A, 3000) < 3000
    assert manager(Full(), blocks=10).plan.groups[0].reach == Full()


# -- prefixes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reaches", "hit_tokens"),
    [((Full(),), 15), ((Full(), Sliding(5)), 15), ((Chunked(8),), 15), ((Full(), State()), 12)],
    ids=["full", "full+sliding", "chunked", "full+state"],
)
def test_repeated_prompt_hits_all_but_its_last_token_or_its_last_snapshot(reaches, hit_tokens: int):
    m = manager(*reaches)
    serve(m, list(range(16)))
    assert m.lookup(list(range(16))).tokens == hit_tokens


def test_hit_inside_a_block_goes_on_in_a_copy_of_it():
    m = manager(Full())
    start(m, A, list(range(16)))
    m.open(B, m.lookup(list(range(16))))
    growth = m.extend(B, 16)
    (copy,) = growth.copies
    assert copy.source == m.table(A)[0][3]
    assert copy.target == m.table(B)[0][3] != copy.source
    recount(m)


@pytest.mark.parametrize("reaches", [(Full(),), (Full(), Sliding(5)), (Full(), State()), (State(),), (Chunked(8),)])
def test_next_turn_goes_on_at_the_very_token_where_the_last_one_ended(reaches):
    m = manager(*reaches)
    turn = list(range(18))  # ends inside a block
    serve(m, turn)
    assert m.lookup([*turn, 7, 7, 7]).tokens == 18
    assert m.lookup([*turn[:-1], 99, 7, 7]).tokens == 16


def test_running_requests_share_the_blocks_of_a_common_prefix():
    m = manager(Full())
    start(m, A, list(range(16)))
    start(m, B, list(range(8)) + [99] * 8)
    assert m.table(A)[0][:2] == m.table(B)[0][:2]
    assert recount(m).held == 6


@pytest.mark.parametrize(
    ("reach", "cached", "hit_tokens"),
    [  # blocks of 4, a prompt of 21 tokens; # is cached, . was evicted
        (Full(), "#####", 20),
        (Full(), "###.#", 12),
        (Full(), ".####", 0),
        (Sliding(8), "..##.", 16),  # for a window the tail is enough: 7 tokens back lie in two blocks
        (Sliding(8), "...#.", 0),
        (Sliding(8), "#....", 4),
        (Sliding(5), "...#.", 16),  # 4 tokens back: one block
        (Sliding(6), "...#.", 0),  # 5 tokens back: two
        (Sliding(1), ".....", 20),  # sees itself only
        (Chunked(8), "....#", 20),
        (Chunked(8), ".....", 16),  # at a chunk border nothing is needed
        (Chunked(8), "##...", 16),
        (Chunked(12), "...#.", 16),
    ],
)
def test_longest_hit_per_kind(reach: Reach, cached: str, hit_tokens: int):
    m = manager(Full(), reach)
    start(m, A, list(range(21)))
    for n, name in enumerate(m.chain(range(20)).grow()):
        block = m.pool.groups[1].index.get(name)
        if cached[n] == "." and block is not None:
            m.forget(1, BlockId(block))
    assert m.lookup(range(21)).tokens == hit_tokens


def test_hit_is_where_every_group_can_go_on_at_once():
    m = manager(Full(), Sliding(8), State(), blocks=64)
    serve(m, list(range(41)))
    chain = m.chain(list(range(41)))
    for name in chain.grow()[8:]:
        if name in m.pool.groups[1].index:
            m.forget(1, BlockId(m.pool.groups[1].index[name]))
    hit = m.lookup(list(range(41)))
    assert hit.tokens == 0  # the states saved lie beyond what the window has left
    assert sum(hit.lost.values()) == 40


def test_lookup_changes_nothing():
    m = manager(Full(), Sliding(5))
    serve(m, list(range(16)))
    before = recount(m), m.pool.known.version, m.pool.map(), m.pool._arenas[0].first_cached()
    m.lookup(list(range(16)))
    assert (recount(m), m.pool.known.version, m.pool.map(), m.pool._arenas[0].first_cached()) == before


def test_a_lookup_is_remembered_until_the_pool_changes():
    m = manager(Full())
    serve(m, list(range(16)))
    chain = m.chain(list(range(16)))
    hit = m.lookup(chain)
    assert hit.tokens == 15
    assert m.lookup(chain, last=hit) is hit
    assert m.lookup(m.chain(list(range(16))), last=hit) is not hit  # another chain
    start(m, A, list(range(50, 70)))
    again = m.lookup(chain, last=hit)
    assert again == hit._replace(version=m.pool.known.version)


def test_without_prefix_caching_nothing_is_kept():
    m = manager(Full(), caching=False)
    serve(m, list(range(16)))
    assert m.lookup(list(range(16))).tokens == 0
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
    start(m, A, list(range(16)), salt=b"tenant a")
    assert m.lookup(list(range(16)), b"tenant b").tokens == 0
    assert m.lookup(list(range(16)), b"tenant a").tokens == 15


def test_a_drafters_group_wants_one_more_token_to_match():
    m = manager(Full(), Full(), draft=[1])
    serve(m, list(range(16)))
    assert m.lookup([*range(16), 16]).tokens == 12  # its entry for token 15 was made with another token 16
    assert m.lookup([*range(15), 99]).tokens == 12  # that for token 11 with the same token 12
    assert m.lookup([*range(12), 99]).tokens == 8


def test_snapshots_are_saved_at_the_last_block_border_of_a_prompt_and_sparsely_before():
    m = manager(Full(), State(), blocks=2000, block_tokens=16)
    m.open(A, m.lookup(range(5000)))
    saves = m.extend(A, 5000).saves
    assert [save.length for save in saves] == [*range(512, 4992, 512), 4992]


def test_a_snapshot_is_saved_where_a_prompt_leaves_a_known_path():
    m = manager(Full(), State(), blocks=200)
    serve(m, list(range(41)))
    other = list(range(20)) + [99] * 21
    hit = m.lookup(other)
    assert (hit.tokens, hit.branch, hit.lost) == (0, 20, {"no_snapshot": 20})
    serve(m, other)
    assert m.lookup(list(range(20)) + [77] * 9).tokens == 20


def test_a_snapshot_is_saved_at_a_border_that_is_told_inside_a_block():
    m = manager(Full(), State(), blocks=200)
    prompt = list(range(41))
    m.open(A, m.lookup(prompt), borders=[22, 1, 900])
    assert [save.length for save in m.extend(A, 41).saves] == [22, 40]
    m.commit(A)
    m.release(A)
    hit = m.lookup([*prompt[:22], *[77] * 9])
    assert (hit.tokens, hit.misses) == (22, (Miss("new", 9),))
    recount(m)


@pytest.mark.parametrize("reach", [Full(), Sliding(9), Sliding(2), Chunked(7), State()], ids=str)
def test_a_prompt_that_parts_inside_a_block_finds_all_before_it(reach: Reach):
    m = manager(Full(), reach, blocks=200)
    prompt, beginning = list(range(41)), list(range(22))
    serve(m, prompt, borders=[22])
    hit = m.lookup([*beginning, *[77] * 9])
    assert hit.tokens == 22
    m.open(B, hit)
    growth = m.extend(B, 31)
    sources = {copy.group: copy.source for copy in growth.copies}
    assert sources[0] == m.pool.groups[0].index[m.names(0, m.chain(prompt))[5]]  # the block that goes on as A's did
    m.commit(B)
    m.release(B)
    assert m.lookup([*beginning, 5, 6]).tokens == 22
    recount(m)


def test_a_border_inside_the_last_block_is_found_however_little_followed():
    m = manager(Full(), Sliding(5), State(), blocks=200)
    serve(m, list(range(23)), borders=[21])
    assert m.lookup([*range(21), 77, 78]).tokens == 21
    assert m.lookup([*range(23), 77]).tokens == 23
    recount(m)


def test_a_border_is_found_as_long_as_one_of_the_blocks_that_hold_it_is():
    m = manager(Full(), blocks=200)
    beginning = list(range(22))
    for word in (50, 60):
        serve(m, [*beginning, *[word] * 9], borders=[22])
    holders = [m.names(0, m.chain([*beginning, *[word] * 9]))[5] for word in (50, 60)]
    for left, name in zip((22, 20), holders, strict=True):
        m.forget(0, BlockId(m.pool.groups[0].index[name]))
        assert m.lookup([*beginning, 77, 78]).tokens == left
    recount(m)


def test_a_border_is_found_though_a_state_at_the_end_of_its_block_is_evicted():
    m = manager(Full(), State(), blocks=200)
    prompt = list(range(41))
    serve(m, prompt, borders=[22, 24])
    m.forget(1, BlockId(m.pool.groups[1].index[m.names(0, m.chain(prompt))[5]]))
    assert m.lookup([*prompt[:24], 77, 78]).tokens == 22
    assert m.lookup([*prompt[:22], 77, 78]).tokens == 22
    recount(m)


def test_a_border_in_a_chain_that_cannot_end_inside_blocks_is_the_block_border_before():
    m = manager(Full(), State(), blocks=200)
    m.open(A, m.lookup(GivenChain([b"%032d" % n for n in range(10)], 41)), borders=[22])
    assert [save.length for save in m.extend(A, 41).saves] == [20, 40]
    m = manager(Full(), Full(), State(), draft=[1], blocks=200)
    m.open(A, m.lookup(list(range(41))), borders=[22])
    assert [save.length for save in m.extend(A, 41).saves] == [20, 40]


def test_an_encoders_blocks_are_found_by_content_whatever_the_text():
    m = manager(Full(), Cross(), blocks=64)
    image = Encoder(b"an image", 10)
    m.open(A, m.lookup(list(range(9)), encoder=image))
    assert [len(blocks) for blocks in m.extend(A, 9).blocks] == [3, 3]
    m.commit(A)
    hit = m.lookup(list(range(50, 60)), encoder=image)
    assert (hit.tokens, hit.encoder_tokens) == (0, 10)
    m.open(B, hit)
    assert [len(blocks) for blocks in m.extend(B, 10).blocks] == [3, 0]
    assert (
        m.lookup(list(range(9)), encoder=Encoder(b"another", 10)).tokens == 0
    )  # the text was read beside another image
    assert m.lookup(list(range(9)), encoder=image).tokens == 8
    recount(m)


# -- why tokens are lost -----------------------------------------------------------------------------------------------


def test_a_hit_says_how_many_tokens_were_lost_and_why():
    prompt = list(range(33))
    m = manager(Full(), State(), blocks=64)
    serve(m, prompt)
    assert m.lookup([*prompt[:20], 99]).lost == {"no_snapshot": 20}
    assert m.lookup([500, *prompt]).lost == {}

    m = manager(Full(), blocks=64)
    serve(m, prompt)
    m.forget(0, BlockId(m.pool.groups[0].index[m.chain(prompt).grow()[4]]))
    assert m.lookup(prompt).lost == {"evicted": 16}
    assert m.lookup(prompt, b"salted").lost == {"salt": 32}

    m = manager(Full(), Full(), blocks=64, draft=[1])
    serve(m, prompt[:16])
    assert m.lookup([*prompt[:16], 7]).lost == {"alignment": 4}


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_tail_and_the_state():
    m = manager(Full(), State(), blocks=64)
    start(m, A, list(range(10)))
    growth = m.fork(A, B)
    parent, child = m.table(A), m.table(B)
    assert child[0][:2] == parent[0][:2]
    assert {(copy.group, copy.source, copy.target) for copy in growth.copies} == {
        (0, parent[0][2], child[0][2]),
        (1, parent[1][0], child[1][0]),
    }
    recount(m)
    m.release(A)
    recount(m)
    m.extend(B, 11)
    recount(m)


def test_a_fork_without_room_leaves_no_trace():
    m = manager(Full(), blocks=4)
    start(m, A, list(range(10)))
    with pytest.raises(PoolExhausted):
        m.fork(A, B)
    assert m.num_open == 1
    recount(m)


# -- retention ---------------------------------------------------------------------------------------------------------


def fill_up(m: CacheManager, first: int = 10_000) -> None:
    """Other prompts, enough to evict everything that is not worth more or pinned."""
    for n in range(8):
        serve(m, [first + 100 * n + k for k in range(32)])


@pytest.mark.parametrize(("priority", "survives"), [(1, True), (0, False)])
def test_priority_keeps_a_prefix_longer(priority: int, survives: bool):
    m = manager(Full(), blocks=41)
    serve(m, list(range(32)), priority=priority)
    fill_up(m)
    assert (m.lookup(list(range(32))).tokens > 0) == survives


def test_a_prefix_with_a_time_to_live_goes_first_when_it_is_over():
    now = [0.0]
    m = manager(Full(), blocks=41, clock=lambda: now[0])
    serve(m, list(range(32)), priority=1, ttl_s=60)
    fill_up(m)
    assert m.lookup(list(range(32))).tokens == 31
    now[0] = 61
    serve(m, list(range(500, 540)))
    assert m.lookup(list(range(32))).tokens == 0


def test_pinned_blocks_stay_until_their_time_is_over_and_only_up_to_the_share():
    now = [0.0]
    m = manager(Full(), blocks=41, clock=lambda: now[0], pinned_share=0.25)  # 10 blocks
    serve(m, list(range(32)), pin=True, ttl_s=60)
    serve(m, list(range(100, 132)), pin=True)  # 8 more would be too many: kept as usual
    assert m.hints.num_pinned == 8
    fill_up(m)
    assert m.lookup(list(range(32))).tokens == 31
    assert m.lookup(list(range(100, 132))).tokens == 0
    now[0] = 61
    fill_up(m, 20_000)
    assert (m.hints.num_pinned, m.lookup(list(range(32))).tokens) == (0, 0)
    recount(m)


# -- real models -------------------------------------------------------------------------------------------------------


def attention(index: int, reach: Reach, kv_heads: int, dim: int) -> LayerSpec:
    return LayerSpec(index, reach, kv_heads, dim, dim, item_bytes=2)


MODELS = {
    "gemma-3": [attention(n, Full() if n % 6 == 5 else Sliding(1024), 16, 128) for n in range(62)],
    "gpt-oss": [attention(n, Full() if n % 2 else Sliding(128), 8, 64) for n in range(24)],
    "jamba": [
        attention(n, Full(), 8, 128)
        if n % 8 == 4
        else LayerSpec(n, State(), state=(StateTensor((8192, 3), 2), StateTensor((8192, 16), 4)))
        for n in range(32)
    ],
}


def of_model(name: str, memory: int = 40 * GIB) -> CacheManager:
    return CacheManager(plan_memory(MODELS[name], PlanSettings(memory)))


@pytest.mark.parametrize("model", ["gemma-3", "gpt-oss"])
def test_eight_turns_of_a_chat_hit_all_but_what_is_new(model: str):
    m, history, prompt_tokens, hit_tokens = of_model(model), [], 0, 0
    for turn in range(8):
        history += range(10_000 * turn, 10_000 * turn + 200)
        prompt_tokens += len(history)
        hit_tokens += start(m, A, history).tokens
        for token in range(800):
            history.append(10_000 * turn + 5_000 + token)
            m.extend(A, len(history), len(history) - 1)
        m.release(A)
    assert hit_tokens / prompt_tokens >= 0.93


@pytest.mark.parametrize("model", list(MODELS))
def test_a_document_used_three_times_is_computed_once(model: str):
    m, document = of_model(model), list(range(8192))
    hits = [serve(m, document + list(range(10_000 * n, 10_000 * n + 210))).tokens for n in range(1, 4)]
    assert hits == [0, 8192, 8192]


@pytest.mark.parametrize(
    ("model", "less", "least"), [("gemma-3", 10, 4976), ("gpt-oss", 10, 4976), ("jamba", 100, 4096)]
)
def test_a_prompt_resent_without_its_end_hits_up_to_there(model: str, less: int, least: int):
    m = of_model(model)
    serve(m, list(range(5000)))
    assert m.lookup(list(range(5000 - less))).tokens >= least


def test_a_long_prompt_needs_its_live_bytes_and_hardly_more():
    m = of_model("gemma-3", int(10.6 * GIB))  # 8192 blocks of the full group and 65 of the windows take 10.41 GiB
    m.open(A, m.lookup(range(131_072)))
    length = 0
    while length < 131_072:
        length = min(m.chunk_end(A, min(131_072, length + 8192)), m.room_to_grow(A, 131_072))
        m.extend(A, length)
        m.commit(A)
    recount(m)
