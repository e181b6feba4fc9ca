"""The command for machines with a GPU, in its smallest form on one without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from intarsia.kernels.toolchain import triton as gpu

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_battery.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_every_part_about_kernels_runs_and_is_written(tmp_path: Path):
    out = tmp_path / "battery.json"
    done = run("--smoke", "--parts", "ceilings,errors,attention,states", "-o", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert report["ceilings"]["copy_gb_per_s"] > 0
    judged = {row["backend"]: row for row in report["errors"]}
    assert set(judged) >= {"native", "torch", "reference"}
    assert not any(row.get("wrong") for row in report["errors"])
    timed = {row["backend"] for row in report["attention"] if "us" in row}
    assert "torch" in timed and ("triton" in timed) == (gpu.missing() is None)
    assert any("us" in row for row in report["states"])


@pytest.mark.slow
def test_the_engine_is_measured_beside_continuous_batching(tmp_path: Path):
    out = tmp_path / "battery.json"
    done = run("--smoke", "--parts", "engine", "-o", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    [row] = report["engine"]["requests"]
    assert row["graphs"]["tokens_per_s"] > 0 and row["eager"]["tokens_per_s"] > 0
    assert report["engine"]["over_continuous_batching"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--parts", "attention,magic"), "there are no parts magic; choose from"), ((), "there is no GPU here; --smoke")],
)
def test_what_can_not_be_run_is_said_in_one_line(arguments: tuple[str, ...], message: str):
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
