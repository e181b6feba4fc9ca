"""The console in a real browser, on a real engine with a pool of 100,000 blocks."""

import asyncio
import io
import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console as Terminal

from intarsia.controller.launch import RunningEngine, start_engine
from intarsia.controller.request import SamplingParams
from intarsia.deploy.access import Access, AccessSettings, Level
from intarsia.deploy.console import ConsoleSettings
from intarsia.deploy.front_end import FrontEnd
from intarsia.deploy.http_server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings import engine_settings
from intarsia.deploy.tokenizer import Tokenizer
from intarsia.deploy.top import Server, facts, look, screen
from intarsia.errors import InvalidSetting, Unauthenticated
from intarsia.tests.conftest import Loop

BLOCKS = 100_000

KEY = "walnut"

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")


class Console(NamedTuple):
    url: str
    url_with_prompts: str
    engine: RunningEngine


@pytest.fixture(scope="module")
def console(ray_cluster: None, talker: Path, loop: Loop) -> Iterator[Console]:
    settings = engine_settings(str(talker), kv_cache_memory=4096 * (BLOCKS + 1), served_model_name="talker")
    engine = loop.run(start_engine(settings))
    assert engine.client.info.num_blocks == BLOCKS
    front_end = FrontEnd(engine.client, Tokenizer.load(talker))
    servers = []

    async def listen(settings: ConsoleSettings) -> str:
        servers.append(HttpServer(make_app(lambda: front_end, Access(AccessSettings(admin_key=(KEY,))), settings)))
        return await servers[-1].start(port=0)

    plain, telling = loop.run(listen(ConsoleSettings())), loop.run(listen(ConsoleSettings(show_prompts=True)))
    yield Console(plain, telling, engine)
    for server in servers:
        loop.run(server.stop())
    loop.run(engine.shutdown())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"],
        )


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test when its script does, or when it asks anybody but its server."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if "//127.0.0.1:" in request.url else wrong.append(request.url))
    yield page
    page.close()
    assert not wrong


@pytest.fixture
def streams(console: Console, loop: Loop) -> Iterator[list[asyncio.Future[None]]]:
    """Eight requests that go on until the test ends, some with a beginning in common."""

    async def follow(prompt: list[int]) -> None:
        sampling = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
        while True:
            async for _ in console.engine.client.generate(prompt, sampling):
                pass

    async def start() -> list[asyncio.Future[None]]:
        common = list(range(40, 88))
        return [asyncio.ensure_future(follow([*common[: 16 * (n % 4)], *[65 + n] * (10 + n)])) for n in range(8)]

    async def stop(tasks: list[asyncio.Future[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    tasks = loop.run(start())
    yield tasks
    loop.run(stop(tasks))


def shown(page: Page, url: str) -> Page:
    page.goto(f"{url}/console#key={KEY}")
    page.wait_for_selector("#pages")
    return page


# -- the door --------------------------------------------------------------------------------------------------------


@needs_browser
def test_without_the_key_nothing_is_shown_and_a_wrong_one_is_refused(console: Console, page: Page):
    page.goto(f"{console.url}/console")
    page.wait_for_selector("#door:visible")
    assert page.is_hidden("#all")
    page.fill("#given", "oak")
    page.click("#door button")
    page.wait_for_selector("#refused:has-text('not known')")
    page.fill("#given", KEY)
    page.click("#door button")
    page.wait_for_selector("#pages")
    assert page.inner_text("#model") == "talker"


@needs_browser
def test_the_key_leaves_the_address_at_once(console: Console, page: Page):
    shown(page, console.url)
    assert KEY not in page.url


@pytest.mark.parametrize("key", [None, "oak"])
def test_what_is_shown_is_answered_to_nobody_without_the_key(console: Console, key: str | None):
    request = urllib.request.Request(f"{console.url}/console/view")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 401


def test_a_console_without_any_admin_key_is_closed():
    with pytest.raises(Unauthenticated, match="the console is closed"):
        Access().check(Level.ADMIN, "Bearer oak")


def test_a_drawn_key_opens_and_a_given_one_is_not_replaced():
    access = Access()
    access.check(Level.ADMIN, f"Bearer {access.draw_admin_key()}")
    assert Access(AccessSettings(admin_key=("oak",))).draw_admin_key() is None


# -- what it shows ---------------------------------------------------------------------------------------------------


@needs_browser
def test_a_pool_of_100_000_blocks_with_none_held_is_readable(console: Console, page: Page, loop: Loop):
    loop.run(console.engine.reset_prefix_cache())
    shown(page, console.url)
    assert page.inner_text("#pages") == "pages: 0 held, 0 kept, 100,000 blank"
    assert page.inner_text("#requests") == "nothing runs, nothing waits"
    high = page.evaluate("document.querySelector('#pool').clientHeight")
    assert 100 < high <= 430  # a page of it, not a wall


@needs_browser
def test_map_equals_the_recount_of_the_same_instant(console: Console, page: Page, streams: list):
    shown(page, console.url)
    seen_held = 0
    for _ in range(5):
        page.evaluate("delete document.querySelector('#counted').dataset.counts")
        page.click("#recount")
        page.wait_for_selector("#counted[data-counts]")
        assert "agrees with this map" in page.inner_text("#counted"), page.inner_text("#counted")
        counts, recount = (
            json.loads(page.get_attribute("#counted", f"data-{name}") or "") for name in ("counts", "recount")
        )
        assert {name: counts[name] for name in ("held", "kept", "blank")} == {
            name: recount[name] for name in ("held", "kept", "blank")
        }
        assert [group["held"] for group in counts["groups"]] == recount["held_blocks"]
        assert recount["usable"] == BLOCKS
        seen_held = max(seen_held, recount["held"])
        page.wait_for_timeout(300)
    assert seen_held > 0


@needs_browser
def test_page_follows_the_engine(console: Console, page: Page, streams: list):
    shown(page, console.url)
    clocks = set()
    for _ in range(40):
        clocks.add(page.evaluate("document.documentElement.dataset.shown"))
        if len(clocks) == 4:
            break
        page.wait_for_timeout(500)
    assert len(clocks) == 4
    assert 6 <= page.locator("#requests tr").count() <= 9  # a head, and eight but for those that are just asked again
    assert page.locator("#workers tr").count() == 2
    assert "ms on the workers" in page.inner_text("#pace")
    assert re.search("running.*(nothing of it|all that) was known", page.inner_text("#requests"), re.DOTALL)


@needs_browser
@pytest.mark.parametrize("mode", ["group", "request", "tier"])
def test_map_is_drawn_in_the_colours_of_each_mode(console: Console, page: Page, streams: list, mode: str):
    shown(page, console.url)
    page.click(f"#modes >> text={mode}")
    page.wait_for_timeout(1500)
    colours = page.evaluate(
        """() => {
            const canvas = document.querySelector('#pool'), found = new Set();
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            for (let n = 0; n < data.length; n += 4) if (data[n + 3] === 255) found.add(data.slice(n, n + 3).join());
            return found.size;
        }"""
    )
    assert colours >= (4 if mode == "request" else 2)


@needs_browser
def test_nothing_is_wider_than_a_phone(console: Console, browser: Browser, streams: list):
    page = browser.new_page(viewport={"width": 360, "height": 740}, device_scale_factor=3)
    shown(page, console.url)
    page.wait_for_timeout(1500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.querySelector('#pool').clientHeight") <= 430
    page.close()


@needs_browser
def test_pointing_at_a_page_tells_whose_it_is(console: Console, page: Page, streams: list):
    shown(page, console.url)
    page.hover("#pool", position={"x": 1, "y": 1})
    assert page.inner_text("#tip").startswith("large page 1:")


@needs_browser
def test_text_is_shown_only_where_that_was_switched_on_and_never_as_markup(
    console: Console, page: Page, loop: Loop, talker: Path
):
    tokenizer = Tokenizer.load(talker)
    assert tokenizer is not None
    prompt = tokenizer.encode("<img src=x onerror=alert(1)> maple")

    async def ask() -> None:
        async for _ in console.engine.client.generate(prompt, SamplingParams(max_tokens=2)):
            pass

    loop.run(ask())
    shown(page, console.url)
    assert "maple" not in page.inner_text("#ended")
    shown(page, console.url_with_prompts)
    assert "<img src=x onerror=alert(1)> maple" in page.inner_text("#ended")
    assert page.locator("#ended img").count() == 0


# -- the same in a terminal ------------------------------------------------------------------------------------------


def test_top_shows_what_the_console_shows(console: Console, streams: list):
    before = look(Server(console.url, KEY))
    time.sleep(0.5)  # for a step between the two
    view = look(Server(console.url, KEY))
    assert view["pool"] is None
    states = [request["state"] for request in view["requests"]]
    assert 5 <= len(states) <= 8 and set(states) <= {"running", "waiting"}
    terminal = Terminal(width=100, record=True, file=io.StringIO())
    terminal.print(screen(view, before))
    text = terminal.export_text()
    for expected in ("talker", " running, ", "steps", "rank", "cpu"):
        assert expected in text
    told = facts(view, before)
    assert json.dumps(told) and "pool" not in told and told["rates"]["steps"] >= 0


def test_top_says_that_a_key_is_wanted(console: Console):
    with pytest.raises(Unauthenticated, match="admin key"):
        look(Server(console.url, "oak"))


def test_top_refuses_what_is_no_server():
    with pytest.raises(InvalidSetting, match="no URL"):
        look(Server("file:///etc"))
