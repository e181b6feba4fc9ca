"""Blocks of content, out of parts of an answer as they come."""

import json
import random
from typing import Any

import pytest

from intarsia.deploy.anthropic.blocks import Blocks, stop_reason
from intarsia.deploy.openai.conversation import AnswerPart
from intarsia.deploy.openai.tools import CallPiece
from intarsia.proto.reply import Delta

ORDER = [
    CallPiece(0, "call_1", "order", '{"wood":'),
    CallPiece(0, "call_1", None, '"oak"}'),
    CallPiece(1, "call_2", "plane", "{}"),
]
WHOLE = (
    AnswerPart(Delta(()), "", [], thoughts="Which wood? "),
    AnswerPart(Delta(()), "", [], thoughts="Oak."),
    AnswerPart(Delta(()), "I order ", []),
    AnswerPart(Delta(()), "oak.", [ORDER[0]], has_called=True),
    AnswerPart(Delta(()), "", [ORDER[1]], has_called=True),
    AnswerPart(Delta((1,), finish_reason="stop"), "", [ORDER[2]], has_called=True),
)


def events_of(blocks: Blocks, parts: tuple[AnswerPart, ...]) -> list[dict[str, Any]]:
    return [event for part in parts for event in blocks.add(part)] + list(blocks.end())


def told_by(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of events."""
    found: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        assert event["index"] == len(found) - (event["type"] != "content_block_start")
        match event:
            case {"type": "content_block_start", "content_block": block}:
                found.append(dict(block))
                arguments = ""
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": piece}}:
                arguments += piece
            case {"type": "content_block_delta", "delta": delta}:
                kind = delta["type"].removesuffix("_delta")
                found[-1][kind] += delta[kind]
            case {"type": "content_block_stop"} if found[-1]["type"] == "tool_use":
                found[-1]["input"] = json.loads(arguments or "{}")
    return found


def test_thoughts_words_and_calls_are_blocks_in_their_order():
    blocks = Blocks()
    events = events_of(blocks, WHOLE)
    kinds = [block.type for block in blocks.done]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [event["type"] for event in events].count("content_block_stop") == 4
    thought, said, first, second = (block.model_dump(exclude_none=True) for block in blocks.done)
    assert thought["thinking"] == "Which wood? Oak." and len(thought["signature"]) == 32
    assert said == {"type": "text", "text": "I order oak."}
    assert first == {"type": "tool_use", "id": "toolu_1", "name": "order", "input": {"wood": "oak"}}
    assert second["input"] == {} and second["name"] == "plane"


def test_events_tell_what_the_whole_answer_tells_however_it_is_cut():
    rng = random.Random(seed := 5)
    print("seed", seed)
    for _ in range(50):
        blocks, parts = Blocks(), list[AnswerPart]()
        for part in WHOLE:
            size = rng.randint(1, 6)
            parts += [AnswerPart(Delta(()), "", [], thoughts=part.thoughts[n : n + size]) for n in range(0, 20, size)]
            parts += [AnswerPart(Delta(()), part.text[n : n + size], []) for n in range(0, 20, size)]
            parts.append(AnswerPart(Delta(()), "", part.calls))
        told = told_by(events_of(blocks, tuple(parts)))
        assert told == [block.model_dump() for block in blocks.done]
        assert len(told) == 4


def test_thoughts_that_are_not_wanted_are_an_empty_block():
    blocks = Blocks(shows_thoughts=False)
    events = events_of(blocks, WHOLE)
    [thought] = [block for block in blocks.done if block.type == "thinking"]
    assert (thought.thinking, len(thought.signature)) == ("", 32)
    assert not [event for event in events if event.get("delta", {}).get("type") == "thinking_delta"]


def test_an_id_of_the_models_own_is_kept():
    blocks = Blocks()
    events_of(blocks, (AnswerPart(Delta(()), "", [CallPiece(0, "functions.order:0", "order", "{}")]),))
    assert [block.id for block in blocks.done if block.type == "tool_use"] == ["functions.order:0"]


def test_nothing_said_is_no_block():
    blocks = Blocks()
    assert events_of(blocks, (AnswerPart(Delta((1,), finish_reason="stop"), "", []),)) == []
    assert blocks.done == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"wood":"oa', {"wood": "oa"}),
        ('{"wood":"oak","n":1', {"wood": "oak", "n": 1}),
        ("", {}),
        ("no", {}),
        ("[1]", {}),
    ],
)
def test_a_call_that_is_cut_has_the_arguments_that_came(arguments: str, told: dict[str, Any]):
    blocks = Blocks()
    events_of(blocks, (AnswerPart(Delta(()), "", [CallPiece(0, "call_1", "order", arguments)]),))
    [call] = blocks.done
    assert call.type == "tool_use" and call.input == told


@pytest.mark.parametrize(
    ("delta", "has_called", "told"),
    [
        (Delta((), finish_reason="length"), False, ("max_tokens", None)),
        (Delta((), finish_reason="length"), True, ("max_tokens", None)),
        (Delta((), finish_reason="stop"), False, ("end_turn", None)),
        (Delta((), finish_reason="stop"), True, ("tool_use", None)),
        (Delta((), finish_reason="stop", stop="END"), False, ("stop_sequence", "END")),
    ],
)
def test_how_an_answer_ended_is_told_in_anthropics_words(delta: Delta, has_called: bool, told: tuple[str, str | None]):
    assert stop_reason(AnswerPart(delta, "", [], has_called=has_called)) == told
