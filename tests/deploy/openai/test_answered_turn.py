"""An answer as it comes back with the next turn."""

from typing import Any

import pytest

from intarsia.deploy.front_end.front_end import Asked
from intarsia.deploy.openai.next_turn import AnsweredTurn
from intarsia.deploy.openai.tools import CallPiece
from intarsia.proto.leases import LeaseReceipt
from intarsia.proto.reply import Delta
from intarsia.proto.request import SamplingParams

ASKED = Asked([1, 2, 3], SamplingParams(), request_id="id")
USER = {"role": "user", "content": "hi"}
CALL = [CallPiece(0, "c1", "get", '{"city"'), CallPiece(0, "c1", None, ': "Oslo"}'), CallPiece(1, "c2", "put", "{}")]


def turn(*earlier: dict[str, Any], comes_back: bool = False) -> AnsweredTurn:
    return AnsweredTurn([USER, *earlier], ASKED, thoughts_come_back=comes_back)


def test_text_comes_back_as_it_was_told():
    answered = turn()
    answered.add(Delta((4, 5)), "", "a tr", [], None)
    answered.add(Delta((6,), lease=LeaseReceipt("lease-1")), "", "ee", [], "stop")
    whole = answered.whole()
    assert whole is not None
    assert whole.replies == ({"role": "assistant", "content": "a tree"},)
    assert whole.tokens == [1, 2, 3, 4, 5, 6] and whole.messages == [USER] and whole.request_id == "id"
    assert whole.lease == "lease-1"


def test_calls_come_back_with_their_ids_and_their_arguments_as_objects():
    answered = turn()
    answered.add(Delta((4,)), "", "", CALL, "tool_calls")
    whole = answered.whole()
    assert whole is not None
    [reply] = whole.replies
    assert reply["content"] == ""
    assert [(call["id"], call["function"]["arguments"]) for call in reply["tool_calls"]] == [
        ("c1", {"city": "Oslo"}),
        ("c2", {}),
    ]


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize(
    ("earlier", "ways"),
    [
        ((), None),
        (({"role": "assistant", "content": "a", "reasoning_content": "b"}, USER), [True]),
        (({"role": "assistant", "content": "a"}, USER), [False]),
    ],
    ids=["first answer", "sent before", "not sent before"],
)
def test_thoughts_come_back_as_earlier_ones_did(earlier: Any, ways: list[bool] | None, comes_back: bool):
    answered = turn(*earlier, comes_back=comes_back)
    answered.add(Delta((4,)), "because", "a tree", [], "stop")
    whole = answered.whole()
    assert whole is not None
    assert ["reasoning_content" in reply for reply in whole.replies] == (ways or [comes_back, not comes_back])


@pytest.mark.parametrize("end", ["length", None, "abort"])
def test_an_answer_that_did_not_end_of_itself_is_not_gone_on_from(end: str | None):
    answered = turn()
    answered.add(Delta((4,)), "", "a tr", [], end)
    assert answered.whole() is None
