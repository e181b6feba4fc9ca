"""Which tokens are chosen, by each way of computing it, held against the slow one."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from intarsia.kernels.token_choice import Asked, BlockRule, ChoiceBatch, Sight, cpu, plain_torch, reference, triton

WAYS = {"torch": plain_torch.choose, "cpu": cpu.choose, "triton": triton.choose}

BLOCK_WAYS = {"torch": plain_torch.choose_blocks, "triton": triton.choose_blocks}

BLOCK_TOKENS, PAGES = 5, 90
RULES = BlockRule(4, 3, 1), BlockRule(4, 3, 3), BlockRule(7, 2, 1), BlockRule(3, 30, 2), BlockRule(8, 2, 1)
POSITIONS = [[[0], [3], [31], [44]], [list(range(19, 32))], [[7, 8, 9], [20, 21, 22]]]


@pytest.fixture(params=WAYS)
def choose(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    if request.param == "cpu" and not cpu.is_available():
        pytest.skip("there is no C++ compiler")
    if request.param == "triton" and not triton.is_available():
        pytest.skip("there is no Triton")
    return WAYS[request.param]


def scene(
    seed: int, positions: list[list[int]], heads: int = 8, size: int = 24, dtype: torch.dtype = torch.float32
) -> tuple[Asked, torch.Tensor, ChoiceBatch]:
    """positions: of the queries of each row. Bytes of no live token are NaN."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    rows, queries = len(positions), sum(map(len, positions))
    width = max(max(row) for row in positions) // BLOCK_TOKENS + 1
    pages = torch.full((PAGES, BLOCK_TOKENS + 2, size + 8), float("nan"), dtype=dtype)
    keys = pages[:, :BLOCK_TOKENS, :size]  # strided, as behind latents
    order = torch.randperm(PAGES - 1, generator=generator) + 1
    table = torch.zeros(rows, width, dtype=torch.int64)
    for n, row in enumerate(positions):
        for block in range(max(row) // BLOCK_TOKENS + 1):
            page, order = order[0], order[1:]
            table[n, block] = page
            live = min(BLOCK_TOKENS, max(row) + 1 - block * BLOCK_TOKENS)
            keys[page, :live] = torch.randn(live, size, generator=generator).to(dtype)
    asked = Asked(
        torch.randn(queries, heads, size, generator=generator).to(dtype),
        torch.randn(queries, heads, generator=generator),
    )
    flat = torch.tensor([position for row in positions for position in row])
    return asked, keys, ChoiceBatch(table, flat, int(flat.max()) + 1, BLOCK_TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("most", [1, 6, 30, 64])
@pytest.mark.parametrize("positions", POSITIONS, ids=["decode", "prompt", "prompts"])
def test_choice_is_that_of_the_slow_way(
    choose: Callable[..., torch.Tensor], positions: list[list[int]], most: int, dtype: torch.dtype
):
    asked, keys, batch = scene(most, positions, dtype=dtype)
    assert choose(asked, keys, batch, most).tolist() == reference.choose(asked, keys, batch, most).tolist()


@pytest.mark.parametrize("heads", [1, 3, 5, 16])
def test_any_number_of_index_heads_is_summed(choose: Callable[..., torch.Tensor], heads: int):
    asked, keys, batch = scene(heads, [[40], [41]], heads=heads)
    weights = asked.weights_NI.abs() + 0.1  # of one head with a negative weight many tokens score alike: nothing
    asked = asked._replace(weights_NI=weights)
    best = reference.choose(asked, keys, batch, 3)
    assert choose(asked, keys, batch, 3).tolist() == best.tolist()


def test_a_query_chooses_all_it_sees_in_order_and_zeros_fill_its_row(choose: Callable[..., torch.Tensor]):
    asked, keys, batch = scene(1, [[2], [9]])
    assert choose(asked, keys, batch, 5)[0].tolist() == [0, 1, 2, 0, 0]


def test_tiles_of_keys_do_not_change_the_choice(monkeypatch: pytest.MonkeyPatch):
    asked, keys, batch = scene(2, [[60], [61]])
    whole = plain_torch.choose(asked, keys, batch, 7)
    monkeypatch.setattr(plain_torch, "MOST_PRODUCTS", 1)
    assert plain_torch.choose(asked, keys, batch, 7).tolist() == whole.tolist()


@pytest.mark.parametrize("choose", ["cpu", "triton"], indirect=True)
@pytest.mark.parametrize("weight", [0.0, -0.0, -1.0])
def test_of_tokens_that_score_alike_the_older_ones_are_chosen(choose: Callable[..., torch.Tensor], weight: float):
    """Nothing times a negative weight is a zero with a sign, which is no less than one without."""
    asked, keys, batch = scene(3, [[50]])
    weights = torch.full_like(asked.weights_NI, weight)
    weights[:, ::2] = 0.0
    nothing = Asked(torch.zeros_like(asked.q_NIE), weights)
    assert choose(nothing, keys, batch, 4)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("choose", ["cpu", "triton"], indirect=True)
def test_a_query_chooses_the_same_in_any_company(choose: Callable[..., torch.Tensor]):
    asked, keys, batch = scene(4, [list(range(20, 60))], heads=16)
    together = choose(asked, keys, batch, 9)
    for n in range(40):
        alone = Asked(asked.q_NIE[n : n + 1], asked.weights_NI[n : n + 1])
        one = ChoiceBatch(batch.table_RP, batch.positions_N[n : n + 1], 21 + n, BLOCK_TOKENS)
        assert choose(alone, keys, one, 9).tolist() == together[n : n + 1].tolist()


@pytest.mark.parametrize("choose", ["cpu", "triton"], indirect=True)
@pytest.mark.parametrize("seed", range(6))
def test_the_best_are_found_whatever_scores_are_like(choose: Callable[..., torch.Tensor], seed: int):
    """Of few different ones, of some that are far apart, and of negative ones."""
    asked, keys, batch = scene(seed, [[150], [151], [7]], heads=4)
    rough = Asked((asked.q_NIE * 2).round() * 10.0 ** (seed - 3), asked.weights_NI.round() - 0.25 * (seed % 2))
    assert choose(rough, keys, batch, 20).tolist() == reference.choose(rough, keys, batch, 20).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("positions", POSITIONS, ids=["decode", "prompt", "prompts"])
@pytest.mark.parametrize("way", BLOCK_WAYS)
def test_blocks_are_chosen_as_in_the_slow_way(
    way: str, positions: list[list[int]], rule: BlockRule, dtype: torch.dtype
):
    if way == "triton" and not triton.takes_blocks(rule.size):
        pytest.skip("blocks are of powers of two there")
    asked, keys, batch = scene(rule.most, positions, dtype=dtype)
    slow = reference.choose_blocks(asked.q_NIE, keys, batch, rule)
    assert BLOCK_WAYS[way](asked.q_NIE, keys, batch, rule).tolist() == slow.tolist()


@pytest.mark.skipif(not triton.is_available(), reason="there is no Triton")
@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_blocks_of_any_power_of_two_are_chosen(size: int):
    asked, keys, batch = scene(size, [[150], [140], [3]], heads=3)
    rule = BlockRule(size, max(1, 40 // size), 1)
    slow = reference.choose_blocks(asked.q_NIE, keys, batch, rule)
    assert triton.choose_blocks(asked.q_NIE, keys, batch, rule).tolist() == slow.tolist()


@pytest.mark.parametrize("way", BLOCK_WAYS)
def test_a_query_attends_to_the_blocks_near_it_and_its_own_ends_with_it(way: str):
    if way == "triton" and not triton.is_available():
        pytest.skip("there is no Triton")
    rule = BlockRule(4, 3, 2)
    asked, keys, batch = scene(5, [[41]], heads=2)
    chosen = BLOCK_WAYS[way](asked.q_NIE, keys, batch, rule)
    for head in range(2):
        assert chosen[0, head, 4:10].tolist() == [36, 37, 38, 39, 40, 41]
        assert chosen[0, head, 10:].tolist() == [0, 0]


def test_tiles_of_keys_do_not_change_the_blocks(monkeypatch: pytest.MonkeyPatch):
    asked, keys, batch = scene(6, [[60], [61]])
    rule = BlockRule(4, 3, 1)
    whole = plain_torch.choose_blocks(asked.q_NIE, keys, batch, rule)
    monkeypatch.setattr(plain_torch, "MOST_PRODUCTS", 1)
    assert plain_torch.choose_blocks(asked.q_NIE, keys, batch, rule).tolist() == whole.tolist()


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("positions", POSITIONS, ids=["decode", "prompt", "prompts"])
@pytest.mark.parametrize(("choices", "most"), [(1, 4), (1, 30), (3, 8)])
def test_what_is_gathered_are_the_entries_of_the_chosen_tokens(
    way: str, positions: list[list[int]], choices: int, most: int
):
    """Each choice of a query is of entries of its own."""
    if way == "triton" and not triton.is_available():
        pytest.skip("there is no Triton")
    asked, keys, batch = scene(most, positions, size=24)
    entries = keys.unflatten(2, (choices, -1))
    of_choices = [reference.choose(Asked(asked.q_NIE + j, asked.weights_NI), keys, batch, most) for j in range(choices)]
    chosen = torch.stack(of_choices, dim=1)
    gathered = (triton.gather if way == "triton" else plain_torch.gather)(entries, chosen, batch)
    each = len(batch.positions_N) // len(batch.table_RP)
    for n, position in enumerate(batch.positions_N.tolist()):
        for j in range(choices):
            tokens = chosen[n, j, : position + 1]
            pages = batch.table_RP[n // each, tokens // BLOCK_TOKENS]
            assert torch.equal(gathered[n, j, : len(tokens)], entries[pages, tokens % BLOCK_TOKENS, j])


@pytest.mark.skipif(not triton.is_available(), reason="there is no Triton")
def test_rows_of_tables_that_lie_one_behind_another_are_found_by_where_they_begin():
    asked, keys, batch = scene(8, [[40], [13], [44]])
    width = batch.table_RP.shape[1]
    numbers = torch.full((7 * width + 3,), 1 << 20, dtype=torch.int32)
    starts = torch.tensor([3 + 5 * width, 3, 3 + 2 * width])
    for row, start in enumerate(starts.tolist()):
        numbers[start : start + width] = batch.table_RP[row].int()
    held = ChoiceBatch(numbers, batch.positions_N, width * BLOCK_TOKENS, BLOCK_TOKENS, starts)
    chosen = triton.choose(asked, keys, held, 6)
    assert chosen.tolist() == reference.choose(asked, keys, batch, 6).tolist()
    entries, chosen = keys.unsqueeze(2), chosen.unsqueeze(1)
    assert torch.equal(triton.gather(entries, chosen, held), triton.gather(entries, chosen, batch))


@pytest.mark.skipif(not triton.is_available(), reason="there is no Triton")
@pytest.mark.parametrize("positions", POSITIONS[:2], ids=["decode", "prompt"])
def test_queries_that_are_scored_one_after_another_choose_the_same(
    positions: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    asked, keys, batch = scene(9, positions)
    together = triton.choose(asked, keys, batch, 5)
    monkeypatch.setattr(triton, "MOST_SCORE_BYTES", 8 * batch.longest)
    assert triton.choose(asked, keys, batch, 5).tolist() == together.tolist()


class Tables(NamedTuple):
    """Rows of as many tokens, whose blocks lie anywhere, in tables one behind another."""

    numbers: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def drawn(cls, rows: int, width: int, generator: torch.Generator) -> "Tables":
        numbers = torch.full((2 * rows * width + 1,), 1 << 20, dtype=torch.int32)
        starts = 1 + width * torch.randperm(2 * rows, generator=generator)[:rows]
        pages = torch.randperm(PAGES, generator=generator)[: rows * width].int()
        for row, start in enumerate(starts.tolist()):
            numbers[start : start + width] = pages[row * width : (row + 1) * width]
        return cls(numbers, starts)

    def page(self, row: int, block: int) -> int:
        return int(self.numbers[self.starts[row] + block])


def entry_of(pages: torch.Tensor, tables: Tables, row: int, number: int, tokens: int) -> torch.Tensor:
    """An entry of so many tokens, which lies in the block of its last token, behind those that end there before it."""
    block = ((number + 1) * tokens - 1) // BLOCK_TOKENS
    before = sum(1 for other in range(number) if ((other + 1) * tokens - 1) // BLOCK_TOKENS == block)
    return pages[tables.page(row, block), before]


@pytest.mark.skipif(not triton.is_available(), reason="there is no Triton")
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 7, 12])
def test_entries_of_several_tokens_are_chosen_wherever_they_lie(tokens: int):
    """Also those that do not fill a block, and of which not every block has as many."""
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.tensor([59, 31, 12])
    tables = Tables.drawn(3, 12, generator)
    pages = torch.randn(PAGES, BLOCK_TOKENS, 24, generator=generator)
    asked = Asked(torch.randn(3, 4, 24, generator=generator), torch.randn(3, 4, generator=generator))
    seen = (positions + 1) // tokens
    newest = (seen - 1).clamp(min=0)
    batch = ChoiceBatch(tables.numbers, newest, 60 // tokens, BLOCK_TOKENS, tables.starts, tokens)
    chosen = triton.choose(asked, pages, batch, 3)
    for row, count in enumerate(seen.tolist()):
        if count == 0:
            continue  # what a query that sees none is given is not attended to
        keys = torch.stack([entry_of(pages, tables, row, number, tokens) for number in range(count)])[None]
        one = ChoiceBatch(torch.zeros(1, 1, dtype=torch.int64), newest[row : row + 1], count, count)
        alone = Asked(*(each[row : row + 1] for each in asked))
        assert chosen[row].tolist() == reference.choose(alone, keys, one, 3)[0].tolist()


@pytest.mark.skipif(not triton.is_available(), reason="there is no Triton")
@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("is_chosen", [False, True], ids=["all", "chosen"])
def test_a_window_and_entries_are_gathered_side_by_side(tokens: int, is_chosen: bool):
    generator = torch.Generator().manual_seed(tokens)
    positions, most = torch.tensor([59, 31, 2]), 5 if is_chosen else 60 // tokens
    window, entries = (torch.randn(PAGES, BLOCK_TOKENS, 24, generator=generator) for _ in range(2))
    windows, others = (Tables.drawn(3, 12, generator) for _ in range(2))
    numbers = torch.cat((windows.numbers, others.numbers))
    others = Tables(numbers, others.starts + len(windows.numbers))
    of_window = ChoiceBatch(numbers, positions, 60, BLOCK_TOKENS, windows.starts)
    of_entries = ChoiceBatch(numbers, positions, 60, BLOCK_TOKENS, others.starts, tokens)
    chosen = None
    if is_chosen:
        chosen = torch.zeros(3, most, dtype=torch.int64)
        for row, position in enumerate(positions.tolist()):
            some = torch.randperm((position + 1) // tokens, generator=generator)[:most].sort().values
            chosen[row, : len(some)] = some
    gathered = triton.gather_sight(window, entries, of_window, of_entries, chosen, Sight(8, most, 8 + most))
    for row, position in enumerate(positions.tolist()):
        sight = range(max(0, position - 7), position + 1)
        expected = [window[windows.page(row, at // BLOCK_TOKENS), at % BLOCK_TOKENS] for at in sight]
        for place in range(min((position + 1) // tokens, most)):
            number = place if chosen is None else int(chosen[row, place])
            expected.append(entry_of(entries, others, row, number, tokens))
        assert torch.equal(gathered[row, : len(expected)], torch.stack(expected))
