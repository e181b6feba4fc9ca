"""Attention over pages: each backend, FlashAttention and torch's own beside it. Checked first, then timed."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .device import Bench, Timing, rotating
from .lines import WRONG
from .parts import Case, Row
from .shapes import ATTENTION, WRITES, Attention
from .worlds import World, backends, is_judged, refusal

DTYPE = torch.bfloat16

ALLOWED = 0.03
"""Of the largest number of the answer, for single queries in 16 bits; `errors` judges more sharply."""

MOST_GATHERED_BYTES = 1 << 29

PEERS = {"torch cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION, "torch": None}
"""Of torch's own attention, which takes keys that lie in no pages: what an answer needs at least."""


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    def scene(each: Attention) -> Attention:
        return each.tiny() if is_rehearsed else each

    attends = [Case(each.name, partial(_measure, scene(each)), partial(_touch, scene(each))) for each in ATTENTION]
    writes = [Case(each.name, partial(_write, scene(each)), partial(_touch_write, scene(each))) for each in WRITES]
    return attends + writes


def _touch(scene: Attention, bench: Bench) -> None:
    from intarsia.kernels.paged_attention import TritonBackend

    world, backend = World(scene, bench.dtype(DTYPE), bench), TritonBackend()
    world.run(backend, backend.prepare(world.batch, bench.device))
    if scene.is_decode and (meta := world.frame(backend, bench)) is not None:
        world.run(backend, meta)


def _measure(scene: Attention, bench: Bench) -> Iterator[Row]:
    dtype = bench.dtype(DTYPE)
    size = scene.bytes(dtype.itemsize)
    worlds = list(rotating(bench, size, lambda n: World(scene, dtype, bench, seed=n)))
    took: dict[str, float] = {}
    for name, backend in backends(bench):
        if name == "reference":
            continue  # which computes one query at a time
        if name == "torch" and size > MOST_GATHERED_BYTES:
            yield {"backend": name, "skipped": "it gathers all keys first"}
            continue
        if reason := refusal(backend, scene, dtype, bench):
            yield {"backend": name, "skipped": reason}
            continue
        row = bench.attempt({"backend": name}, partial(_prepared, name, backend, worlds, bench))
        yield row
        took[name] = row.get("us", float("nan"))
        if scene.is_decode:
            row = bench.attempt({"backend": f"{name}, frame"}, partial(_framed, name, backend, worlds, bench))
            yield row
            took[name] = min(took[name], row.get("us", took[name]))
    for name, kind in PEERS.items():
        if (reason := _no_dense(scene)) is not None:
            yield {"backend": name, "skipped": reason}
            break
        yield bench.attempt({"backend": name}, partial(_dense, scene, dtype, kind, bench))
    if "triton" in took and "flash" in took:
        yield {"flash_to_triton": round(took["flash"] / took["triton"], 3)}


def _prepared(name: str, backend: Any, worlds: list[World], bench: Bench) -> Row:
    """As steps with prompts do it."""
    metas = [backend.prepare(world.batch, bench.device) for world in worlds]
    row = _timed(name, backend, worlds, metas, bench)
    return {**row, "prepare_us": bench.host_us(lambda: backend.prepare(worlds[0].batch, bench.device))}


def _framed(name: str, backend: Any, worlds: list[World], bench: Bench) -> Row:
    """As recorded steps do it."""
    metas = [meta for world in worlds if (meta := world.frame(backend, bench)) is not None]
    if not metas:
        return {"skipped": "has no frames for such rows"}
    return _timed(name, backend, worlds, metas, bench)


def _timed(name: str, backend: Any, worlds: list[World], metas: list[Any], bench: Bench) -> Row:
    scene, dtype = worlds[0].scene, worlds[0].dtype
    worlds[0].out.fill_(torch.nan)
    row = _checked(worlds[0], worlds[0].run(backend, metas[0])) if is_judged(name, bench) else {}
    calls = [partial(world.run, backend, meta) for world, meta in zip(worlds, metas, strict=True)]
    timing = bench.time(calls)
    row |= _rated(scene, dtype, timing, bench)
    if name in ("triton", "flash"):
        row |= bench.kernel_row(calls[0])
    return row


def _rated(scene: Attention, dtype: torch.dtype, timing: Timing, bench: Bench) -> Row:
    return {**timing.row(), **bench.rates(timing.us, scene.bytes(dtype.itemsize), scene.flops, dtype)}


def _checked(world: World, out: torch.Tensor) -> Row:
    most = 0.0
    starts = world.batch.first_token()
    for row, query in world.samples():
        truth = world.exact(row, query)
        off = float((out[int(starts[row]) + query].double() - truth).abs().max()) / float(truth.abs().max())
        if not off <= ALLOWED:  # NaN is not
            return {WRONG: f"query {query} of row {row} is off by {off:.1e} of its largest number"}
        most = max(most, off)
    return {"off": f"{most:.1e}"}


def _no_dense(scene: Attention) -> str | None:
    """Why torch's own attention cannot be asked for the same."""
    queries, length = scene.rows[0]
    odd = [name for name in ("latent", "softcap", "sinks", "chunk", "window") if getattr(scene, name)]
    if odd:
        return f"torch's attention has no {odd[0]}"
    if len(set(scene.rows)) > 1 or queries not in (1, length):
        return "torch's attention takes rows of one shape, whole prompts or single queries"
    return None


def _dense(scene: Attention, dtype: torch.dtype, kind: SDPBackend | None, bench: Bench) -> Row:
    queries, length = scene.rows[0]

    def draw(heads: int, tokens: int, dim: int) -> torch.Tensor:
        return bench.random(len(scene.rows), heads, tokens, dim, dtype=dtype)

    def make(n: int) -> partial[Any]:
        q = draw(scene.heads, queries, scene.key_dim)
        k, v = (draw(scene.kv_heads, length, dim) for dim in (scene.key_dim, scene.value_dim))
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=queries > 1, enable_gqa=True)

    calls = list(rotating(bench, scene.bytes(dtype.itemsize), make))
    if kind is None or bench.is_rehearsed:  # whose host has neither of the two
        return _rated(scene, dtype, bench.time(calls), bench)
    with sdpa_kernel(kind):
        return _rated(scene, dtype, bench.time(calls), bench)


# -- writing new keys and values ---------------------------------------------------------------------------------------


def _new_tokens(world: World, bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    scene = world.scene
    k, v = (
        bench.random(scene.tokens, scene.kv_heads, dim, dtype=world.dtype) for dim in (scene.key_dim, scene.value_dim)
    )
    return k, v


def _touch_write(scene: Attention, bench: Bench) -> None:
    from intarsia.kernels.paged_attention import TritonBackend

    world, backend = World(scene, bench.dtype(DTYPE), bench), TritonBackend()
    backend.write(world.pages, *_new_tokens(world, bench), backend.prepare(world.batch, bench.device))


def _write(scene: Attention, bench: Bench) -> Iterator[Row]:
    dtype = bench.dtype(DTYPE)
    size = 2.0 * scene.tokens * scene.kv_heads * scene.width * dtype.itemsize
    worlds = list(rotating(bench, size, lambda n: World(scene, dtype, bench, seed=n)))
    fresh = [_new_tokens(world, bench) for world in worlds]
    for name, backend in backends(bench):
        if name == "reference":
            continue  # writes a token at a time
        if reason := refusal(backend, scene, dtype, bench):
            yield {"backend": name, "skipped": reason}
            continue

        def measured(backend: Any = backend) -> Row:
            metas = [backend.prepare(world.batch, bench.device) for world in worlds]
            each = zip(worlds, fresh, metas, strict=True)
            calls = [partial(backend.write, world.pages, *kv, meta) for world, kv, meta in each]
            calls[0]()
            page, offset = metas[0].token_page, metas[0].token_offset
            is_right = torch.equal(worlds[0].pages[page, offset], torch.cat(fresh[0], dim=-1))
            timing = bench.time(calls)
            wrong = {} if is_right else {WRONG: "pages do not hold what was written"}
            return {**timing.row(), **bench.rates(timing.us, size), **wrong}

        yield bench.attempt({"backend": name}, measured)
