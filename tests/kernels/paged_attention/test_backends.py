"""One suite that every backend passes. The oracle is dense attention in float64, built from the mask alone."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.paged_attention import BACKENDS, Backend, GroupBatch, LayerParams

torch.set_num_threads(1)
CPU = torch.device("cpu")
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A step: rows of (tokens cached before, new tokens), and the shape of the layer."""

    rows: tuple[tuple[int, int], ...]
    block_tokens: int = 16
    window: int | None = None
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    page_padding: int = 0  # numbers between the pages
    seed: int = 0
    extra: dict = field(default_factory=dict)


class Sequences:
    """The keys, values and queries of a case; pages dealt out in random order in a pool full of NaN."""

    def __init__(self, case: Case):
        self.case = case
        rng = np.random.default_rng(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.lengths = [before + new for before, new in case.rows]
        self.k = [self.random(n, case.kv_heads, case.key_dim) for n in self.lengths]
        self.v = [self.random(n, case.kv_heads, case.value_dim) for n in self.lengths]
        self.q = [self.random(new, case.heads, case.key_dim) for _, new in case.rows]
        self.params = LayerParams(
            scale=case.key_dim**-0.5,
            softcap=case.softcap,
            sinks=self.random(case.heads) + 1 if case.sinks else None,
        )
        counts = [-(-max(n, 1) // case.block_tokens) for n in self.lengths]
        pages = 1 + sum(counts) + 3
        ids = iter(rng.permutation(np.arange(1, pages)).tolist())
        self.table = np.zeros((len(counts), max(counts)), dtype=np.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = [next(ids) for _ in range(count)]
        self.view = pool_view(case, pages)
        self.fill_cache()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.case.dtype)

    def fill_cache(self) -> None:
        """What earlier steps wrote, and is still in the window. Everything else stays NaN."""
        for row, (before, _) in enumerate(self.case.rows):
            oldest = 0 if self.case.window is None else max(0, before - self.case.window + 1)
            for position in range(oldest, before):
                place = self.table[row, position // self.case.block_tokens], position % self.case.block_tokens
                self.view[place] = torch.cat([self.k[row][position], self.v[row][position]], dim=-1)
            self.table[row, : oldest // self.case.block_tokens] = 0  # given back

    def batch(self) -> GroupBatch:
        return GroupBatch(
            self.table,
            np.array([new for _, new in self.case.rows], dtype=np.int32),
            np.array(self.lengths, dtype=np.int32),
            self.case.block_tokens,
            self.case.window,
        )

    def new(self, tensors: list[Tensor]) -> Tensor:
        """The last tokens of each sequence, packed."""
        return torch.cat([t[len(t) - new :] for t, (_, new) in zip(tensors, self.case.rows, strict=True)])

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        rows = [self.dense(row, dtype) for row in range(len(self.lengths))]
        return torch.cat(rows)

    def dense(self, row: int, dtype: torch.dtype) -> Tensor:
        """Attention of one row over all its keys, masked. [new, H, Dv]"""
        case, n, new = self.case, self.lengths[row], self.case.rows[row][1]
        group = case.heads // case.kv_heads
        k, v = (t[row].to(dtype).repeat_interleave(group, dim=1) for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q[row].to(dtype), k) * self.params.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        query, key = torch.arange(n - new, n)[:, None], torch.arange(n)[None]
        hidden = key > query
        if case.window is not None:
            hidden |= key <= query - case.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.params.sinks is not None:
            sinks = self.params.sinks.to(dtype)[:, None, None].expand(-1, new, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1)[..., :n], v)


def pool_view(case: Case, pages: int) -> Tensor:
    """[pages, tokens, kv heads, K|V] over a raw buffer in which every byte is NaN."""
    width = case.key_dim + case.value_dim
    content = case.block_tokens * case.kv_heads * width
    raw = torch.full((pages * (content + case.page_padding),), NAN, dtype=case.dtype)
    return raw.as_strided(
        (pages, case.block_tokens, case.kv_heads, width),
        (content + case.page_padding, case.kv_heads * width, width, 1),
    )


def run(backend: Backend, s: Sequences) -> Tensor:
    meta = backend.prepare(s.batch(), CPU)
    backend.write(s.view, s.new(s.k), s.new(s.v), meta)
    out = torch.full((len(s.new(s.q)), s.case.heads, s.case.value_dim), NAN, dtype=s.case.dtype)
    backend.attend(s.new(s.q), s.view, s.params, meta, out)
    return out


DECODE = ((0, 1), (14, 1), (15, 1), (16, 1), (40, 1))  # lengths 1, page - 1, page, page + 1, several pages
PREFILL = ((0, 2), (0, 15), (0, 16), (0, 17), (0, 40))
CHUNKS = ((1, 7), (16, 7), (20, 16), (33, 2))
MIXED = DECODE + PREFILL + CHUNKS
RAGGED = tuple((n, 1) for n in (700, 3, 290, 40, 650, 8))

CASES = {
    "decode": Case(DECODE),
    "prefill": Case(PREFILL),
    "chunks": Case(CHUNKS),
    "mixed": Case(MIXED),
    "decode of very different lengths": Case(RAGGED),
    "window": Case(MIXED, window=12),
    "window of one token": Case(MIXED, window=1),
    "window equal to the page": Case(MIXED, window=16),
    "window one more than the page": Case(MIXED, window=17),
    "window larger than everything": Case(MIXED, window=1000),
    "windowed decode of very different lengths": Case(RAGGED, window=300),
    "pages of one token": Case(MIXED, block_tokens=1, window=12),
    "pages that do not divide the window": Case(MIXED, block_tokens=5, window=12),
    "pages of 24": Case(MIXED, block_tokens=24),
    "every head its own keys": Case(MIXED, heads=4, kv_heads=4),
    "all heads share keys": Case(MIXED, heads=4, kv_heads=1, window=12),
    "values wider than keys": Case(MIXED, key_dim=16, value_dim=24, window=12),
    "odd head size": Case(MIXED, key_dim=20, value_dim=20),
    "softcap": Case(MIXED, softcap=2.0),
    "sinks": Case(MIXED, sinks=True),
    "softcap, sinks and window": Case(MIXED, softcap=2.0, sinks=True, window=12, block_tokens=5),
    "padded pages": Case(MIXED, page_padding=64, window=12),
    "empty rows": Case(((5, 1), (9, 0), (0, 4), (3, 0))),
    "only empty rows": Case(((9, 0), (3, 0))),
}

backends = pytest.mark.parametrize("backend", [b() for b in BACKENDS], ids=lambda b: b.name)


@backends
@pytest.mark.parametrize("name", CASES)
def test_float32_equals_dense_attention_in_float64(backend: Backend, name: str):
    s = Sequences(CASES[name])
    torch.testing.assert_close(run(backend, s).double(), s.expected(), rtol=2e-5, atol=2e-6)


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mixed", "window", "softcap, sinks and window"])
def test_half_precision_errs_at_most_twice_as_much_as_plain_torch(backend: Backend, name: str, dtype: torch.dtype):
    s = Sequences(replace(CASES[name], dtype=dtype))
    exact = s.expected()
    plain = (s.expected(dtype).double() - exact).abs().max()
    assert (run(backend, s).double() - exact).abs().max() <= 2 * plain


@backends
def test_write_touches_only_the_slots_of_the_step(backend: Backend):
    s = Sequences(Case(MIXED, window=12, block_tokens=5))
    before = s.view.clone()
    run(backend, s)
    changed = {
        tuple(place) for place in (~torch.isclose(s.view, before, equal_nan=True)).any(-1).any(-1).nonzero().tolist()
    }
    new = {
        (int(s.table[row, p // 5]), p % 5)
        for row, (cached, count) in enumerate(s.case.rows)
        for p in range(cached, cached + count)
    }
    assert changed == new


@backends
def test_two_layers_in_one_page_do_not_touch_each_other(backend: Backend):
    a, b = Sequences(Case(MIXED, window=12)), Sequences(Case(MIXED, window=12, seed=1))
    content = a.view[0].numel()
    raw = torch.full((len(a.view), 2, content), NAN)
    views = [raw[:, n].view(-1, *a.view.shape[1:]) for n in range(2)]
    views = [raw[:, n].unflatten(1, a.view.shape[1:]) for n in range(2)]
    for s, view in zip((a, b), views, strict=True):
        view.copy_(a.view if s is a else b.view)
        s.view, s.table = view, s.table
    outputs = [run(backend, s) for s in (a, b)]
    for s, out in zip((a, b), outputs, strict=True):
        torch.testing.assert_close(out.double(), s.expected(), rtol=2e-5, atol=2e-6)


@backends
def test_bytes_of_a_former_owner_do_not_matter(backend: Backend):
    """A page that held float32 states is read as bfloat16 keys and values: some of its numbers are NaN or infinite."""
    s = Sequences(Case(MIXED, window=12, dtype=torch.bfloat16))
    stale = torch.randn(s.view.numel() // 2 + 1, generator=s.generator) * 1e30
    s.view.view(-1).copy_(stale.view(torch.bfloat16)[: s.view.numel()])
    s.view.view(-1)[::7] = NAN
    s.fill_cache()
    assert run(backend, s).isfinite().all()


@backends
def test_chunks_give_what_one_prefill_gives(backend: Backend):
    whole = Sequences(Case(((0, 40),), window=12))
    expected = run(backend, whole)
    parts = Sequences(Case(((0, 40),), window=12))
    outputs = []
    for start in range(0, 40, 7):
        stop = min(start + 7, 40)
        step = replace(parts.batch(), query_lens=np.array([stop - start], np.int32), kv_lens=np.array([stop], np.int32))
        meta = backend.prepare(step, CPU)
        backend.write(parts.view, parts.k[0][start:stop], parts.v[0][start:stop], meta)
        out = torch.full((stop - start, 4, 16), NAN)
        backend.attend(parts.q[0][start:stop], parts.view, parts.params, meta, out)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-5, atol=1e-6)


@backends
def test_queries_and_keys_may_be_strided(backend: Backend):
    """transformers hands over [1, H, T, D]; its transpose is not contiguous."""
    s = Sequences(Case(MIXED, window=12, sinks=True))
    expected = run(backend, s)
    again = Sequences(Case(MIXED, window=12, sinks=True))
    for tensors in (again.q, again.k, again.v):
        tensors[:] = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    assert torch.equal(run(backend, again), expected)
