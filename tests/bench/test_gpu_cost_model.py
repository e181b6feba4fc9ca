"""The cost model of decode steps, against hand computations and against what an H100 showed. No clock is read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.bench.gpu import measured, products
from intarsia.bench.gpu.costs import PRODUCT_GB_PER_S, Cost, Heads, Kind, attention_costs, most_loaded
from intarsia.bench.gpu.measured import ATTENTION_US, STEPS
from intarsia.bench.gpu.models import MODELS
from intarsia.bench.gpu.predicted import ASKED, attention, costs_of
from intarsia.bench.gpu.shapes import ATTENTION
from intarsia.bench.gpu.states import SHAPES
from intarsia.bench.gpu.traced import Launched
from intarsia.kernels.toolchain import triton as gpu
from intarsia.tests.pretended_cuda.guard import compiler

ROOT = Path(__file__).parents[2]

LACKING = gpu.missing() or (None if compiler() else "there is no C++ compiler")
traced = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

STEP_ERROR, FLOOR_ERROR_MS = 0.08, 0.12
"""Of predicted steps, as a share of what was measured. Of floors: rows were some tokens longer when that was."""
GROWN = 0.025
"""Of a floor, too: 64 rows were about 75 tokens longer, since they decoded while the last prompts were computed."""
NAMES = {
    "Gemma 3 27B": "gemma-3-27b", "gpt-oss 20B, in 16 bits": "gpt-oss-20b", "gpt-oss 20B": "gpt-oss-20b",
    "Llama 3.1 8B": "llama-3.1-8b", "Gemma 3 4B": "gemma-3-4b", "Bamba 9B": "bamba-9b",
}  # fmt: skip
"""Of `docs/gpu.md`."""

LLAMA_WEIGHTS = 32 * (6144 * 4096 + 4096 * 4096 + 28_672 * 4096 + 4096 * 14_336) + 128_256 * 4096
LLAMA_NORMS = 65 * 4096


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def predicted(*models: str) -> list[dict[str, Any]]:
    """Steps, in a process of their own, because torch is changed for good."""
    command = [sys.executable, "-m", "intarsia.bench.gpu.cost_model", "--json", "--models", ",".join(models)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["steps"]


def told_steps(since: str, until: str) -> list[list[str]]:
    """Rows of a table of `docs/gpu.md` that are about a step, each with its model."""
    found, model = [], ""
    text = (ROOT / "docs" / "gpu.md").read_text().partition(since)[2].partition(until)[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 1 and re.match(r"\d+ x \d+k", cells[1]):
            model = NAMES[cells[0]] if cells[0] else model
            found.append([model, *cells[1:]])
    return found


# -- what the model takes from an H100 ---------------------------------------------------------------------------------


def test_what_was_measured_is_what_the_docs_say():
    rows = []
    for model, step, ms, floor_ms, *_ in told_steps("**Decode steps**", "**Attention**"):
        rows.append(measured.Step(model, step, float(ms), float(floor_ms)))
    assert tuple(rows) == STEPS


def test_single_kernels_take_as_long_as_they_were_seen_to():
    """The model is made of the products, the chain and a row of 1k; the others are held against it."""
    for weight in products.WEIGHTS:
        if weight.name in measured.PRODUCT_US:
            cost = Cost(Kind.PRODUCT, 2 * weight.outputs * weight.inputs)
            assert cost.us == pytest.approx(measured.PRODUCT_US[weight.name], rel=0.02)
    chain_us = 5.0 + 4 * Cost(Kind.SMALL).us
    assert chain_us == pytest.approx(measured.CHAIN_US, rel=0.02)
    for tokens, floor_us in measured.EXPERTS_FLOOR_US.items():
        weights_us = floor_us * measured.READ_GB_PER_S / PRODUCT_GB_PER_S
        few = 3 if tokens > 1 else 5  # rows are sorted, gated and combined; cuts of both products added up
        experts_us = weights_us + 2 * Cost(Kind.PRODUCT).us + few * Cost(Kind.SMALL).us
        assert experts_us == pytest.approx(measured.EXPERTS_US[tokens], rel=0.08), tokens
    state = Cost(Kind.STATE, state_bytes=2 * 4 * 64 * int(np.prod(SHAPES["mamba-2"])))
    assert state.us == pytest.approx(measured.STATES_US, rel=0.04)
    draw_us = Cost(Kind.SMALL, other_bytes=2 * 64 * 262_144).us + Cost(Kind.SMALL).us
    assert draw_us == pytest.approx(measured.GREEDY_US, rel=0.25)


def test_attention_of_a_layer_takes_as_long_as_it_was_seen_to():
    found = attention()
    assert found.keys() == ATTENTION_US.keys()
    errors = {name: ours / theirs - 1 for name, (ours, theirs) in found.items()}
    assert all(-0.11 < error < 0.03 for error in errors.values()), errors


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_attention_moves_the_keys_that_are_seen_and_what_is_merged():
    heads = Heads(8, 4, 128, 128, 2, 16, 264)
    seen, merge = attention_costs(heads, (4096,) * 64)
    records = 64 * 8 * 4 * 8 * (128 + 2) * 4  # rows, cuts of 512, queries, kv heads, numbers
    queries = 64 * 32 * 128 * 2
    assert seen.kv_bytes == 64 * 4096 * 8 * 256 * 2
    assert seen.other_bytes == records + 2 * queries
    assert merge == Cost(Kind.SMALL, other_bytes=records + queries)
    assert attention_costs(heads._replace(window=1024), (4096,) * 64)[0].kv_bytes == 64 * 1024 * 8 * 256 * 2
    assert attention_costs(heads, (200,))[1] is None, "a short row is not cut"


@pytest.mark.parametrize("scene", [scene for scene in ATTENTION if scene.name in ATTENTION_US], ids=lambda s: s.name)
def test_the_least_bytes_of_attention_are_those_of_the_battery(scene: Any):
    heads = Heads(scene.kv_heads, scene.heads // scene.kv_heads, scene.key_dim, scene.value_dim, 2, 16, 100)
    heads = heads._replace(window=scene.window, chunk=scene.chunk)
    seen, merge = attention_costs(heads, tuple(end for _, end in scene.rows))
    around = 2 * len(scene.rows) * scene.heads * (scene.key_dim + scene.value_dim)
    assert seen.kv_bytes + around == scene.bytes(2)
    assert merge is not None and seen.other_bytes > around


@pytest.mark.parametrize(
    ("items", "kv_heads", "programs", "imbalance"),
    [
        ([64] * 132, 1, 132, 1.0),
        ([64] * 133, 1, 133, 2 * 132 / 133),
        ([64] * 66, 2, 66, 1.0),
        ([64] * 4, 8, 4, 132 / 32),
        ([64] * 132, 1, 66, 2.0),  # each program takes two
        ([1000] + [10] * 131, 1, 132, 1000 * 132 / 2310),
    ],
)
def test_the_processor_with_the_most_to_read_is_waited_for(
    items: list[int], kv_heads: int, programs: int, imbalance: float
):
    assert most_loaded(np.array(items), kv_heads, programs) == pytest.approx(imbalance)


def test_kernels_are_priced_by_what_they_move():
    x, weight, out = empty(64, 4096), empty(4096, 6144), empty(64, 6144)
    pages = empty(1000, 128, 128, 64, dtype=torch.float32)
    experts, rows = empty(32, 5760, 2880), empty(256, 5760)
    kernels = [
        Launched("mm", False, {"0": x, "1": weight}, (out,)),
        Launched("addmm", False, {"0": empty(6144), "1": x, "2": weight}, (out,)),
        Launched("embedding", False, {"0": empty(128_256, 4096), "1": empty(64, dtype=torch.int64)}, (x,)),
        Launched("topk", False, {"0": empty(64, 32)}, (empty(64, 4), empty(64, 4, dtype=torch.int64))),
        Launched("product", True, {"x_ptr": x, "weight_ptr": experts, "out_ptr": rows, "parts_ptr": rows}, ()),
        Launched("heads_step", True, {"v_ptr": x, "pages_ptr": pages}, ()),
        Launched("gate", True, {"gate_up_ptr": out, "out_ptr": x}, ()),
        Launched("prepare_heads", True, {"tokens_ptr": out, "pages_ptr": pages, "cos_ptr": x}, ()),
    ]
    around = 2 * 64 * (4096 + 6144)
    share = 1 - (1 - 4 / 32) ** 64
    assert list(costs_of(kernels, (1,) * 64, {"num_local_experts": 32, "num_experts_per_tok": 4})) == [
        Cost(Kind.PRODUCT, weight_bytes=2 * 4096 * 6144, other_bytes=around),
        Cost(Kind.PRODUCT, weight_bytes=2 * 4096 * 6144, other_bytes=around + 2 * 6144),
        Cost(Kind.SMALL, other_bytes=2 * 2 * 64 * 4096),
        Cost(Kind.SMALL, other_bytes=64 * (32 * 2 + 4 * 2 + 4 * 8), launches=2),
        Cost(Kind.PRODUCT, weight_bytes=2 * 32 * 5760 * 2880 * share, other_bytes=2 * (64 * 4096 + 256 * 5760)),
        Cost(Kind.STATE, state_bytes=2 * 64 * 4 * 128 * 128 * 64, other_bytes=2 * 64 * 4096),
        Cost(Kind.SMALL, other_bytes=around),
        Cost(Kind.SMALL, other_bytes=around + 2 * 64 * 6144),
    ]


# -- steps -------------------------------------------------------------------------------------------------------------


def check(steps: list[dict[str, Any]]) -> None:
    """What was measured: times, and the battery's floors."""
    held = [step for step in steps if step["measured_ms"] is not None]
    told = [step for step in STEPS if step.model in {each["model"] for each in held}]
    assert len(held) == len(told) > 0
    for ours, theirs in zip(held, sorted(told, key=lambda step: list(MODELS).index(step.model)), strict=True):
        assert (ours["model"], ours["measured_ms"]) == (theirs.model, theirs.ms)
        assert abs(ours["error"]) < STEP_ERROR, ours
        assert ours["floor_ms"] == pytest.approx(theirs.floor_ms, abs=FLOOR_ERROR_MS, rel=GROWN), ours


@traced
def test_a_step_of_llama_moves_what_can_be_counted_by_hand():
    steps = predicted("llama-3.1-8b")
    by_name = {(step["step"], step["measured_ms"]): step for step in steps}
    for name, (lengths, allowed) in ASKED.items():
        step = by_name[name, None]
        kv_bytes = 32 * sum(lengths) * 8 * 256 * 2
        assert step["gigabytes"]["weight"] == pytest.approx(2 * LLAMA_WEIGHTS / 1e9)
        assert step["gigabytes"]["kv"] == pytest.approx(kv_bytes / 1e9)
        assert step["gigabytes"]["state"] == 0
        floor_ms = (2 * (LLAMA_WEIGHTS + LLAMA_NORMS) + kv_bytes) / measured.READ_GB_PER_S / 1e6
        assert step["floor_ms"] == pytest.approx(floor_ms, rel=1e-3)
        # 10 kernels of a layer and the merge; embeddings, rotary positions, the last norm and product, the draw.
        assert 0 < step["kernels"] - 32 * 11 < 20
        assert step["times_floor"] <= allowed
        assert step["ms"] == pytest.approx(sum(step["ms_of"].values()))
    check(steps)


@pytest.mark.slow
@traced
def test_steps_of_all_models_are_predicted_as_they_were_measured():
    steps = predicted(*MODELS)
    check(steps)
    times_floor = {(step["model"], step["step"]): step["times_floor"] for step in steps if step["measured_ms"] is None}
    for model in ("gemma-3-27b", "gpt-oss-20b", "llama-3.1-8b"):
        assert all(times_floor[model, name] <= allowed for name, (_, allowed) in ASKED.items())
    # The docs say so.
    told, held = told_steps("**Predicted**", "**Held"), told_steps("**Held", "## How")
    assert (len(told), len(held)) == (len(MODELS) * len(ASKED), len(STEPS))
    for model, name, ms, floor_ms, ratio, *_, kernels in told:
        [step] = [each for each in steps if (each["model"], each["step"]) == (model, name) and not each["measured_ms"]]
        figures = f"{step['ms']:.1f}", f"{step['floor_ms']:.1f}", f"{step['times_floor']:.2f}", str(step["kernels"])
        assert (ms, floor_ms, ratio, kernels) == figures, (model, name)
    for model, name, kernels, ms, *_ in held:
        [step] = [each for each in steps if (each["model"], each["step"]) == (model, name) and each["measured_ms"]]
        assert (kernels, ms) == (f"{step['kernels']:,}", f"{step['ms']:.1f}"), (model, name)
    # Its floor takes it that states are written as fast as they are read.
    assert 1.2 < times_floor["bamba-9b", "64 x 4k"] < 1.3


def test_a_model_that_is_not_known_is_named():
    command = [sys.executable, "-m", "intarsia.bench.gpu.cost_model", "--models", "llama-3.1-8b,magic"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there are no models magic; choose from" in done.stderr
