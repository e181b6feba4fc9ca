"""The benchmark of real models, on a tiny one: that it runs, and that its sums are right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from intarsia.bench.real_sides.models import Model
from intarsia.bench.real_sides.sides import speeds
from intarsia.tests.models import load_oracle, make_checkpoint

BENCH = Path(__file__).parents[2] / "bench"
LIMIT_S = 240


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
def test_quick_run_measures_ours_and_transformers(tmp_path: Path):
    model = make_checkpoint("gemma3", tmp_path / "gemma3")
    command = [sys.executable, str(BENCH / "real.py"), str(model), "--quick", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    [found] = json.loads(done.stdout)["models"]
    assert found["memory"]["gb_per_s"] > 0
    assert [(row["side"], row["streams"]) for row in found["rows"]] == [("ours", 2), ("transformers", 2)]
    assert all(row["total_tokens_per_s"] > 0 and row["token_mb"] > 0 for row in found["rows"])


def test_decoding_is_counted_from_the_last_first_token():
    found = speeds([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]])
    assert found == {"decode_tokens_per_s": 5 / 3, "total_tokens_per_s": 8 / 5, "first_token_ms": 1500.0}


@pytest.mark.parametrize("streams, experts_read", [(1, 1 / 2), (3, 7 / 8)])  # 2 of 4, and those of any stream
def test_token_reads_its_share_of_weights_and_what_its_windows_show(tmp_path: Path, streams: int, experts_read: float):
    folder = make_checkpoint("gpt_oss", tmp_path / "gpt_oss")
    oracle = load_oracle(folder)
    weights = 0.0
    for name, parameter in oracle.named_parameters():
        read = 0 if "embed_tokens" in name else experts_read if ".experts." in name else 1
        weights += read * parameter.numel() * 4
    config = oracle.config
    seen = 2 * 100 + 2 * (config.sliding_window - 1)  # two full layers and two windows, the token itself not read
    kept = seen * 2 * config.num_key_value_heads * config.head_dim * 4
    assert Model(str(folder), tmp_path).token_bytes("float32", streams, 100) == round(weights / streams + kept)


def test_prompts_are_of_the_length_asked_for_and_others_in_each_round(tmp_path: Path):
    model = Model(str(make_checkpoint("llama", tmp_path / "llama")), tmp_path)
    drawn = [prompt for round_ in range(3) for prompt in model.prompts(4, 64, round_)]
    assert {len(prompt) for prompt in drawn} == {64} and len(set(map(tuple, drawn))) == 12
