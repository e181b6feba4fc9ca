"""The command for machines with a GPU, rehearsed on one without: on the pretended device of `tests/pretended_cuda`."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from intarsia.bench.gpu import parts
from intarsia.bench.gpu.device import Kernel, busy_share, by_name
from intarsia.bench.gpu.lines import BEGAN, ENDED, FAILED, LEFT_OUT, Lines
from intarsia.bench.gpu.models import MODELS, config_of, cut
from intarsia.bench.gpu.run import Battery
from intarsia.bench.gpu.shapes import ATTENTION, ERRORS, WRITES, Attention, decode
from intarsia.bench.gpu.weights import write_config
from intarsia.kernels.toolchain import triton as gpu
from intarsia.tests.pretended_cuda.guard import compiler

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu_battery.py"
PRODUCT = ("controller", "deploy", "kernels", "kvcache", "proto", "workers")

LACKING = gpu.missing() or (None if compiler() else "there is no C++ compiler")
rehearsed = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

BARE = """
import importlib.abc, sys

class NotHere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "fastapi", "llguidance", "msgpack", "PIL", "typer", "grpc", "httpx", "uvicorn",
                                  "prometheus_client", "opentelemetry", "starlette", "pytest"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotHere())
"""
"""As `sitecustomize.py`: what a bare machine with torch and transformers lacks, as far as it is ours to import."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env={**os.environ, **environment}
    )


def listed(*arguments: str) -> list[tuple[str, str]]:
    """(job, case)"""
    done = run("--list", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(job, case) for line in done.stdout.splitlines() for job, _, case in [line.partition(": ")]]


def rehearse(out: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """The lines. Ends with 0, and nothing in it failed."""
    done = run("--rehearse", "--processes", "2", "-o", str(out), *arguments, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def ended(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["job"], row["case"]) for row in rows if ENDED in row]


def test_every_case_of_every_part_is_listed_once():
    cases = listed()
    assert max(Counter(cases).values()) == 1
    assert {job for job, _ in cases} == {job.id for job in parts.JOBS}
    names = {case for job, case in cases if job == "attention"}
    assert names == {each.name for each in (*ATTENTION, *WRITES)}
    assert cases == listed("--rehearse"), "a rehearsal has the same cases"


def test_two_calls_cover_all_parts_and_each_measures_its_own_ceilings():
    assert {*parts.FIRST, *parts.SECOND} == set(parts.PARTS)
    assert parts.FIRST[0] == parts.SECOND[0] == "ceilings"


@rehearsed
def test_a_quick_part_is_rehearsed_case_by_case(tmp_path: Path):
    rows = rehearse(tmp_path / "battery.jsonl", "--parts", "ceilings,pages")
    assert ended(rows) == listed("--parts", "ceilings,pages")
    found = {name for row in rows for name in row}
    assert found >= {"copy_gb_per_s", "read_gb_per_s", "bfloat16_tflop_per_s", "launch_us_in_graph", "times_floor"}


@rehearsed
def test_an_engine_runs_where_nothing_but_torch_and_transformers_is_installed(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    out = tmp_path / "battery.jsonl"
    rows = rehearse(out, "--parts", "engine", "--only", "64 requests of 256 tokens", PYTHONPATH=str(tmp_path))
    assert [row["engine"] for row in rows if "engine" in row] == ["ours", "transformers"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@rehearsed
def test_everything_is_rehearsed(tmp_path: Path):
    rows = rehearse(tmp_path / "battery.jsonl")
    assert ended(rows) == listed()
    judged = [row for row in rows if row["part"] == "errors" and row.get("backend") == "triton"]
    assert len(judged) == 3 * len(ERRORS)
    assert not [row for row in rows if LEFT_OUT in row]
    steps = [row for row in rows if row["part"] == "engine" and "step_us" in row]
    assert {row["how"] for row in steps} == {"graphs", "launched", "eager"}
    assert all(row["times_floor"] > 0 for row in steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "attention,magic"), "there are no parts magic; choose from"),
        ((), "there is no GPU here; --rehearse"),
    ],
)
def test_what_can_not_be_run_is_said_in_one_line(arguments: tuple[str, ...], message: str):
    if not arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_without_time_every_case_is_left_out_by_name(tmp_path: Path):
    out = tmp_path / "battery.jsonl"
    rows = rehearse(out, "--parts", "ceilings,pages", "--minutes", "0")
    assert [(row["job"], row["case"]) for row in rows if LEFT_OUT in row] == listed("--parts", "ceilings,pages")


class Script(Battery):
    """A battery whose processes do as they are told: (cases that end, one that only begins, exit status)."""

    def __init__(self, lines: Lines, runs: list[tuple[int, int | None]]):
        args = argparse.Namespace(parts=["pages"], only="", rehearse=True, processes=1)
        super().__init__(lines, args, Path("/"), time.time() + 100)
        self._runs = runs
        self.firsts: list[int] = []

    def _process(self, job: parts.Job, first: int, until: float) -> tuple[int | None, str]:
        self.firsts.append(first)
        ends, code = self._runs.pop(0)
        for number, case in list(enumerate(job.cases(True)))[first : first + ends + (code != 0)]:
            self._lines.add({"part": job.part, "job": job.id, "case": case.name, BEGAN: number})
            if number < first + ends:
                self._lines.add({"part": job.part, "job": job.id, "case": case.name, ENDED: number})
        return code, "an illegal memory access"


def test_a_case_that_ends_its_process_is_the_only_one_that_is_lost(tmp_path: Path):
    lines = Lines(tmp_path / "battery.jsonl", "now")
    [job] = parts.jobs_of(["pages"])
    battery = Script(lines, [(2, -6), (7, 0)])
    battery.run(job, [job])
    names = [case.name for case in job.cases(True)]
    assert battery.firsts == [0, 3]
    failed = [row for row in lines.of_run() if FAILED in row]
    assert [row["case"] for row in failed] == [names[2]] and "illegal memory access" in failed[0][FAILED]
    assert [row["case"] for row in lines.of_run() if ENDED in row] == names[:2] + names[3:]


def test_a_process_that_does_not_end_leaves_out_the_rest(tmp_path: Path):
    lines = Lines(tmp_path / "battery.jsonl", "now")
    [job] = parts.jobs_of(["pages"])
    Script(lines, [(1, None)]).run(job, [job])
    names = [case.name for case in job.cases(True)]
    assert [row["case"] for row in lines.of_run() if LEFT_OUT in row] == names[1:]


def test_lines_of_another_run_in_the_same_file_are_not_this_ones(tmp_path: Path):
    old, new = (Lines(tmp_path / "battery.jsonl", name) for name in ("old", "new"))
    old.add({"part": "pages", "job": "pages", "case": "a", BEGAN: 3})
    assert old.unfinished("pages") == (4, "a") and new.unfinished("pages") == (0, None)


@pytest.mark.parametrize(
    ("scene", "keys"),
    [
        (Attention("decode", decode(2, 100)), 200),
        (Attention("window", decode(2, 100), window=30), 60),
        (Attention("prompt in a window", ((10, 100),), window=30), 39),
        (Attention("chunk", decode(1, 100), chunk=64), 36),
    ],
)
def test_the_least_bytes_of_attention_are_the_keys_that_are_seen(scene: Attention, keys: int):
    around = scene.tokens * scene.heads * 256
    assert scene.bytes(2) == 2 * (keys * scene.kv_heads * 256 + around)


@pytest.mark.parametrize("scene", [*ATTENTION, *WRITES, *ERRORS], ids=lambda scene: scene.name)
def test_a_tiny_case_is_of_the_same_kind(scene: Attention):
    tiny = scene.tiny()
    for name in ("window", "chunk", "softcap", "sinks", "latent"):
        assert bool(getattr(tiny, name)) == bool(getattr(scene, name))
    assert tiny.is_decode == scene.is_decode and tiny.heads % tiny.kv_heads == 0
    assert all(0 < queries <= end <= 24 for queries, end in tiny.rows)
    assert any(queries == end > 1 for queries, end in tiny.rows) == any(n == end > 1 for n, end in scene.rows)


def test_kernels_that_overlap_are_busy_once():
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 12), Kernel("a", 20, 30)]
    assert busy_share(kernels) == pytest.approx(22 / 30) and busy_share([]) == 0
    assert by_name(kernels) == [("a", (2, 20.0)), ("b", (1, 7.0))]


PARAMETERS = {"gemma-3-4b": 3.88, "gemma-3-27b": 27.01, "llama-3.1-8b": 8.03, "gpt-oss-20b": 20.91, "bamba-9b": 9.78}
"""Billions, of the language models as they were released."""


@pytest.mark.parametrize("model", MODELS)
def test_models_are_as_large_as_they_were_released(tmp_path: Path, model: str):
    config = AutoConfig.from_pretrained(write_config(tmp_path, config_of(model, False)))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(PARAMETERS[model], rel=0.005)


@pytest.mark.parametrize("model", MODELS)
def test_a_cut_model_has_layers_of_every_kind(model: str):
    whole, few = config_of(model, False), cut(config_of(model, False))
    assert few["num_hidden_layers"] <= 6
    assert set(few.get("layer_types", ())) == set(whole.get("layer_types", ()))


def test_nothing_of_the_bench_is_imported_by_the_product():
    for folder in PRODUCT:
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text()
            assert "intarsia.bench" not in text and "from ..bench" not in text and "from ...bench" not in text, file
