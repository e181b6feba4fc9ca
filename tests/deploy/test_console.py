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
from typing import Any, NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console as Terminal

from intarsia.deploy.console import ConsoleSettings
from intarsia.deploy.front_end.access import Access, AccessSettings, Level
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.deploy.start.local_servers import announced
from intarsia.deploy.tools.top import Server, facts, fetch_snapshot, gone, screen, server_line
from intarsia.errors import EngineUnavailable, InvalidSetting, Unauthenticated
from intarsia.proto.request import SamplingParams
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
def test_what_is_shown_is_not_answered_without_the_key(console: Console, key: str | None):
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
    assert (
        6 <= page.locator("#requests tr:not(.more)").count() <= 9
    )  # a head, and eight but for those that are just asked again
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
@pytest.mark.parametrize("width", [390, 340])
def test_on_a_phone_no_column_is_cut_and_why_stands_below_its_request(
    console: Console, browser: Browser, streams: list, width: int
):
    page = browser.new_page(viewport={"width": width, "height": 844})
    shown(page, console.url)
    page.wait_for_selector("#requests tr.more:visible")
    wide, room = page.evaluate("(box => [box.scrollWidth, box.clientWidth])(document.querySelector('.scroll'))")
    assert wide <= room
    assert re.search("known|looked up", page.locator("#requests tr.more").first.inner_text())
    page.close()


@needs_browser
@pytest.mark.parametrize("width", [1440, 1000, 700, 390])
def test_the_rows_of_figures_are_full(console: Console, browser: Browser, width: int):
    page = browser.new_page(viewport={"width": width, "height": 844})
    shown(page, console.url)
    tops = page.evaluate("[...document.querySelectorAll('#numbers > div')].map(box => box.offsetTop)")
    assert len({tops.count(top) for top in tops}) == 1, tops
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


@needs_browser
def test_a_long_text_takes_two_lines_until_all_of_it_is_asked_for(console: Console, page: Page, loop: Loop):
    async def ask() -> None:
        async for _ in console.engine.client.generate([70 + n % 20 for n in range(400)], SamplingParams(max_tokens=2)):
            pass

    loop.run(ask())
    shown(page, console.url_with_prompts)
    page.set_viewport_size({"width": 390, "height": 844})
    text = page.locator("#ended .said.long").first
    folded = text.bounding_box()
    text.press("Enter")
    opened = text.bounding_box()
    assert folded and opened and folded["height"] < 50 < 2 * folded["height"] < opened["height"]
    clock = page.evaluate("document.documentElement.dataset.shown")
    page.wait_for_selector(f"html:not([data-shown='{clock}'])")  # the table is made anew
    assert (
        text.get_attribute("aria-expanded") == "true"
        and page.evaluate("document.activeElement.className") == "said long"
    )


@needs_browser
def test_a_server_that_is_gone_is_told_with_the_time_and_dims_the_figures_until_it_is_back(
    console: Console, page: Page
):
    shown(page, console.url)
    page.route("**/console/view*", lambda route: route.abort())
    page.wait_for_selector("#status:has-text('no answer since')")
    assert re.match(r"no answer since \d\d:\d\d:\d\d, \d+ s ago", page.inner_text("#status"))
    assert "Failed to fetch" not in page.inner_text("body") and page.locator("#all.gone").count() == 1
    page.unroute("**/console/view*")
    page.wait_for_selector("#all:not(.gone)", state="attached")
    assert page.inner_text("#status") == ""


@needs_browser
def test_tokens_in_and_out_are_told_apart(console: Console, page: Page):
    shown(page, console.url)
    assert "tokens in/s" in page.inner_text("#numbers") and "tokens out/s" in page.inner_text("#numbers")


@needs_browser
def test_how_long_requests_wait_is_told_with_the_slow_end(console: Console, page: Page, streams: list):
    shown(page, console.url)
    page.wait_for_function("/first token, p95 [\\d.]+ m?s/.test(document.querySelector('#numbers').innerText)")
    text = page.inner_text("#numbers")
    assert re.search(r"next token, p95 [\d.]+ m?s", text) and re.search(r"queue, p95 [\d.]+ m?s", text)


@needs_browser
def test_worth_of_other_sizes_of_the_memory_is_told(console: Console, page: Page, loop: Loop):
    async def ask(token: int) -> None:
        async for _ in console.engine.client.generate([token] * 64, SamplingParams(max_tokens=2)):
            pass

    for token in range(5, 55):  # in so large a pool one conversation in several is followed
        loop.run(ask(token))
    shown(page, console.url)
    page.wait_for_selector("#worth:has-text('of prompts found')")
    told = page.locator("#worth").inner_text()
    assert re.match(
        r"device memory: × 0.5 [\d.]+ %, as it is [\d.]+ %, × 2 [\d.]+ %, × 4 [\d.]+ % of prompts found", told
    )
    view = fetch_snapshot(Server(console.url, KEY))
    terminal = Terminal(width=80, record=True, file=io.StringIO())
    terminal.print(screen(view, view))
    assert re.search(r"of prompts found, by device memory: 0.5x [\d.]+%  1x [\d.]+%  2x ", terminal.export_text())


@needs_browser
def test_a_words_question_mark_leads_to_its_explanation(console: Console, page: Page):
    shown(page, console.url)
    marks = page.locator("button.what")
    assert marks.count() >= 7
    for n in range(marks.count()):
        marks.nth(n).click()
        word = re.findall("“(.*)”", marks.nth(n).get_attribute("aria-label") or "")[0]
        assert page.evaluate("document.activeElement.textContent") == word
        assert page.evaluate("document.activeElement.nextElementSibling.textContent.length") > 20


@needs_browser
def test_paused_page_stands_still_and_says_since_when(console: Console, page: Page, streams: list):
    shown(page, console.url)
    page.click("#pause")
    assert re.match(r"as it was at \d\d:\d\d:\d\d", page.inner_text("#status"))
    page.wait_for_timeout(1500)  # what was asked before it comes still
    before = page.evaluate("document.documentElement.dataset.shown")
    page.wait_for_timeout(2500)
    assert page.evaluate("document.documentElement.dataset.shown") == before
    page.click("#pause")
    page.wait_for_selector(f"html:not([data-shown='{before}'])")
    assert page.inner_text("#status") == ""


@needs_browser
def test_a_square_and_its_requests_row_are_chosen_together_by_keyboard(console: Console, page: Page, streams: list):
    shown(page, console.url)
    page.wait_for_selector("#requests tr[data-id]")
    page.click("#pause")
    page.focus("#pool")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "End", "Home"):
        page.keyboard.press(key)
    assert page.inner_text("#said").startswith("large page 1")
    page.evaluate("cursor = places.pages.findIndex(([a, n]) => holdersOf(a, n).size) / places.together | 0")
    page.keyboard.press("Enter")
    chosen = page.get_attribute("#requests tr.chosen", "data-id")
    assert chosen and page.evaluate("chosen") == int(chosen)
    page.keyboard.press("Escape")
    assert page.locator("#requests tr.chosen").count() == 0
    holders = page.evaluate("[...new Set(places.pages.flatMap(([a, n]) => [...holdersOf(a, n)]))]")
    row = page.locator(f"#requests tr[data-id='{holders[-1]}']")  # one that has just come holds no page yet
    row.focus()
    before = page.evaluate("document.querySelector('#pool').toDataURL()")
    page.keyboard.press("Enter")
    assert page.get_attribute("#requests tr.chosen", "data-id") == row.get_attribute("data-id")
    assert page.evaluate("document.querySelector('#pool').toDataURL()") != before


@needs_browser
def test_rows_stand_in_the_order_of_arrival(console: Console, page: Page, streams: list):
    shown(page, console.url)
    page.wait_for_function("document.querySelectorAll('#requests tr[data-id]').length > 4")
    ages = page.evaluate(
        "[...document.querySelectorAll('#requests tr[data-id]')]"
        ".map(row => seen.requests.find(each => each.id == row.dataset.id).age_s)"
    )
    assert ages == sorted(ages, reverse=True)


@needs_browser
def test_every_part_is_reached_by_the_tab_key(console: Console, page: Page, streams: list):
    shown(page, console.url)
    page.wait_for_selector("#requests tr[data-id]")
    page.click("#pause")
    page.wait_for_timeout(1500)  # what was asked before it comes still
    wanted = page.evaluate("""() => {
      const found = [...document.querySelectorAll("button, select, input, summary, [tabindex='0']")];
      found.filter(each => each.checkVisibility()).forEach((each, n) => { each.dataset.stop = n; });
      return found.filter(each => each.dataset.stop).length;
    }""")
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(2 * wanted):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.stop"))
    assert len(reached - {None}) == wanted > 15


SLOW = pytest.mark.slow


@needs_browser
@pytest.mark.parametrize(
    ("scheme", "width"),
    [("light", 1440), ("dark", 390), pytest.param("dark", 1440, marks=SLOW), pytest.param("light", 390, marks=SLOW)],
)
def test_axe_finds_nothing(console: Console, browser: Browser, streams: list, scheme: Any, width: int):
    look = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "bypass_csp": True}
    door, page = browser.new_page(**look), browser.new_page(**look)
    door.goto(f"{console.url}/console")
    shut = Axe().run(door)
    door.close()
    shown(page, console.url)
    page.wait_for_selector("#requests tr[data-id]")
    page.click("#words summary")
    page.click("#pause")
    found = Axe().run(page)
    page.close()
    assert not shut.violations_count, shut.generate_report()
    assert not found.violations_count, found.generate_report()


@needs_browser
def test_private_words_are_explained_by_keyboard(console: Console, page: Page):
    shown(page, console.url)
    page.focus("#words summary")
    page.keyboard.press("Enter")
    said = page.inner_text("#words dl")
    for word in ("large page", "kept", "tier", "packed", "all that was known", "blocks by group"):
        assert word in said


# -- the same in a terminal ------------------------------------------------------------------------------------------


def test_top_shows_what_the_console_shows(console: Console, streams: list):
    before = fetch_snapshot(Server(console.url, KEY))
    time.sleep(0.5)  # for a step between the two
    view = fetch_snapshot(Server(console.url, KEY))
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


def test_top_fits_80_columns_and_says_since_when_a_server_is_gone(console: Console, streams: list):
    before = fetch_snapshot(Server(console.url, KEY))
    time.sleep(0.5)
    view = fetch_snapshot(Server(console.url, KEY))
    terminal = Terminal(width=80, record=True, file=io.StringIO())
    terminal.print(screen(view, before))
    lines = terminal.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    head = next(n for n, line in enumerate(lines) if re.match("last minute +first token +next token +queue", line))
    for line, word in zip(lines[head + 1 : head + 3], ("median", "p95"), strict=True):
        assert re.match(rf"{word}( +[\d.]+ m?s){{3}}", line)
    assert [line for line in lines if line.startswith("steps") and line.rstrip().endswith("ms")]
    told_gone = gone(EngineUnavailable("no engine answers"), time.time() - 7).plain
    assert re.match(r"no answer since \d\d:\d\d:\d\d, 7 s ago; asking again each second", told_gone)


def test_top_says_that_a_key_is_wanted(console: Console):
    with pytest.raises(Unauthenticated, match="admin key"):
        fetch_snapshot(Server(console.url, "oak"))


def test_top_refuses_what_is_no_server():
    with pytest.raises(InvalidSetting, match="no URL"):
        fetch_snapshot(Server("file:///etc"))


def test_top_says_which_server_it_watches_and_how_to_choose_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with announced("http://127.0.0.1:8001", None):
        assert server_line(Server("http://127.0.0.1:8001")).plain == "http://127.0.0.1:8001"
        assert "top --url http://127.0.0.1:8001" in server_line(Server("http://127.0.0.1:8002")).plain
