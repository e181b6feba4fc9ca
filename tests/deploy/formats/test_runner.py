"""The command that runs a folder of parser cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from intarsia.tests.agents.__main__ import main

AGENTS = Path(__file__).parents[3].parent / "shared" / "data" / "agents"

TOOLS = [{"type": "function", "function": {"name": "saw", "parameters": {"properties": {"cm": {"type": "integer"}}}}}]
OUTPUT = 'I saw.<tool_call>{"name": "saw", "arguments": {"cm": 3}}</tool_call>'


def folder_of(tmp_path: Path, *cases: dict[str, Any]) -> str:
    folder = tmp_path / "cases"
    folder.mkdir()
    about = {
        "formats": {"tool-json": '<tool_call>\\n{"name": .., "arguments": {..}}'},
        "special_tokens": ["<tool_call>"],
    }
    numbered = [{"id": f"wood-{n}", "format": "tool-json", "tools": TOOLS} | case for n, case in enumerate(cases)]
    (folder / "wood.json").write_text(json.dumps({"family": "wood", **about, "cases": numbered}))
    return str(folder)


def test_right_cases_are_counted_for_every_way_to_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    expect = {"content": "I saw.", "tool_calls": [{"name": "saw", "arguments": {"cm": 3.0}}]}
    assert main(folder_of(tmp_path, {"output": OUTPUT, "expect": expect})) == 0
    told = capsys.readouterr().out
    assert "every single cut              1 of 1" in told
    assert "all ways                      1 of 1" in told


def test_a_difference_is_shown_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wrong = {"content": "I saw.", "tool_calls": [{"name": "saw", "arguments": {"cm": 4}}]}
    other = {"why": "as others do", "expect": {"content": "I saw.", "tool_calls": []}}
    assert main(folder_of(tmp_path, {"output": OUTPUT, "expect": wrong, "also": [other]})) == 1
    told = capsys.readouterr().out
    assert 'saw({"cm": 3})' in told
    assert "all ways                      0 of 1" in told


def test_a_tolerated_outcome_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    called = {"content": "I saw.", "tool_calls": [{"name": "saw", "arguments": {"cm": 3}}]}
    case = {"output": OUTPUT, "expect": {"content": OUTPUT}, "also": [{"why": "it is a call", "expect": called}]}
    assert main(folder_of(tmp_path, case)) == 0
    assert "1 of 1 (1 of them tolerated)" in capsys.readouterr().out


def test_an_unknown_format_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(folder_of(tmp_path, {"output": "x", "format": "smoke signals", "expect": {"content": "x"}})) == 1
    assert "the format 'smoke signals' is unknown" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not AGENTS.is_dir(), reason="the cases of real models are not here")
def test_all_cases_of_real_models_are_right(capsys: pytest.CaptureFixture[str]):
    assert main(str(AGENTS / "cases")) == 0
    assert "all ways                    307 of 307" in capsys.readouterr().out
