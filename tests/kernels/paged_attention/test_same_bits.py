"""The kernel in C++ sums in one order: a query's result has the same bits whatever shares its step, wherever its prompt
was cut, on whichever pages and on however many threads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import GroupBatch, LayerParams, NativeBackend
from intarsia.tests.kernels.scenes import CPU

pytestmark = pytest.mark.skipif(NativeBackend.lacks() is not None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Layer:
    group: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    softcap: float | None = None
    sinks: bool = False
    is_latent: bool = False

    @property
    def width(self) -> int:
        return self.dim if self.is_latent else self.dim + self.value_dim

    def params(self) -> LayerParams:
        sinks = torch.linspace(-1, 2, self.group * self.kv_heads) if self.sinks else None
        return LayerParams(self.dim**-0.5, self.softcap, sinks, self.value_dim if self.is_latent else None)


class Sequences:
    """Some sequences, whose queries are asked again and again, over a new pool of NaN each time."""

    def __init__(self, layer: Layer, lengths: list[int], seed: int):
        self.layer, self.lengths = layer, lengths
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, dim: int) -> list[Tensor]:
            return [torch.randn(n, heads, dim, generator=generator).to(layer.dtype) for n in lengths]

        self.q = draw(layer.group * layer.kv_heads, layer.dim)
        self.kv = draw(layer.kv_heads, layer.width)

    def ask(self, places: list[tuple[int, int, int]], block_tokens: int, seed: int, threads: int = 1) -> list[Tensor]:
        """[queries,H,Dv] of each row (sequence, first position, end): one call. What no query sees is NaN."""
        layer, random = self.layer, np.random.default_rng(seed)
        blocks = max(-(-end // block_tokens) for _, _, end in places)
        table = (1 + random.permutation(len(places) * blocks)).reshape(len(places), blocks).astype(np.int32)
        query_lens, kv_lens = (np.array(x, np.int32) for x in zip(*((end - first, end) for _, first, end in places)))
        batch = GroupBatch(table, query_lens, kv_lens, block_tokens, layer.window_tokens, layer.chunk_tokens)
        pages = torch.full((len(places) * blocks + 1, block_tokens, layer.kv_heads, layer.width), float("nan"))
        pages = pages.to(layer.dtype)
        for row, (sequence, first, end) in enumerate(places):
            seen = np.arange(batch.oldest_visible(first), end)
            block, offset = np.divmod(seen, block_tokens)
            pages[table[row, block], offset] = self.kv[sequence][seen]
        q = torch.cat([self.q[sequence][first:end] for sequence, first, end in places])
        out = torch.full((*q.shape[:2], layer.value_dim), float("nan"), dtype=layer.dtype)
        torch.set_num_threads(threads)
        backend = NativeBackend()
        backend.attend(q, pages, layer.params(), backend.prepare(batch, CPU), out)
        return list(out.split(query_lens.tolist()))

    def whole(self, sequence: int) -> Tensor:
        return self.ask([(sequence, 0, self.lengths[sequence])], 16, 0)[0]


def cut(length: int, sizes: Iterator[int]) -> list[tuple[int, int]]:
    runs, first = [], 0
    while first < length:
        runs.append((first, min(length, first + next(sizes))))
        first = runs[-1][1]
    return runs


def forever(size: int) -> Iterator[int]:
    while True:
        yield size


def check(layer: Layer, lengths: list[int], random: Random) -> None:
    """The first sequence at once, and in every other way."""
    sequences = Sequences(layer, lengths, random.randrange(1000))
    length, expected = lengths[0], sequences.whole(0)
    assert expected.isfinite().all()

    def same(places: list[tuple[int, int, int]], *, block_tokens: int = 16, threads: int = 1) -> None:
        outs = sequences.ask(places, block_tokens, random.randrange(1000), threads)
        for (sequence, first, end), out in zip(places, outs, strict=True):
            if sequence == 0:
                assert torch.equal(out, expected[first:end]), (places, block_tokens, threads)

    alone = (0, 0, length)
    for block_tokens, threads in ((16, 2), (24, 1), (1, 2)):
        same([alone], block_tokens=block_tokens, threads=threads)
    for sizes in (forever(7), forever(64), iter(lambda: random.randint(1, 150), 0)):
        for first, end in cut(length, sizes):
            same([(0, first, end)], block_tokens=random.choice([1, 16, 24]), threads=random.choice([1, 1, 1, 2]))
    # One token at a time: some of them alone, on idle threads too; all of them as rows of one call.
    for position in {0, length - 1, *random.choices(range(length), k=6)}:
        same([(0, position, position + 1)], threads=random.choice([1, 2, 5]))
    same([(0, position, position + 1) for position in range(0, length, 3)], threads=2)
    others = [(n, random.randrange(lengths[n]), lengths[n]) for n in range(1, len(lengths))]
    random.shuffle(rows := [alone, (0, length - 1, length), (0, length // 2, length // 2 + 5), *others])
    same(rows, threads=2)


LAYERS = {
    "plain": Layer(),
    "window": Layer(window_tokens=100),
    "window of a tile": Layer(window_tokens=64, group=3),
    "chunks": Layer(chunk_tokens=96, group=2),
    "softcap": Layer(softcap=3.0, group=1),
    "sinks": Layer(sinks=True, group=5, window_tokens=33),
    "heads of 80": Layer(dim=80, value_dim=80, group=6),
    "heads of 128": Layer(dim=128, value_dim=128, group=7),
    "heads of 256": Layer(dim=256, value_dim=256, group=8, kv_heads=1),
    "odd heads": Layer(dim=21, value_dim=13, group=2),
    "many heads": Layer(group=20, kv_heads=1),
    "latent": Layer(dim=72, value_dim=40, group=16, kv_heads=1, is_latent=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_query_has_the_same_bits_in_any_company_cut_pages_and_threads(name: str, dtype: torch.dtype):
    # Longer than segments of 512 tokens, which are merged in place and across threads.
    check(replace(LAYERS[name], dtype=dtype), [1100 if name == "plain" else 600, 30, 700, 64], Random(name))


@pytest.mark.parametrize("seed", range(6))
def test_random_layers_have_the_same_bits_too(seed: int):
    print(f"seed {seed}")
    random = Random(seed)
    limit = random.choice(["window_tokens", "chunk_tokens", "none"])
    layer = Layer(
        group=random.randint(1, 8),
        kv_heads=random.randint(1, 3),
        dim=random.choice([64, 80, 128, 256]),
        value_dim=random.choice([64, 80, 128, 256]),
        dtype=random.choice([torch.float32, torch.bfloat16, torch.float16]),
        softcap=random.choice([None, 2.0]),
        sinks=random.choice([False, True]),
    )
    layer = replace(layer, **({} if limit == "none" else {limit: random.randint(1, 300)}))
    print(layer)
    check(layer, [random.randint(1, 800), *(random.randint(1, 800) for _ in range(3))], random)


def test_a_later_token_that_is_no_number_hurts_no_earlier_query():
    """A prompt at once reads it in the same tile as what its earlier queries see."""
    sequences = Sequences(Layer(), [100], 0)
    sequences.kv[0][70] = float("nan")
    whole = sequences.whole(0)
    assert whole[:70].isfinite().all() and whole[70:].isnan().all()
    assert torch.equal(whole[69:70], sequences.ask([(0, 69, 70)], 16, 1)[0])


def test_encoder_keys_give_a_query_the_same_bits_alone_and_among_others():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(200, 4, 64, generator=generator)
    pages = torch.randn(45, 16, 2, 128, generator=generator)
    pages[0] = float("nan")
    table = np.arange(1, 45, dtype=np.int32)[None]

    def ask(first: int, end: int, threads: int) -> Tensor:
        batch = GroupBatch(table, np.array([end - first]), np.array([700]), 16, is_causal=False)
        torch.set_num_threads(threads)
        backend, out = NativeBackend(), torch.empty(end - first, 4, 64)
        backend.attend(q[first:end], pages, LayerParams(0.125), backend.prepare(batch, CPU), out)
        return out

    whole = ask(0, 200, 1)
    for first, end, threads in ((0, 200, 2), (0, 1, 1), (199, 200, 2), (20, 27, 1), (100, 164, 2)):
        assert torch.equal(ask(first, end, threads), whole[first:end])
