"""`intarsia chat`, in front of a real HTTP server that plays a script."""

import re
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.tools.chat import ChatServer, Conversation, Terminal
from intarsia.errors import EngineUnavailable, InvalidSetting, Unauthenticated
from intarsia.proto.reply import Delta
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.scripted import ScriptedEngine


@pytest.fixture
def at(loop: Loop, talker: Any) -> Iterator[Callable[..., tuple[ScriptedEngine, str]]]:
    servers: list[HttpServer] = []

    def start(*texts: str, key: str | None = None) -> tuple[ScriptedEngine, str]:
        tokenizer = Tokenizer.load(talker)
        assert tokenizer is not None
        ids = [tuple(tokenizer.encode(text)) for text in texts]
        script = [Delta(each, None, "stop" if n == len(ids) else None, 2) for n, each in enumerate(ids, start=1)]
        engine: Any = ScriptedEngine(script)
        access = Access(AccessSettings(api_key=(key,) if key else ()))

        async def listen() -> str:
            front_end = FrontEnd(engine, tokenizer)
            server = HttpServer(make_app(lambda: front_end, access), access)
            servers.append(server)
            return await server.start(port=0)

        return engine, loop.run(listen())

    yield start
    for server in servers:
        loop.run(server.stop())


def typed(url: str, *lines: str, key: str | None = None, system: str | None = None) -> str:
    """What is shown after these lines."""
    shown, left = StringIO(), iter(lines)

    def read(_: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    Terminal(ChatServer(url, key), system, Console(file=shown, width=200, highlight=False)).talk(read)
    return shown.getvalue()


def test_an_answer_is_shown_with_what_the_cache_found(at: Callable):
    _, url = at("The wood ", "is oak.")
    shown = typed(url, "Which wood?", "/quit")
    assert "The wood is oak.\n" in shown
    assert re.search(r"\n2 of \d+ prompt tokens cached; first after [\d.]+ m?s, all 16 after [\d.]+ m?s\n", shown)


def test_the_model_is_told_the_history_until_reset(at: Callable, talker: Any):
    tokenizer = Tokenizer.load(talker)
    assert tokenizer is not None
    engine, url = at("Oak.")
    typed(url, "Which?", "And?", "/system Be brief.", "/reset", "Now?", system="Be long.")
    asked = [tokenizer.decode(prompt) for prompt, *_ in engine.asked]
    assert asked == [
        "system: Be long.\nuser: Which?\nassistant: ",
        "system: Be long.\nuser: Which?\nassistant: Oak.\nuser: And?\nassistant: ",
        "system: Be brief.\nuser: Now?\nassistant: ",
    ]


def test_ctrl_c_at_the_prompt_does_not_end_the_program_and_unknown_commands_are_told(at: Callable):
    _, url = at("Oak.")
    shown = typed(url, "^C", "/what", "/help", "", "Which?")
    assert "/quit ends" in shown and "/what is not known" in shown and "/reset" in shown and "Oak." in shown


def test_ctrl_c_stops_the_answer_and_not_the_program_and_what_came_is_remembered(at: Callable):
    engine, url = at("Oak.")
    shown = StringIO()
    console = Console(file=shown, width=200, highlight=False)
    lines = iter(["Which?", "Why?", "/quit"])
    terminal = Terminal(ChatServer(url), None, console)
    plain, pieces = console.out, []

    def out(text: str, **settings: Any) -> None:
        plain(text, **settings)
        pieces.append(text)
        if len(pieces) == 1:
            raise KeyboardInterrupt

    console.out = out  # type: ignore[method-assign]
    terminal.talk(lambda _: next(lines))
    assert "stopped" in shown.getvalue()
    assert len(engine.asked) == 2 and len(engine.asked[1][0]) > len(engine.asked[0][0]) + len("Oak.")


def test_a_server_that_wants_a_key_says_so_and_takes_it(at: Callable):
    _, url = at("Oak.", key="open-sesame-open-sesame")
    with pytest.raises(Unauthenticated, match="wants a key: --api-key KEY"):
        typed(url)
    assert "Oak." in typed(url, "Which?", key="open-sesame-open-sesame")


def test_no_server_and_no_url_are_told():
    with pytest.raises(EngineUnavailable, match="cannot be asked"):
        typed("http://127.0.0.1:1")
    with pytest.raises(InvalidSetting, match="is no URL of a server"):
        typed("127.0.0.1:1")


def test_a_question_without_an_answer_is_not_remembered():
    conversation = Conversation()
    conversation.asked("one")
    assert conversation.asked("two") == [{"role": "user", "content": "two"}]
