"""Pages in browsers that ask: of the origins that the server was told, and of no others."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.proto.reply import Delta
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.scripted import ScriptedEngine

OURS, OTHER = "https://app.example", "https://other.example"
KEY = "walnut"


@pytest.fixture
def at(loop: Loop) -> Iterator[Callable[..., str]]:
    """Starts a server that wants a key and allows pages of these origins."""
    servers = []

    def begin(*origins: str) -> str:
        async def listen() -> str:
            engine: Any = ScriptedEngine([Delta((7,), None, "length", 0)])
            front_end, access = FrontEnd(engine, None), Access(AccessSettings(api_key=(KEY,)))
            servers.append(HttpServer(make_app(lambda: front_end, access, allowed_origins=origins), access))
            return await servers[-1].start(port=0)

        return loop.run(listen())

    yield begin
    for server in servers:
        loop.run(server.stop())


def preflight(url: str, origin: str) -> httpx.Response:
    """What a browser asks before a page's script may."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return httpx.options(f"{url}/v1/completions", headers={"Origin": origin} | asked)


def ask(url: str, origin: str, key: str = KEY) -> httpx.Response:
    headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers=headers)


@pytest.mark.parametrize("origins", [(OURS,), ("https://first.example", OURS), ("*",)])
def test_a_page_of_an_allowed_origin_may_ask_and_read_its_answer(at: Callable[..., str], origins: tuple[str, ...]):
    url = at(*origins)
    told = preflight(url, OURS)
    assert told.status_code == 200 and "POST" in told.headers["Access-Control-Allow-Methods"]
    assert told.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    for answer in (told, ask(url, OURS)):
        assert answer.headers["Access-Control-Allow-Origin"] in (OURS, "*")
    assert ask(url, OURS).status_code == 200
    assert "X-Request-Id" in ask(url, OURS).headers["Access-Control-Expose-Headers"]
    refused = ask(url, OURS, "oak")  # which the page is to understand
    assert refused.status_code == 401 and refused.headers["Access-Control-Allow-Origin"] in (OURS, "*")


def test_pages_of_other_origins_may_not_ask(at: Callable[..., str]):
    url = at(OURS)
    for answer in (preflight(url, OTHER), ask(url, OTHER)):
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_no_page_may_ask_where_no_origin_was_given(at: Callable[..., str]):
    url = at()
    assert preflight(url, OURS).status_code in (401, 405)
    for answer in (preflight(url, OURS), ask(url, OURS)):
        assert not any(name.startswith("access-control") for name in answer.headers)
