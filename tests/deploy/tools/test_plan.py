import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from intarsia.deploy.cli import app
from intarsia.deploy.tools.model_layers import model_layers
from intarsia.deploy.tools.plan import PlanReport, make_report
from intarsia.errors import CorruptCheckpoint, InvalidSetting
from intarsia.kvcache.plan import PlanSettings

GIB = 1 << 30


def report(model: str, *contexts: int, memory: int = 40 * GIB, ranks: int = 1, **settings) -> PlanReport:
    return make_report(model_layers(model, ranks), PlanSettings(memory, **settings), contexts, ranks)


def run(*arguments: str, env: dict[str, str] | None = None):
    return CliRunner().invoke(app, ["plan", *arguments], env=env)


def test_gemma_3_27b_holds_the_exact_bound_at_every_context():
    made = report("gemma-3-27b", 2048, 8192, 32_768, 131_072)
    assert [math.floor(entry.requests) for entry in made.capacity] == [70, 38, 13, 3]
    assert [math.floor(entry.bound) for entry in made.capacity] == [70, 38, 13, 3]


@pytest.mark.parametrize(
    ("model", "context", "encoder_tokens", "saved"),
    [
        ("llama-3.2-11b-vision", 43, 6193, 0.796),
        ("gemma-2-9b", 8192, 0, 0.25),
        ("ministral-8b", 131_072, 0, 0.5625),
        ("gemma-3-12b", 8767, 0, 0.736),
    ],
)
def test_saving_against_keeping_every_token_is_the_published_one(model, context, encoder_tokens, saved):
    (entry,) = report(model, context, encoder_tokens=encoder_tokens).capacity
    assert entry.saved_vs_uniform == pytest.approx(saved, abs=0.0005)


def test_llama_4_scout_on_8_ranks_holds_what_was_published_and_4_times_that():
    memory = int(89.71 * GIB)
    uniform = report("llama-4-scout", 8_388_608, memory=memory, ranks=8, strategy="uniform").capacity[0]
    assert uniform.requests * uniform.context == pytest.approx(3_919_664, rel=1e-3)
    hybrid = report("llama-4-scout", 5_242_880, 8_388_608, memory=memory, ranks=8).capacity
    assert hybrid[0].requests >= 2.97
    assert hybrid[1].requests >= 1.86


@pytest.mark.parametrize(
    ("model", "ranks", "times"), [("gemma-3-1b", 2, 2), ("llama-3.1-8b", 8, None), ("deepseek-v3", 4, 4)]
)
def test_memory_of_heads_that_are_on_several_ranks_is_told(model: str, ranks: int, times: int | None):
    notes = report(model, ranks=ranks).to_json()["notes"]
    assert [f"{times} times the memory on {ranks} ranks" in note for note in notes] == [True] * (times is not None)


def test_json_has_the_fields_programs_rely_on():
    result = run("gemma-3-27b", "--json", "--context", "2048,8192")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["strategy"] == "packed"
    assert found["buffers"] == 1
    assert found["num_blocks"] == 1260
    assert found["padding_fraction"] == 0
    assert [
        (g["kind"], g["window"], len(g["layers"]), g["block_tokens"], g["page_bytes"]) for g in found["groups"]
    ] == [
        ("sliding", 1024, 52, 16, 52 * 131_072),
        ("full", None, 10, 16, 10 * 131_072),
    ]
    assert [entry["context"] for entry in found["capacity"]] == [2048, 8192]
    assert all(entry["requests"] <= entry["bound"] for entry in found["capacity"])
    assert {entry["strategy"] for entry in found["why"]} == {"layered", "packed", "partitioned", "uniform"}
    assert found["saved_vs_uniform"][1] == {"context": 8192, "fraction": pytest.approx(0.734, abs=0.001)}


def test_report_for_people_says_what_was_chosen_what_it_holds_and_what_binds():
    result = run("gemma-3-27b")
    assert result.exit_code == 0
    for said in ("Strategy packed", "1,024 tokens", "70.28", "83.2%", "the limit is the model's own maximum"):
        assert said in result.stdout


def test_memory_binds_where_the_model_would_go_on():
    made = report("gemma-3-27b", memory=4 * GIB)
    assert made.greatest_context < 131_072
    assert made.binds == "memory: the full layers take most of it"
    assert made.plan.fits(made.greatest_context)
    assert not made.plan.fits(made.greatest_context + 16)


def test_a_directory_and_its_config_are_read_as_the_engine_reads_them(tiny):
    path = Path(tiny("gemma3").path)
    assert model_layers(str(path)) == model_layers(str(path / "config.json"))
    assert {layer.reach.kind for layer in model_layers(str(path)).layers} == {"full", "sliding"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gemma-3-27b", "--kv-memory", "1MiB"], "holds 0 blocks"),
        (["gemma-3-27b", "--kv-memory", "lots"], "kv_memory must be a number of bytes"),
        (["gemma-3-27b", "--strategy", "best"], "strategy must be one of auto"),
        (["bamba-9b", "--strategy", "layered"], "needs layers of like page sizes"),
        (["gemma-3-27b", "--context", "1,x"], "context must be whole numbers"),
        (["gemma-3-27b", "--context", "0"], "context lengths must be positive"),
        (["gemma-3-27b", "--tensor-parallel-size", "3"], "does not divide the 16 key-value heads"),
        (["gemma-3-27b", "--dtype", "int3"], "dtype must be one of bfloat16"),
        (["gemma-3-27b", "--expected-average-seq-len", "0"], "positive whole number of tokens, got '0'"),
        (["gemma-3-27b", "--svg", "/nowhere/plan.svg"], "cannot be written"),
        (["no-such-model"], "neither a directory, nor a config.json, nor a known model"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_2(arguments: list[str], says: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("value", ["abc", "0", "-5", "1.5"])
def test_expected_length_of_the_environment_must_be_a_positive_whole_number(value: str):
    result = run("gemma-3-27b", env={"EXPECTED_AVERAGE_SEQ_LENGTH": value})
    assert result.exit_code == 2
    assert f"EXPECTED_AVERAGE_SEQ_LENGTH) must be a positive whole number of tokens, got '{value}'" in result.stderr


def test_expected_length_moves_the_partition():
    def share(expected: str) -> float:
        found = json.loads(run("gemma-3-27b", "--strategy", "partitioned", "--json", env={
            "EXPECTED_AVERAGE_SEQ_LENGTH": expected}).stdout)  # fmt: skip
        sizes = [arena["large_pages"] * arena["bytes"] for arena in found["arenas"]]
        return sizes[1] / sum(sizes)

    assert share("1000") < share("20000")


def test_a_missing_config_is_said(tmp_path):
    with pytest.raises(InvalidSetting, match=r"holds no config.json"):
        model_layers(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match="is not readable JSON"):
        model_layers(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such"}')
    with pytest.raises(InvalidSetting, match="not a config that transformers knows"):
        model_layers(str(tmp_path))
