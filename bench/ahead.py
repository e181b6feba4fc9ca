"""Compiles the kernels for a GPU that need not be there, and says what each takes of it.

    python bench/ahead.py [--capability 90] [--dtypes bf16,fp32]

Prints one JSON object per kernel and shape: registers and shared memory, what is spilled to slow memory (there should
be nothing), and which instructions multiply matrices (HGMMA is Hopper's own, HMMA the older one). What is compiled is
what `TritonBackend`, `TritonStates`, `TritonSampling`, `products`, `streams` and `tokenwise/triton.py` launch. Exits
with 1 if a kernel asks for more memory than there is, or spills; prompts in float32 may, which are there to judge
others.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from intarsia.kernels.mixers import triton as mixers
from intarsia.kernels.paged_attention.triton import MERGED_AT_ONCE, Shape, Size, TritonBackend, shape_for
from intarsia.kernels.products import triton as products
from intarsia.kernels.products import unpacking
from intarsia.kernels.products.codes import CodeKind, Codes
from intarsia.kernels.routing import Routing, Scoring
from intarsia.kernels.routing import triton as routing
from intarsia.kernels.sampling.triton import LIST_TOKENS, LIST_WARPS, WARPS, TritonSampling, shift_of
from intarsia.kernels.state.triton import (
    BFLOAT16_LAUNCH,
    LAUNCHES,
    PRECISIONS,
    TritonStates,
    keyed_warps,
    prompt_block,
    step_block,
)
from intarsia.kernels.state.worklist import TILE_TOKENS
from intarsia.kernels.streams import triton as streams
from intarsia.kernels.token_choice import Asked, BlockRule, ChoiceBatch, Sight
from intarsia.kernels.token_choice import triton as choice
from intarsia.kernels.tokenwise import Activation, Gating, Rotary
from intarsia.kernels.tokenwise import triton as tokenwise
from intarsia.kernels.toolchain.triton import LEAST_DOT, power_of_two, precision_of

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a program may use at most, by compute capability."""

SPILLS_A_LITTLE = {
    "mamba-2 bf16 (prompt)": 16,
    "attend bf16 gpt-oss sinks (prompt)": 64,
    "attend fp16 gpt-oss sinks (prompt)": 64,
}
"""Bytes, with Triton 3.9; none with 3.6, with which both were the fastest on an H100: 571 us where what spills nothing
with either takes 1,000, and 1,461 where it takes 1,762."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Variant(NamedTuple):
    """One way in which a kernel is launched."""

    name: str
    kernel: Any
    types: dict[str, str]  # of its arguments
    constants: dict[str, Any]
    warps: int
    stages: int


def variants(dtypes: Sequence[str], capability: int) -> Iterator[Variant]:
    """What real models launch: heads of 64 to 256 numbers, latents, windows, chunks, softcap and sinks; states;
    and vocabularies of 32,000 to 262,144 tokens."""
    for dtype in dtypes:
        yield from _attention(dtype)
        yield from _tokenwise(dtype)
        yield from _routing(dtype)
    yield from _states(capability)
    yield from _mixers()
    yield from _streams()
    yield from _products(capability)
    yield from _unpacked_products()
    for dtype in dtypes:
        yield from _choice(dtype)
        yield from _sampling(dtype)


ATTENTION = [  # name, heads per kv head, key size, value size, tokens of a page, rule, softcap, sinks
    ("llama", 4, 128, 128, 16, 0, False, False),
    ("gemma3 window", 2, 256, 256, 16, 1, False, False),
    ("gemma2 softcap", 2, 256, 256, 16, 1, True, False),
    ("gpt-oss sinks", 8, 64, 64, 16, 1, False, True),
    ("llama4 chunk", 5, 128, 128, 32, 2, False, False),
    ("head of 80, odd page", 8, 80, 80, 24, 0, False, False),
    ("head of 192", 4, 192, 128, 16, 0, False, False),
    ("latent", 16, 576, 512, 64, 0, False, False),
    ("encoder", 4, 128, 128, 16, 3, False, False),
    ("bloom slopes", 1, 128, 128, 16, 0, False, False),
    ("inkling biases", 8, 128, 128, 16, 1, False, True),
]

BY_DISTANCE = {"bloom slopes": {"HAS_SLOPES": True}, "inkling biases": {"EXTENT": 1024, "SINKS_OF_QUERIES": True}}
"""How scores change with it."""


def _attention(dtype: str) -> Iterator[Variant]:
    kernels = TritonBackend()._kernels
    for name, group, key_dim, value_dim, page, rule, softcap, sinks in ATTENTION:
        key, value = Size.of(key_dim), Size.of(value_dim)
        for one_query in (True, False):
            is_biased = "EXTENT" in BY_DISTANCE.get(name, {})
            shape: Shape = shape_for(key_dim, value_dim, group, DTYPES[dtype].itemsize, one_query, is_biased=is_biased)
            yield Variant(
                f"attend {dtype} {name} ({'single' if one_query else 'prompt'})",
                kernels.attend,
                _types(
                    kernels.attend, {"q_ptr", "pages_ptr", "out_ptr", "sinks_ptr"}, dtype,
                    {"partial_ptr", "slopes_ptr", "biases_ptr"},
                    {"table_start_ptr"},
                ),
                {
                    "GROUP": group, "ROWS": shape.rows, "KEYS": shape.keys, "PAGE": page,
                    "KEY_DIM": key.dim, "KEY_MAIN": key.main, "KEY_REST": key.rest,
                    "VALUE_DIM": value.dim, "VALUE_MAIN": value.main, "VALUE_REST": value.rest,
                    "VALUE_AT": 0 if name == "latent" else key_dim, "RULE": rule, "ONE_QUERY": one_query,
                    "HAS_SOFTCAP": softcap, "HAS_SINKS": sinks, "SINKS_OF_QUERIES": False, "HAS_SLOPES": False,
                    "EXTENT": 0, "AT_ONCE": shape.at_once and name not in BY_DISTANCE, "AHEAD": shape.ahead,
                    "PRECISION": precision_of(DTYPES[dtype]), **BY_DISTANCE.get(name, {}),
                },
                shape.warps,
                shape.stages,
            )  # fmt: skip
    yield Variant(
        f"write {dtype}",
        kernels.write,
        _types(kernels.write, {"key_ptr", "value_ptr", "pages_ptr"}, dtype, set(), {"page_ptr", "offset_ptr"}),
        {"HEADS": 8, "HEADS_PADDED": 8, "KEY_DIM": 128, "KEY_PADDED": 128, "VALUE_DIM": 128, "VALUE_PADDED": 128},
        4,
        3,
    )
    for value_dim in (128, 512):
        yield Variant(
            f"merge {dtype} {value_dim}",
            kernels.merge,
            _types(kernels.merge, {"out_ptr", "sinks_ptr"}, dtype, {"partial_ptr"}),
            {
                "GROUP": 4, "CUTS": MERGED_AT_ONCE,
                "VALUE_DIM": value_dim, "VALUE_PADDED": value_dim, "HAS_SINKS": False,
                "SINKS_OF_QUERIES": False,
            },
            4,
            3,
        )  # fmt: skip


ROWS = [  # name, numbers of a row, of a gated half
    ("gemma3 270m", 640, 2048),
    ("llama 8b", 4096, 14336),
    ("gemma3 27b", 5376, 21504),
    ("llama 405b", 16384, 53248),
]

CUT_GATES = [  # name, numbers of a gated half, what is done
    ("gpt-oss", 2880, Gating(Activation.SILU, 7.0, by_turns=True, steepness=1.702, added=1.0)),
    ("minimax-m3", 3072, Gating(Activation.SILU, 7.0, steepness=1.702, added=1.0)),
    ("deepseek-v4", 2048, Gating(Activation.SILU, 10.0)),
    ("step 3.7", 1280, Gating(Activation.SILU, 7.0, is_cut_after=True)),
]

HEADS = [  # name, heads, kv heads, head size, rotated numbers, angles, how, whose norms, whether keys go into pages
    ("gemma3 270m", 4, 1, 256, 256, 256, Rotary.HALVES, "heads", True),
    ("gemma3 27b", 32, 16, 128, 128, 128, Rotary.HALVES, "heads", True),
    ("gpt-oss", 64, 8, 64, 64, 32, Rotary.HALVES, None, True),
    ("ministral 3", 32, 8, 128, 128, 128, Rotary.HALVES, None, True),
    ("cohere2 pairs", 64, 8, 128, 128, 128, Rotary.PAIRS, None, True),
    ("olmo3 over all heads", 40, 8, 128, 128, 128, Rotary.HALVES, "all", True),
    ("partly rotated, head of 80", 32, 8, 80, 32, 32, Rotary.HALVES, None, False),
]


def _tokenwise(dtype: str) -> Iterator[Variant]:
    kernels = tokenwise._kernels()
    for name, width, half in ROWS:
        yield _norms(dtype, name, width)
        yield Variant(
            f"gate {dtype} {name}",
            kernels.gate,
            _types(kernels.gate, set(), dtype, None),
            {"WIDTH": half, "BLOCK": tokenwise.BLOCK, **tokenwise.constants_of(Gating(Activation.GELU_TANH))},
            tokenwise.WARPS,
            3,
        )
    for name, width, gating in CUT_GATES:
        yield Variant(
            f"gate {dtype} {name}",
            kernels.gate,
            _types(kernels.gate, set(), dtype, None),
            {"WIDTH": width, "BLOCK": tokenwise.BLOCK, **tokenwise.constants_of(gating)},
            tokenwise.WARPS,
            3,
        )
    for activation in Activation:
        yield Variant(
            f"activation {dtype} {activation.name}",
            kernels.activate,
            _types(kernels.activate, set(), dtype, None),
            {"WIDTH": 14336, "ACTIVATION": int(activation), "BLOCK": tokenwise.BLOCK},
            tokenwise.WARPS,
            3,
        )
    yield _norms(dtype, "command a", 12288, is_centered=True)
    yield from _heads(dtype, kernels.prepare_heads)


def _norms(dtype: str, name: str, width: int, *, is_centered: bool = False) -> Variant:
    """Around a sum."""
    kernel, block = tokenwise._kernels().add_norm, power_of_two(width)
    return Variant(
        f"norm {dtype} {name}",
        kernel,
        _types(kernel, {"x_ptr", "added_ptr", "sum_ptr", "out_ptr"}, dtype, {"after_ptr", "before_ptr"}),
        {
            "WIDTH": width, "BLOCK": block, "HAS_ADDED": True, "HAS_SCALE": True, "HAS_AFTER": True, "HAS_BEFORE": True,
            "AFTER_ROUNDS_FIRST": False, "BEFORE_ROUNDS_FIRST": not is_centered,
            "AFTER_IS_CENTERED": is_centered, "BEFORE_IS_CENTERED": is_centered,
        },
        tokenwise.row_warps(block),
        3,
    )  # fmt: skip


ROUTERS = [  # name, experts, how
    ("gpt-oss", 128, Routing(4, Scoring.SOFTMAX, is_of_chosen=True)),
    ("qwen3-next", 512, Routing(10, Scoring.SOFTMAX, least=0.0)),
    ("deepseek-v3", 256, Routing(8, Scoring.SIGMOID, False, False, 8, 4, 1e-20, 2.5, bias_E=torch.empty(256))),
    ("deepseek-v4", 384, Routing(6, Scoring.SQRT_SOFTPLUS, rounds=True, least=1e-20, bias_E=torch.empty(384))),
    ("gemma 4", 128, Routing(8, Scoring.SOFTMAX, least=0.0, scale_E=torch.empty(128))),
]


def _routing(dtype: str) -> Iterator[Variant]:
    kernel = routing._kernels().route
    for name, experts, how in ROUTERS:
        yield Variant(
            f"routing {dtype} {name}",
            kernel,
            _types(kernel, {"logits_ptr", "shares_ptr"}, dtype, {"bias_ptr", "expert_scale_ptr"}, {"experts_ptr"}),
            routing.constants_of(how, experts),
            routing.WARPS,
            3,
        )


def _heads(dtype: str, kernel: Any) -> Iterator[Variant]:
    numbers = {"tokens_ptr", "pages_ptr", "cos_ptr", "sin_ptr"}
    floats = {"query_scale_ptr", "key_scale_ptr", "query_factor_ptr"}
    types = _types(kernel, numbers, dtype, floats, {"page_ptr", "offset_ptr"})
    for name, heads, kv_heads, head_dim, rotary_dim, angles, rotary, normed, writes in HEADS:
        widths = [{"heads": head_dim, "all": n * head_dim, None: 0}[normed] for n in (heads, kv_heads)]
        query_block, key_block = (
            tokenwise.heads_block(n, head_dim, width) for n, width in zip((heads, kv_heads), widths, strict=True)
        )
        constants = {
            "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim,
            "QUERY_BLOCK": query_block, "KEY_BLOCK": key_block,
            "QUERY_NORM_WIDTH": widths[0], "KEY_NORM_WIDTH": widths[1],
            "QUERY_ROUNDS_FIRST": False, "KEY_ROUNDS_FIRST": False,
            **tokenwise.Turned.of(rotary, head_dim, rotary_dim, angles)._asdict(),
            "HAS_FACTOR": name == "ministral 3", "WRITES": writes, "VALUE_DIM": head_dim if writes else 0,
            "VALUE_PADDED": power_of_two(head_dim) if writes else 1,
        }  # fmt: skip
        warps = tokenwise.heads_warps(head_dim, query_block, key_block)
        yield Variant(f"heads {dtype} {name}", kernel, types, constants, warps, 3)


def _states(capability: int) -> Iterator[Variant]:
    kernels = TritonStates()._kernels
    lists = {"rows_ptr", "pieces_ptr", "tiles_ptr"}

    def types(kernel: Any, dtype: str) -> dict[str, str]:
        return _types(kernel, {name for name in kernel.arg_names if name not in lists}, dtype, set())

    for name, keys, values, delta, group in (
        ("mamba-2", 128, 64, False, 128), ("lightning", 96, 96, False, 1), ("gated delta", 128, 128, True, 2)
    ):  # fmt: skip
        launch = LAUNCHES["gated_delta" if delta else "linear_attention"]
        common = {
            "KEYS": keys, "KEYS_PADDED": max(LEAST_DOT, power_of_two(keys)), "VALUES": values, "GROUP": group
        }  # fmt: skip
        step = common | {"VALUES_BLOCK": step_block(keys, values), "DELTA": delta}
        yield Variant(f"{name} (step)", kernels.heads_step, types(kernels.heads_step, "fp32"), step, 4, 3)
        prompt = common | {
            "VALUES_BLOCK": prompt_block(launch, keys, values), "CHUNK": launch.chunk_tokens, "DELTA": delta,
            "PRECISION": PRECISIONS["gated_delta" if delta else "linear_attention"],
        }  # fmt: skip
        own = types(kernels.heads, "fp32")
        yield Variant(f"{name} fp32 (prompt)", kernels.heads, own, prompt, launch.warps, launch.stages)
    keyed = {
        "KEYS": 128, "KEYS_PADDED": 128, "VALUES": 128, "VALUES_BLOCK": step_block(128, 128), "GROUP": 1
    }  # fmt: skip
    yield Variant(
        "keyed delta", kernels.keyed_heads, types(kernels.keyed_heads, "fp32"), keyed, keyed_warps(capability), 3
    )
    yield Variant("rg-lru", kernels.decaying_sums, types(kernels.decaying_sums, "fp32"), {"BLOCK": 64}, 2, 3)
    kernel, launch = kernels.shared_heads, BFLOAT16_LAUNCH
    constants = {
        "KEYS": 128, "KEYS_PADDED": 128, "VALUES": 64, "VALUES_BLOCK": prompt_block(launch, 128, 64), "GROUP": 128,
        "CHUNK": launch.chunk_tokens, "Q_TOKEN": 8448, "K_TOKEN": 8448, "V_TOKEN": 8192, "OUT_TOKEN": 8192,
    }  # fmt: skip
    own = types(kernel, "fp32") | {"q_ptr": "*bf16", "k_ptr": "*bf16"}
    yield Variant("mamba-2 bf16 (prompt)", kernel, own, constants, launch.warps, launch.stages)
    yield Variant(
        "selective scan",
        kernels.channels,
        types(kernels.channels, "fp32"),
        {"STATES": 16, "STATES_PADDED": 16, "BLOCK": 32},
        4,
        1,
    )
    yield Variant(
        "convolution",
        kernels.convolve,
        types(kernels.convolve, "bf16"),
        {"WINDOW": 3, "TOKENS": TILE_TOKENS, "BLOCK": 128, "SILU": True},
        4,
        1,
    )
    yield Variant(
        "convolution's state",
        kernels.shift,
        types(kernels.shift, "bf16"),
        {"WINDOW": 3, "BLOCK": 128},
        4,
        1,
    )


def _mixers() -> Iterator[Variant]:
    """Around states of Bamba 9B, and of Qwen3-Next."""
    kernels = mixers._kernels()
    numbers = {"qkv_ptr", "a_ptr", "b_ptr", "x_ptr", "dt_ptr", "gate_ptr", "factor_ptr"}

    def types(kernel: Any, *others: str) -> dict[str, str]:
        floats = {name for name in kernel.arg_names if name.endswith("_ptr")} - numbers - {*others}
        found = _types(kernel, numbers | {*others}, "bf16", floats)
        return found | {name: "fp32" for name in ("least", "most", "key_scale", "eps") if name in found}

    for name, key_heads, decays in (("qwen3-next", 16, 1), ("ling-3", 32, 128)):
        delta = {
            "KEY_HEADS": key_heads, "KEYS": 128, "KEYS_PADDED": 128, "HEADS": 32, "VALUES": 128, "VALUES_PADDED": 128,
            "DECAYS": decays, "DECAYS_PADDED": decays, "HAS_LEAST": decays > 1,
        }  # fmt: skip
        yield Variant(f"mixer delta inputs {name}", kernels.delta_inputs, types(kernels.delta_inputs), delta, 1, 3)
    lru = types(kernels.lru_inputs, "input_ptr", "forget_ptr") | {"positions_ptr": "*i64"}
    yield Variant("mixer rg-lru inputs", kernels.lru_inputs, lru, {"CHANNELS": 2560, "BLOCK": mixers.BLOCK}, 4, 3)
    inputs = {"INNER": 8192, "VALUES": 64, "BLOCK": mixers.BLOCK}
    yield Variant("mixer mamba-2 inputs", kernels.mamba2_inputs, types(kernels.mamba2_inputs), inputs, 4, 3)
    function = {"WIDTH": 8192, "FUNCTION": 0, "HAS_FACTOR": False, "BLOCK": mixers.BLOCK}
    yield Variant("mixer time steps", kernels.mapped, types(kernels.mapped), function, 4, 3)
    for name, order, width, skips, rounds in (("bamba", 2, 8192, True, False), ("qwen3-next", 1, 128, False, True)):
        norm = {
            "CHANNELS": 8192, "WIDTH": width, "BLOCK": width, "ORDER": order, "HAS_SKIP": skips, "ROUNDS": rounds,
            "GATE": 1,
        }  # fmt: skip
        warps = tokenwise.row_warps(width)
        yield Variant(f"mixer norm {name}", kernels.gated_norm, types(kernels.gated_norm, "out_ptr"), norm, warps, 3)


def _streams() -> Iterator[Variant]:
    """Of DeepSeek-V4: in front of a block, and after the last."""
    kernels = streams._kernels()
    for name, is_last in (("before a block", False), ("after the last", True)):
        count, channels = 4, 4096
        weights = count if is_last else (2 + count) * count
        sizes = streams.Sizes.of(count, channels, weights)
        shared = {"WIDTH": sizes.width, "PADDED": sizes.padded, "PARTS": sizes.parts}
        floats = {"product_ptr", "parts_ptr", "base_ptr", "scale_ptr", "after_ptr", "mixed_ptr"}
        yield Variant(
            f"streams multiply {name}",
            kernels.multiply,
            _types(kernels.multiply, {"streams_ptr"}, "bf16", floats),
            {**shared, "WEIGHTS": weights, "PART": sizes.part, "BLOCK": streams.BLOCK, "TOKENS": streams.TOKENS},
            4,
            3,
        )
        yield Variant(
            f"streams finish {name}",
            kernels.finish,
            _types(kernels.finish, {"streams_ptr", "collapsed_ptr"}, "bf16", floats),
            {
                **shared,
                "COUNT": count,
                "CHANNELS": channels,
                "ROUNDS": 20,
                "BLOCK": streams.CHANNELS,
                "IS_LAST": is_last,
            },
            4,
            3,
        )


def _choice(dtype: str) -> Iterator[Variant]:
    """Of DeepSeek-V3.2, blocks of MiniMax-M3, and entries of DeepSeek-V4, in a recorded step."""
    rows, heads, size, most, entry, page = 8, 64, 128, 2048, 576, 64

    def empty(*shape: int, dtype: torch.dtype = DTYPES[dtype]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weights, scores = (empty(rows, width, dtype=torch.float32) for width in (heads, 1 << 17))
    table, starts = empty(1 << 20, dtype=torch.int32), empty(rows, dtype=torch.int64)
    batch = ChoiceBatch(table, starts, scores.shape[1], page, starts)
    keys, chosen, asked = empty(4, page, size), empty(rows, 1, most, dtype=torch.int64), empty(rows, heads, size)
    rule, groups = BlockRule(128, 16, 1), 4
    of_blocks, blocks = empty(rows, groups, 1 << 10, dtype=torch.float32), empty(rows, groups, 16, dtype=torch.int64)
    sight, entries = Sight(128, 512, 640), replace(batch, entry_tokens=4)
    window, numbers = empty(4, page, 512), empty(rows, 512, dtype=torch.int64)
    launches = {
        "score": choice.scoring(Asked(asked, weights), keys, batch, scores, most),
        "select": choice.selecting(scores, batch, chosen),
        "gather": choice.gathering(empty(4, page, 1, entry), chosen, batch, empty(rows, 1, most, entry)),
        "score blocks": choice.scoring_blocks(empty(rows, groups, size), keys, batch, of_blocks, rule),
        "select blocks": choice.selecting(of_blocks, batch, blocks, rule.size),
        "gather sight": choice.gathering_sight(
            window, window, batch, entries, numbers, sight, empty(rows, sight.width, 512)
        ),
        "spread": choice.spreading(blocks, batch, empty(rows, groups, most, dtype=torch.int64), rule.size),
    }
    for name, launch in launches.items():
        places = {"positions_ptr", "starts_ptr", "chosen_ptr", "blocks_ptr", "window_starts_ptr", "entry_starts_ptr"}
        of_dtype = {"q_ptr", "keys_ptr", "entries_ptr", "window_ptr", "out_ptr"}
        types = _types(launch.kernel, of_dtype, dtype, {"weights_ptr", "scores_ptr"}, places)
        yield Variant(f"choice {dtype} {name}", launch.kernel, types, launch.constants, launch.warps, 3)


def _products(capability: int) -> Iterator[Variant]:
    """Products of few rows and of many: alone, for the same bits, and of experts."""
    kernels = products._kernels()
    for name, inputs, outputs, groups in (("gemma-3-27b", 5376, 21_504, 1), ("gpt-oss-20b experts", 2880, 5760, 32)):
        for rows, is_cut in ((64, True), (64, False), (128, True), (128, False)):
            tile, cut = products.tile_for(rows, 2, groups, capability), products.cut_inputs(inputs, outputs)
            numbers, lists = {"x_ptr", "weight_ptr", "bias_ptr", "out_ptr"}, {"first_ptr", "token_ptr"}
            constants = {
                "INPUTS": inputs, "CUT": cut, "GROUPS_PADDED": 0 if groups == 1 else power_of_two(groups),
                "HAS_TOKENS": groups > 1, "HAS_BIAS": groups > 1, "IS_CUT": is_cut, "ROWS": tile.rows,
                "OUTPUTS": products.OUTPUTS, "BLOCK": tile.block, "PRECISION": "ieee",
            }  # fmt: skip
            types = _types(kernels.product, numbers, "bf16", {"parts_ptr"}, lists)
            title = f"product {name}, {tile.rows} rows{', of one cut' if is_cut else ''}"
            yield Variant(title, kernels.product, types, constants, tile.warps, tile.stages)
    for groups, picks in ((32, 4), (256, 8)):
        constants = {"PICKS": picks, "GROUPS_PADDED": groups, "BLOCK": max(16, products.SORTED_AT_ONCE // groups)}
        types = _types(kernels.sort_rows, (), "bf16", (), {"group_ptr", "first_ptr", "token_ptr", "place_ptr"})
        yield Variant(f"sort rows of {groups} experts", kernels.sort_rows, types, constants, products.SORT_WARPS, 3)


UNPACKED = [  # name, kind of code, of scales, columns of a group, what its codes have besides
    ("int4, groups of 128, zero points", CodeKind.INT4, torch.bfloat16, 128, {"zero"}),
    ("int4, groups of 32, middle", CodeKind.INT4, torch.float16, 32, {"middle"}),
    ("nvfp4", CodeKind.E2M1, torch.float8_e4m3fn, 16, {"factor"}),
    ("mxfp4", CodeKind.E2M1, torch.uint8, 32, set[str]()),
    ("fp8, blocks of 128", CodeKind.E4M3, torch.bfloat16, 128, set[str]()),
    ("fp8, rows", CodeKind.E4M3, torch.float32, 1 << 20, set[str]()),
    ("mxfp8", CodeKind.E4M3, torch.uint8, 32, set[str]()),
    ("int8, rows", CodeKind.INT8, torch.bfloat16, 1 << 20, set[str]()),
    ("uint8, groups of 128, zero points", CodeKind.UINT8, torch.float16, 128, {"zero"}),
]
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def _unpacked_products() -> Iterator[Variant]:
    """Weights in fewer bits: every kind of one row, of few and of many, alone; and of experts; and their numbers."""
    for name, kind, scale, columns, more in UNPACKED:
        for groups, inputs, outputs in ((1, 4096, 14_336), (32, 2880, 5760)):
            packed = unpacking.TritonCodes(_thin_codes(kind, scale, columns, more, inputs), torch.bfloat16)
            title = f"unpacked product {name}{' of experts' if groups > 1 else ''}"
            asked = ((2, True), (64, True), (128, False)) if groups > 1 else ALONE
            yield from (_launch(title, packed, rows, groups, outputs, is_cut) for rows, is_cut in asked)
            if groups == 1:
                yield _expansion(f"expanded {name}", packed)


def _thin_codes(kind: CodeKind, scale: torch.dtype, columns: int, more: Collection[str], inputs: int) -> Codes:
    """Few outputs: nothing that is compiled depends on their number."""
    outputs, groups = 8, -(-inputs // columns)
    return Codes(
        kind,
        torch.zeros(outputs, inputs * kind.bits // 8, dtype=torch.uint8),
        torch.zeros(outputs, groups).to(scale),
        columns,
        torch.zeros(outputs, groups, dtype=torch.uint8) if "zero" in more else None,
        8 if "middle" in more else 0,
        torch.ones(outputs) if "factor" in more else None,
        divides="factor" in more,
    )


ALONE = (1, True), (64, True), (64, False), (128, False)
"""Rows, and whether each cut has a program."""


def _launch(
    title: str, packed: unpacking.TritonCodes, rows: int, groups: int, outputs: int, is_cut: bool
) -> Variant:  # fmt: skip
    kernel, constants, tile, width, _, _ = packed._launch(rows, 2)
    is_few = rows <= packed.most_few
    cut = (unpacking.cut_few if is_few else products.cut_inputs)(packed.inputs, outputs)
    constants = constants | {
        "INPUTS": packed.inputs, "CUT": cut, "GROUPS_PADDED": 0 if groups == 1 else power_of_two(groups),
        "HAS_TOKENS": groups > 1, "HAS_BIAS": groups > 1, "ROWS": tile.rows, "OUTPUTS": width, "BLOCK": tile.block,
        "IS_CUT": is_cut,
    }  # fmt: skip
    types = _types(kernel, {"x_ptr", "bias_ptr", "out_ptr"}, "bf16", {"parts_ptr", "factor_ptr"}, LISTS)
    types |= _types_of(packed)
    about = f"{title}, {tile.rows} rows{', of one cut' if is_cut else ''}"
    return Variant(about, kernel, types, constants, tile.warps, tile.stages)


LISTS = {"first_ptr", "token_ptr", "order_ptr"}


def _types_of(packed: unpacking.TritonCodes) -> dict[str, str]:
    """Of the pointers to what a weight has."""
    return {"code_ptr": "*i32", "zero_ptr": "*u8", "scale_ptr": POINTERS.get(packed._scale.dtype, "*u8")}


def _expansion(title: str, packed: unpacking.TritonCodes) -> Variant:
    kernel = unpacking._kernels().expand
    constants = {"INPUTS": packed.inputs, "OUTPUTS": products.OUTPUTS, "BLOCK": packed._block, **packed._constants}
    types = _types(kernel, {"out_ptr"}, "bf16", {"factor_ptr"}, LISTS) | _types_of(packed)
    return Variant(title, kernel, types, constants, unpacking.WARPS, 3)


def _sampling(dtype: str) -> Iterator[Variant]:
    sampling = TritonSampling()
    kernels = sampling._kernels
    for vocab in (32_000, 128_256, 262_144):
        parts, shift = sampling.parts(1, vocab), shift_of(vocab)
        for kernel, constants in (
            (kernels.change, {"BLOCK": parts.block}),
            (kernels.scan, {"BLOCK": parts.block, "BIN": parts.bin}),
            (kernels.weigh, {"BLOCK": parts.block, "SHIFT": shift}),
            (kernels.choose, {"BLOCK": min(LIST_TOKENS, parts.block), "SHIFT": shift}),
            (kernels.describe, {"BLOCK": parts.block, "SHIFT": shift}),
        ):
            types = _types(
                kernel, {"logits_ptr"}, dtype, {"changed_ptr", "scores_ptr"}, {"masses_ptr", "lists_ptr", "chosen_ptr"}
            )
            if "token_stride" in types:  # Triton compiles for the number 1 where that is what it is
                types["token_stride"] = "constexpr"
                constants = {**constants, "token_stride": 1}
            warps = LIST_WARPS if kernel is kernels.choose else WARPS
            yield Variant(f"sampling {kernel.__name__} {dtype} {vocab:,}", kernel, types, constants, warps, 3)


FLOATS = "scale", "softcap", "eps", "limit", "steepness", "added", "least"


def _types(
    kernel: Any, numbers: Collection[str], dtype: str, float32: Collection[str] | None, int64: Collection[str] = ()
) -> dict[str, str]:  # fmt: skip
    """Of each argument by its name. Pointers are to `dtype` if named in `numbers`, else int32; with float32 None all
    pointers but those to int64 are to `dtype`."""
    types = {}
    for name in kernel.arg_names:
        if name.isupper() and name not in ("A", "B", "C"):
            types[name] = "constexpr"
        elif not name.endswith("_ptr"):
            types[name] = "fp32" if name.endswith(FLOATS) else "i32"
        elif name in int64:
            types[name] = "*i64"
        elif float32 is None or name in numbers:
            types[name] = f"*{dtype}"
        else:
            types[name] = "*fp32" if name in float32 else "*i32"
    return types


def build(variant: Variant, capability: int) -> Any:
    """Compiled by Triton, which keeps the result in its cache."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    # At run time Triton sees that addresses and most strides are multiples of 16, and reads wider for it.
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, (name, kind) in enumerate(variant.types.items())
        if kind.startswith("*") or name.endswith(("stride", "_token", "_head", "vocab"))
    }
    source = ASTSource(variant.kernel, variant.types, variant.constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled(variant: Variant, capability: int) -> dict[str, Any]:
    """What the compiler made of it."""
    result = build(variant, capability)
    usage, code = _dump(result.asm["cubin"])
    return {
        "kernel": variant.name,
        "registers": usage.get("REG"),
        "spilled_bytes": usage.get("STACK", 0) + usage.get("LOCAL", 0),
        "local_accesses": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared_bytes": result.metadata.shared,
        "products": sorted(set(re.findall(r"\b(HGMMA|HMMA|IMMA|DMMA)\b", code))),
        "wide_loads": len(re.findall(r"LDG\.E\.128|LDGSTS\.E\S*\.128", code)),
        "warps": variant.warps,
    }


def _dump(cubin: bytes) -> tuple[dict[str, int], str]:
    """Resources by name, and the machine code as text, by the tools that come with Triton."""
    import triton  # pyright: ignore[reportMissingImports]

    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output([str(tools / "cuobjdump"), "--dump-resource-usage", file.name])
        code = _output([str(tools / "nvdisasm"), "-c", file.name])
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}, code


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--only", action="append", help="kernels whose name contains this; may be given again")
    args = parser.parse_args()
    failed = False
    for variant in variants(args.dtypes.split(","), args.capability):
        if not any(part in variant.name for part in args.only or [""]):
            continue
        row = compiled(variant, args.capability)
        in_float32 = variant.name.startswith("attend fp32") or variant.name.endswith("fp32 (prompt)")
        may_spill = in_float32 or row["spilled_bytes"] <= SPILLS_A_LITTLE.get(variant.name, 0)
        failed |= row["spilled_bytes"] > 0 and not may_spill
        failed |= row["shared_bytes"] > SHARED_BYTES[args.capability]
        print(json.dumps(row), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
