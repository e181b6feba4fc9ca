import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from intarsia.deploy.load_test.shapes import SHAPES, TOOLS, History, Prompts, ShapeSettings
from intarsia.errors import InvalidSetting


def drawn(shape: str, **settings: Any) -> list[Any]:
    return list(SHAPES[shape](ShapeSettings(**settings)))


@pytest.mark.parametrize("shape", ["random", "sharegpt", "agents"])
def test_a_seed_gives_the_same_sessions_and_words(shape: str):
    settings = ShapeSettings(sessions=5, seed=3, range_ratio=0.5)
    one, other = (list(SHAPES[shape](settings)) for _ in range(2))
    assert one == other != drawn(shape, sessions=5, seed=4, range_ratio=0.5)
    prompts = Prompts(settings)
    assert prompts.new_words(one[2], 0) == Prompts(settings).new_words(other[2], 0)
    assert prompts.new_words(one[2], 0) != prompts.new_words(one[3], 0)


def test_prompts_have_their_lengths_and_begin_alike():
    settings = ShapeSettings(sessions=2, input_length=20, prefix_length=7)
    asked = []
    for session in SHAPES["random"](settings):
        history = History(Prompts(settings), session)
        history.ask(0)
        asked.append(str(history.prompt).split())
    assert [len(words) for words in asked] == [27, 27]
    assert asked[0][:7] == asked[1][:7] and asked[0] != asked[1]


def test_prompts_of_token_ids_are_rows_below_the_vocabulary():
    settings = ShapeSettings(sessions=1, input_length=30)
    [session] = SHAPES["random"](settings)
    history = History(Prompts(settings, range(40, 320)), session)
    history.ask(0)
    assert isinstance(history.prompt, list) and len(history.prompt) == 30
    assert all(40 <= token < 320 for token in history.prompt)


def test_lengths_lie_within_their_range():
    lengths = [session.turns[0].words for session in drawn("random", sessions=300, input_length=100, range_ratio=0.3)]
    assert 70 <= min(lengths) < 75 and 125 < max(lengths) <= 130


def test_blocks_of_a_trace_are_alike_where_their_ids_are(tmp_path: Path):
    entries = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 4000, "input_length": 1200, "output_length": 6, "hash_ids": [1, 2, 4]},
    ]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(entry) + "\n" for entry in entries))
    settings = ShapeSettings(path=path, speed=2)
    one, other = SHAPES["trace"](settings)
    assert (one.begins_s, other.begins_s) == (0.0, 2.0)
    first, second = (Prompts(settings).new_words(session, 0) for session in (one, other))
    assert (len(first), len(second)) == (1100, 1200)
    assert first[:1024] == second[:1024] and first[1024:] != second[1024:1100]


def test_agents_of_a_kind_have_the_same_instructions_and_pause_before_later_turns():
    settings = ShapeSettings(sessions=20, turns=3, kinds=2, input_length=10)
    sessions = list(SHAPES["agents"](settings))
    begun = {(session.kind, tuple(Prompts(settings).instructions(session))) for session in sessions}
    assert len(begun) == 2 and all(len(words) == 40 for _, words in begun)
    assert all(session.turns[0].pause_s == 0 < session.turns[1].pause_s for session in sessions)


def test_a_tools_result_answers_the_calls_that_were_made():
    [session] = drawn("agents", sessions=1, turns=2)
    history = History(Prompts(ShapeSettings()), session)
    history.ask(0)
    call = {"id": "call_1", "type": "function", "function": {"name": TOOLS[0]["function"]["name"], "arguments": "{}"}}
    history.answered("", [call])
    history.ask(1)
    assert [message["role"] for message in history.messages] == ["system", "user", "assistant", "tool"]
    assert history.messages[-1]["tool_call_id"] == "call_1"


def test_conversations_of_a_file_are_asked_as_they_are(tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    said = [{"from": "human", "value": "How old is the oak?"}, {"from": "gpt", "value": "Very old."}]
    path.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}]))
    [session] = drawn("sharegpt", path=path)
    history = History(Prompts(ShapeSettings()), session)
    history.ask(0)
    assert history.prompt == "How old is the oak?" == history.messages[-1]["content"]


@pytest.mark.parametrize(
    ("shape", "text", "said"),
    [
        ("trace", "no json", "line 1 of .* is not JSON"),
        ("trace", '{"timestamp": 0}', "line 1 of .* is no request of Mooncake's format"),
        ("sharegpt", "{}", "is no list of conversations"),
        ("sharegpt", "[", "is no JSON"),
    ],
)
def test_a_file_that_is_none_is_refused(shape: str, text: str, said: str, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InvalidSetting, match=said):
        drawn(shape, path=path)


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"speed": 0}, {"scale": -1.0}, {"range_ratio": 1.0}])
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any]):
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        ShapeSettings(**wrong)
