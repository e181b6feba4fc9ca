"""What a line asks, and what a result says."""

import json

import pytest

from intarsia.deploy.batch.lines import Line, Refused, read_line, refusal, result

BODY = {"prompt": "oak", "max_tokens": 3}


def line(**changes: object) -> str:
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY} | changes
    return json.dumps({name: value for name, value in asked.items() if value is not None})


def test_a_line_is_read():
    read = read_line(line(), 1)
    assert isinstance(read, Line)
    assert (read.custom_id, read.url, read.body) == ("a", "/v1/completions", BODY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 7: this is no JSON"),
        ("[]", "must be a JSON object"),
        (line(custom_id=None), "custom_id must be a text"),
        (line(custom_id=3), "custom_id must be a text"),
        (line(method="GET"), "method must be POST, got 'GET'"),
        (line(url="/v1/embeddings"), "url must be one of /v1/completions"),
        (line(body=None), "body must be a JSON object"),
        (line(body=[1]), "body must be a JSON object"),
        (line(body={"stream": True}), "stream has no place in a batch"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(text: str, message: str):
    refused = read_line(text, 7)
    assert isinstance(refused, Refused)
    told = json.loads(refusal(refused))
    assert message in told["error"]["message"] and told["response"] is None


def test_ids_are_those_of_the_line_and_its_place():
    first, again, elsewhere, other = (
        read_line(text, number).request_id
        for text, number in ((line(), 1), (line(), 1), (line(), 2), (line(custom_id="b"), 1))
    )
    assert first == again and len({first, elsewhere, other}) == 3


def test_a_result_leaves_out_what_differs_from_run_to_run():
    asked = read_line(line(), 1)
    assert isinstance(asked, Line)
    drawn = [
        {
            "created": seconds,
            "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}},
            "choices": [
                {"tool_calls": [{"id": f"call_{digit * 24}"}, {"id": f"call_{digit * 23}0"}]},
                f"call_{digit * 24}",
            ],
        }
        for seconds, cached, digit in ((1, 0, "1"), (2, 16, "2"))
    ]  # fmt: skip
    first, second = (result(asked, 200, body) for body in drawn)
    assert first == second
    body = json.loads(first)["response"]["body"]
    calls, same = body["choices"]
    ids = [call["id"] for call in calls["tool_calls"]]
    assert ids[0] == same != ids[1] and all(len(each) == 29 for each in ids)
    assert body["usage"] == {"prompt_tokens": 3}


def test_an_error_keeps_its_status_and_its_words():
    asked = read_line(line(), 1)
    assert isinstance(asked, Line)
    told = json.loads(result(asked, 404, {"error": {"message": "no such model"}}))
    assert told["response"]["status_code"] == 404 and told["error"] is None
    assert told["response"]["body"]["error"]["message"] == "no such model"
