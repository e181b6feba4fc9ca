import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from intarsia.deploy.cli import app
from intarsia.deploy.replay.operations import OperationRunner
from intarsia.errors import InvalidSetting
from intarsia.kvcache.check import recount

FULL = {"type": "full", "kv_heads": 2, "head": 8}
SLIDING = {"type": "sliding", "kv_heads": 2, "head": 8, "window": 8}
MAMBA = {"type": "mamba", "shapes": [[3, 8], [2, 4]], "dtypes": ["bf16", "fp32"]}


def runner(*layers: dict[str, Any], **header: Any) -> OperationRunner:
    usual = {"model": {"layers": list(layers or (FULL, SLIDING))}, "block_size": 4, "num_blocks": 100}
    return OperationRunner(usual | header)


def run(path: Path, *lines: Any, options: tuple[str, ...] = ("--json",)):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return CliRunner().invoke(app, ["replay", str(path), *options])


def test_a_prompt_is_found_again_up_to_its_last_token():
    r = runner()
    assert r.run({"op": "add", "id": "a", "segs": [[1, 40]]})["hit_tokens"] == 0
    r.run({"op": "free", "id": "a"})
    assert r.run({"op": "lookup", "segs": [[1, 40]]})["hit_tokens"] == 39
    assert r.run({"op": "lookup", "segs": [[1, 20], [2, 9]]})["hit_tokens"] == 20
    assert r.run({"op": "lookup", "segs": [[2, 40]]})["hit_tokens"] == 0


def test_both_ways_to_write_an_operation_mean_the_same():
    r = runner()
    assert r.run({"add": {"id": 1, "tokens": [1, 2, 3]}})["ok"]
    assert r.run({"op": "step", "id": 1, "n": 2}) == {
        "op": "step", "id": 1, "ok": True, "refused": [], "blocks_in_use_per_group": [2, 2], "free_blocks": 95,
    }  # fmt: skip


def test_a_salt_keeps_prompts_apart_and_the_account_says_so():
    r = runner(FULL)
    r.run({"op": "add", "id": 1, "segs": [[1, 40]], "salt": "a"})
    assert r.run({"op": "lookup", "segs": [[1, 40]], "salt": "a"})["hit_tokens"] == 39
    found = r.run({"op": "lookup", "segs": [[1, 40]], "salt": "b"})
    assert (found["hit_tokens"], found["lost_tokens"]) == (0, {"salt": 36})


def test_evicted_positions_are_forgotten_of_live_and_of_freed_requests():
    r = runner(FULL)
    r.run({"op": "add", "id": 1, "segs": [[1, 40]]})
    assert r.run({"op": "evict", "id": 1, "group": 0, "blocks": [5, 77]})["evicted"] == 1
    assert r.run({"op": "lookup", "segs": [[1, 40]]})["hit_tokens"] == 20
    r.run({"op": "free", "id": 1})
    assert r.run({"op": "evict", "id": 1, "group": 0, "blocks": [2]})["evicted"] == 1
    found = r.run({"op": "lookup", "segs": [[1, 40]]})
    assert (found["hit_tokens"], found["lost_tokens"]) == (8, {"evicted": 31})


def test_given_tokens_of_a_step_are_part_of_the_next_prompt():
    r = runner(FULL, MAMBA)
    r.run({"op": "add", "id": 1, "segs": [[1, 18]]})
    r.run({"op": "step", "id": 1, "segs": [[2, 9]]})
    r.run({"op": "free", "id": 1})
    assert r.run({"op": "lookup", "segs": [[1, 18], [2, 9], [3, 5]]})["hit_tokens"] == 27


def test_steps_of_all_requests_refuse_those_without_room_and_advance_the_others():
    r = runner(FULL, num_blocks=6)
    for n in (1, 2):
        r.run({"op": "add", "id": n, "segs": [[n, 8]]})
    assert r.run({"op": "step", "id": "*", "n": 4})["refused"] == ["2"]
    assert not r.run({"op": "step", "id": 2})["ok"]
    recount(r.manager)


def test_fill_adds_until_one_is_refused_and_that_one_leaves_nothing():
    r = runner(FULL, num_blocks=11)
    found = r.run({"op": "fill", "len": 8, "steps": 4, "max": 50})
    assert (found["added"], found["free_blocks"]) == (3, 1)
    assert "blocks are wanted" in found["error"]
    assert r.run({"op": "free", "id": "*"})["blocks_in_use_per_group"] == [0]


def test_long_prompt_takes_shorter_chunks_where_there_is_no_room_for_long_ones():
    r = runner(SLIDING, num_blocks=6)
    assert r.run({"op": "add", "id": 1, "segs": [[1, 200]]})["ok"]
    assert runner(FULL, num_blocks=6).run({"op": "add", "id": 1, "segs": [[1, 200]]})["ok"] is False


def test_a_mark_gives_times_per_kind_of_operation_and_starts_anew():
    r = runner()
    r.run({"op": "add", "id": 1, "segs": [[1, 40]]})
    r.run({"op": "step", "id": "*", "n": 7})
    timings = r.run({"op": "mark", "name": "here"})["timings"]
    assert timings["step"]["count"] == 7
    assert set(timings) == {"hash", "lookup", "prefill", "step"}
    assert set(timings["step"]) == {"count", "median_us", "p99_us", "mean_us"}
    assert r.run({"op": "mark"})["timings"] == {}


def test_forks_resets_and_encoders_run_over_every_kind_of_layer():
    layers = [FULL | {"name": "f"}, SLIDING, {"type": "chunked", "kv_heads": 1, "head": 8, "chunk": 16}, MAMBA,
              FULL | {"shares": "f"}, FULL | {"draft": True}, {"type": "mla", "head": 24},
              {"type": "cross", "kv_heads": 1, "head": 8}]  # fmt: skip
    r = runner(*layers, num_blocks=400)
    image = {"key": "image", "tokens": 10}
    r.run({"op": "add", "id": 1, "segs": [[1, 50]], "encoder": image})
    r.run({"op": "fork", "id": 1, "child": 2})
    assert r.run({"op": "step", "id": "*", "n": 20})["refused"] == []
    recount(r.manager)
    r.run({"op": "free", "id": "*"})
    assert r.run({"op": "lookup", "segs": [[1, 50]], "encoder": image})["hit_tokens"] == 48  # a snapshot is there
    r.run({"op": "reset"})
    assert r.run({"op": "lookup", "segs": [[1, 50]], "encoder": image})["hit_tokens"] == 0
    assert recount(r.manager).all_free


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        ({"op": "dance"}, "op must be one of add, lookup"),
        ({"op": "add", "id": 1}, 'either "tokens" or "segs"'),
        ({"op": "add", "id": 1, "tokens": []}, "at least one token"),
        ({"op": "add", "id": 1, "tokens": [-1]}, "whole numbers from 0"),
        ({"op": "add", "tokens": [1]}, "needs an id of its own"),
        ({"op": "add", "id": "live", "tokens": [1]}, "is live already"),
        ({"op": "add", "id": 1, "segs": [[1]]}, "a segment is"),
        ({"op": "add", "id": 1, "tokens": [1], "chunk": 0}, "chunk must be a positive"),
        ({"op": "add", "id": 1, "tokens": [1], "ttl": -1}, "ttl must be a positive"),
        ({"op": "step", "id": "nobody"}, "there is no request 'nobody'; 1 are live"),
        ({"op": "step", "id": "live", "n": 0}, "n must be a whole number of at least 1"),
        ({"op": "free", "id": None}, "there is no request"),
        ({"op": "evict", "id": "live", "group": 7, "blocks": [1]}, "group must be 0 to 1"),
        ({"op": "evict", "id": "live", "group": 0, "blocks": [-1]}, "blocks must be a list of positions"),
        ({"op": "fill", "len": 0}, "len must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_done_is_answered_and_disturbs_nothing(operation: dict[str, Any], says: str):
    r = runner()
    r.run({"op": "add", "id": "live", "segs": [[5, 9]]})
    before = r.manager.table(next(iter(r.manager._rows)))
    answer = r.run(operation)
    assert answer["ok"] is False
    assert says in answer["error"]
    assert r.manager.table(next(iter(r.manager._rows))) == before
    recount(r.manager)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"layers": [FULL | {"type": "fulll"}], "num_blocks": 9}, "layer 0: type must be one of full, sliding"),
        ({"layers": [SLIDING | {"window": 0}], "num_blocks": 9}, "layer 0: a sliding window must show"),
        ({"layers": [FULL], "kv_bytes": -1}, "kv_bytes must be at least 1, got -1"),
        ({"layers": [FULL | {"kv_heads": 10**6}], "kv_bytes": 1000}, "holds 0 blocks"),
        ({"layers": [FULL], "kv_bytes": 1 << 50, "block_size": 1}, "more than the 2147483647"),
        ({"layers": [FULL], "num_blocks": 2**33}, "num_blocks must be at most"),
        ({"layers": [FULL]}, 'either "num_blocks" or "kv_bytes"'),
        ({"layers": [FULL | {"shares": "x"}], "num_blocks": 9}, "which no layer before it is named"),
        ({"layers": [{"type": "mamba"}], "num_blocks": 9}, 'needs "shapes"'),
        ({"layers": [], "num_blocks": 9}, "with at least one"),
        ({"model": "nonsense", "num_blocks": 9}, "neither a directory"),
        ({"layers": [FULL], "num_blocks": 9, "strategy": "best"}, "strategy must be one of"),
        ({"layers": [FULL], "num_blocks": 9, "policy": "fifo"}, "policy must be one of"),
        ({"layers": [FULL], "num_blocks": 9, "chunk": 0}, "chunk must be a positive"),
        ({"layers": [FULL], "num_blocks": 9, "caching": "yes"}, "caching must be true or false"),
    ],
)
def test_bad_header_is_refused_in_one_sentence(header: dict[str, Any], says: str):
    with pytest.raises(InvalidSetting) as refusal:
        OperationRunner(header)
    assert says in str(refusal.value)


def test_json_has_a_line_per_operation(tmp_path):
    header, add = {"model": "gpt-oss-20b", "kv_bytes": 1 << 30}, {"op": "add", "id": 1, "segs": [[1, 99]]}
    result = run(tmp_path / "t", header, add, "", {"op": "mark", "name": "m"})
    assert result.exit_code == 0
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["line"], first["op"], first["hit_tokens"], second["line"], second["name"]) == (2, "add", 0, 4, "m")


def test_for_people_every_operation_is_a_line(tmp_path):
    result = run(
        tmp_path / "t", {"layers": [FULL], "num_blocks": 9}, {"op": "add", "id": 1, "segs": [[1, 99999]]}, options=()
    )
    assert result.exit_code == 0
    assert "strategy packed: full (1 layers); 8 large pages" in result.stdout
    assert "REFUSED" in result.stdout


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"layers": [FULL], "num_blocks": 9}, "{"], "line 2 of"),
        ([{"layers": [FULL], "num_blocks": 9}, "[1]"], "must be an object"),
        ([{"layers": [FULL]}], "line 1 of"),
    ],
)
def test_a_trace_that_cannot_be_read_is_one_line_and_exit_2(tmp_path, lines: list[Any], says: str):
    result = run(tmp_path / "t", *lines)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_request_trace_says_how_much_was_found(tmp_path):
    entry = {"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]}
    lines = [entry, entry, entry | {"hash_ids": [1, 2, 8, 9]}]
    result = run(tmp_path / "t", *lines, options=("--json", "--kv-memory", "unlimited"))
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["requests"], found["tokens"], found["hit_tokens"]) == (3, 6144, 2047 + 1024)
    assert found["evictions"] == 0
    result = run(tmp_path / "t", *lines, options=("--kv-memory", "40GiB", "--block-size", "16"))
    assert "50.0% of the tokens" in result.stdout
    result = run(tmp_path / "t", *lines, options=("--json", "--rule", "r2", "--blocks", "2"))
    assert json.loads(result.stdout)["hit_blocks"] == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--kv-memory", "0"), "kv_memory must be positive"),
        (("--policy", "fifo"), "policy must be one of"),
        (("--model", "nonsense"), "neither a directory"),
        (("--rule", "r3"), "rule must be r1 or r2"),
        (("--block-size", "0"), "block_size must be at least 1"),
        (("--longest-prompt", "1"), "holds no requests"),
    ],
)
def test_impossible_options_are_one_line_and_exit_2(tmp_path, options: tuple[str, ...], says: str):
    entry = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    result = run(tmp_path / "t", entry, options=options)
    assert result.exit_code == 2
    assert says in result.stderr
