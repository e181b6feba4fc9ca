"""The next turn finds all of its history, through whichever interface, although the template rewrites answers."""

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.front_end.front_end import FrontEnd, FrontEndSettings
from intarsia.deploy.front_end.request_log import RequestLog
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.openai.conftest import Api

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] | upper }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Leaves thoughts out and writes the rest anew."""

ANSWER = {"structured_outputs": {"regex": "<think>[a-z]{40}</think>[a-z]{20}"}, "temperature": 1, "seed": 7}


def form(tree: str) -> dict[str, Any]:
    """Of an answer that says this tree."""
    said = {"tree": {"enum": [f"an oak</think>{tree}"]}}
    schema = {"type": "object", "properties": said, "required": ["tree"], "additionalProperties": False}
    return {"type": "json_schema", "schema": schema}


FIRST, SECOND = "what is an oak, in a few words?", "and a birch?"


class Served(NamedTuple):
    url: str
    front_end: FrontEnd
    tokenizer: Tokenizer
    log: io.StringIO
    loop: Loop

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Whatever is prepared behind it is there when this returns."""
        asked = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        assert asked.status_code == 200, asked.text
        assert self.front_end.next_turns is not None
        self.loop.run(self.front_end.next_turns.idle())
        return asked.json()

    def known(self, answer: str) -> int:
        """Tokens of the next turn before its own words."""
        return len(f"user: {FIRST.upper()}\nassistant: {answer.split('</think>')[-1].upper()}\nuser: ".encode())


@pytest.fixture(scope="module")
def served(api: Api, loop: Loop, talker: Path) -> Iterator[Served]:
    tokenizer = Tokenizer.load(talker)
    assert tokenizer is not None
    tokenizer._fast.chat_template = TEMPLATE
    output = io.StringIO()
    log = RequestLog("json", output)

    async def listen() -> tuple[FrontEnd, HttpServer, str]:
        front_end = FrontEnd(api.engine.client, tokenizer, FrontEndSettings(prepare_next_turns=True))
        server = HttpServer(make_app(lambda: front_end, request_log=log, interfaces=(add_messages,)))
        return front_end, server, await server.start(port=0)

    front_end, server, url = loop.run(listen())
    yield Served(url, front_end, tokenizer, output, loop)
    loop.run(server.stop())
    log.close()


@pytest.mark.parametrize("streams", [False, True])
def test_chat_finds_its_rewritten_history(served: Served, streams: bool):
    messages = [{"role": "user", "content": FIRST}]
    asked = {"model": "talker", "messages": messages, **ANSWER, "seed": 8 + streams}
    if streams:
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=asked | {"stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        answer = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert served.front_end.next_turns is not None
        served.loop.run(served.front_end.next_turns.idle())
    else:
        answer = served.ask("/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    assert answer.startswith("<think>")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": SECOND}]
    usage = served.ask("/v1/chat/completions", {"model": "talker", "messages": messages, "max_tokens": 1})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == served.known(answer)
    assert usage["prompt_tokens"] - served.known(answer) == len(f"{SECOND}\nassistant: ")


def test_responses_find_their_rewritten_history(served: Served):
    asked = {"model": "talker", "input": FIRST, "max_output_tokens": 200, "store": False}
    response = served.ask("/v1/responses", asked | {"text": {"format": form("a birch") | {"name": "tree"}}})
    assert response["status"] == "completed"
    answer = response["output"][-1]["content"][0]["text"]
    following = [{"role": "user", "content": FIRST}, *response["output"], {"role": "user", "content": SECOND}]
    usage = served.ask("/v1/responses", asked | {"input": following, "max_output_tokens": 1})["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == served.known(answer)


def test_messages_find_their_rewritten_history(served: Served):
    messages: list[dict[str, Any]] = [{"role": "user", "content": FIRST}]
    asked = {"model": "talker", "max_tokens": 200}
    message = served.ask("/v1/messages", asked | {"messages": messages, "output_config": {"format": form("an elm")}})
    assert message["stop_reason"] == "end_turn"
    messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": SECOND}]
    usage = served.ask("/v1/messages", asked | {"messages": messages, "max_tokens": 1})["usage"]
    assert usage["cache_read_input_tokens"] == served.known(message["content"][0]["text"])


@pytest.mark.parametrize(
    "about",
    [{"n": 2}, {"max_tokens": 5}, {"add_generation_prompt": False}, {"truncate_prompt_tokens": 20}],
    ids=["several answers", "a cut one", "no new turn", "a cut prompt"],
)
def test_what_is_hardly_gone_on_from_is_not_prepared(served: Served, about: dict[str, Any]):
    assert served.front_end.next_turns is not None
    messages = [{"role": "user", "content": f"{FIRST} {about}"}]
    before = served.log.getvalue().count('"prepare"')
    served.ask("/v1/chat/completions", {"model": "talker", "messages": messages, **ANSWER, **about})
    assert served.log.getvalue().count('"prepare"') == before


def test_the_log_tells_what_was_prepared(served: Served):
    messages = [{"role": "user", "content": FIRST}]
    answer = served.ask("/v1/chat/completions", {"messages": messages, **ANSWER, "seed": 99})
    text = answer["choices"][0]["message"]["content"]
    lines = []
    for _ in range(100):
        lines = [json.loads(line) for line in served.log.getvalue().splitlines()]
        if lines and lines[-1]["endpoint"] == "prepare":
            break
        served.loop.run(_a_moment())
    last = lines[-1]
    assert last["end"] == "computed" and last["tokens_in"] == served.known(text)
    assert last["tokens_found"] + last["tokens_computed"] == last["tokens_in"]
    assert last["id"] in answer["id"]


def test_metrics_tell_what_was_prepared(served: Served):
    text = httpx.get(f"{served.url}/metrics").text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("intarsia:prepared"))
    by_end = {name.partition('end="')[2].partition('"')[0]: float(count) for name, count in counts.items()}
    assert by_end["computed"] > 0 and by_end["refused"] == 0
    assert float(next(count for name, count in counts.items() if "prepared_tokens_total" in name)) > 0


async def _a_moment() -> None:
    await asyncio.sleep(0.05)


def test_without_the_setting_there_is_nothing_of_it(api: Api):
    assert api.front_end.next_turns is None
