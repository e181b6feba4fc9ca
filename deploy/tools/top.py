"""`intarsia top`: what the console shows, in a terminal."""

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from ...errors import EngineUnavailable, InvalidSetting, Unauthenticated
from ..console import VIEW_PATH
from ..start.local_servers import not_asked, running
from ..terminal.banner import human_bytes, human_seconds

LOOPBACK, ANY_HOST = {"127.0.0.1", "::1", "localhost"}, {"0.0.0.0", "::"}

EVERY_S = 1.0

ANSWER_WITHIN_S = 10.0

MOST_REQUESTS = 15

STEPS_DRAWN = 54
"""A line has 80 columns, and words beside them."""

LEASE_ENDS = ("granted", "refused", "taken_over", "expired", "released", "lost")
"""Of `LeaseCounts`."""

BARS = " ▁▂▃▄▅▆▇█"


class Server(NamedTuple):
    """Whom to ask."""

    url: str
    admin_key: str | None = None
    ca_certs: str | None = None


def run(url: str | None, admin_key: str | None, ca_certs: str | None, *, once: bool, as_json: bool) -> None:
    """Raises `InvalidSetting` for settings that do not fit together, or where no server is found."""
    if as_json and not once:
        raise InvalidSetting("--json is for --once", field="json")
    server = find_server(url, admin_key, ca_certs)
    if once:
        show_once(server, as_json=as_json)
    else:
        show(server)


def find_server(url: str | None, admin_key: str | None, ca_certs: str | None) -> Server:
    """The server at `url`, or the one that this user started last on this machine.

    Raises `InvalidSetting` when there is none.
    """
    if url is not None:
        url = url.rstrip("/")
        same = next((each for each in running() if _is_same(each.url, url)), None)
        if same is None:
            return Server(url, admin_key, ca_certs)
        port = "" if _port_of(url) else f":{_port_of(same.url)}"
        return Server(f"{url}{port}", admin_key or same.admin_key, ca_certs)
    latest = next(iter(running()), None)
    if latest is None:
        raise InvalidSetting("no server of yours runs on this machine; say where one is: --url URL", field="url")
    return Server(latest.url, admin_key or latest.admin_key, ca_certs)


def _is_same(listens: str, url: str) -> bool:
    """Whether a server of this machine that listens so is asked at `url`, which may leave the port out. A key of ours
    goes to this machine only."""
    there, asked = urllib.parse.urlsplit(listens), urllib.parse.urlsplit(url)
    is_here = there.hostname in LOOPBACK | ANY_HOST and asked.hostname in LOOPBACK and not asked.path
    is_port = _port_of(url) in (None, _port_of(listens))
    return listens == url or (is_here and is_port and there.scheme == asked.scheme)


def _port_of(url: str) -> int | None:
    try:
        return urllib.parse.urlsplit(url).port
    except ValueError:
        return 0  # no server has it


def fetch_snapshot(server: Server, since_step: int = 0) -> dict[str, Any]:
    """What the server shows. Raises `Unauthenticated` or `EngineUnavailable`."""
    url = f"{server.url}{VIEW_PATH}?pool=0&since={since_step}"
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise InvalidSetting(f"{server.url!r} is no URL of a server: http://HOST:PORT", field="url", asked=server.url)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {server.admin_key or ''}"})
    context = ssl.create_default_context(cafile=server.ca_certs) if url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S, context=context) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")
        if error.code == 401:
            raise Unauthenticated(f"{server.url} wants its admin key: --admin-key KEY", field="admin_key") from None
        raise EngineUnavailable(f"{server.url} answers {error.code}: {message[:300]}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise not_asked(server.url, error) from None


def show_once(server: Server, *, as_json: bool) -> None:
    """Print the state once. Rates are those of the second between two looks."""
    before = fetch_snapshot(server)
    time.sleep(EVERY_S)
    view = fetch_snapshot(server)
    if as_json:
        print(json.dumps(facts(view, before), indent=2))
    else:
        Console(highlight=False).print(server_line(server), screen(view, before), sep="\n")


def show(server: Server) -> None:
    """Until Ctrl-C. A server that is away for a while is waited for."""
    view = before = fetch_snapshot(server)
    steps = view["steps"]
    answered_s = time.time()
    with Live(Group(server_line(server), screen(view, before, steps)), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            try:
                before, view = view, fetch_snapshot(server, steps[-1]["number"] if steps else 0)
            except EngineUnavailable as error:
                shown = Group(gone(error, answered_s), Text(), screen(view, before, steps))
                live.update(Styled(shown, "dim"), refresh=True)
                continue
            answered_s = time.time()
            steps = [*steps, *view["steps"]][-600:]
            live.update(Group(server_line(server), screen(view, before, steps)), refresh=True)


def gone(error: EngineUnavailable, answered_s: float) -> Text:
    """answered_s: when it last did, of `time.time`."""
    at, ago_s = time.strftime("%H:%M:%S", time.localtime(answered_s)), time.time() - answered_s
    return Text(f"no answer since {at}, {ago_s:.0f} s ago; asking again each second. {error}", style="not dim red")


def server_line(server: Server) -> Text:
    """The line that says which server this is, and how to watch another of this user's."""
    others = [each.url for each in running() if not _is_same(each.url, server.url)]
    line = Text(server.url, style="dim")
    if others:
        line.append(f"\n{len(others)} more of yours here: top --url {others[0]}")
    return line


def facts(view: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The state for programs: all but the map, and the rates."""
    shown = {name: value for name, value in view.items() if name not in ("pool", "recount", "faults")}
    for request in (*shown["requests"], *shown["ended"]):
        del request["blocks"]
    return shown | {"rates": rates(view, before)}


def rates(view: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """Per second, since the look before."""
    passed = view["clock_s"] - before["clock_s"]
    counters = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "finished_requests", "preemptions")
    return {
        name: round(max(0, view["load"][name] - before["load"][name]) / passed, 3) if passed > 0 else 0.0
        for name in counters
    }


def screen(view: dict[str, Any], before: dict[str, Any], steps: list[dict[str, Any]] | None = None) -> RenderableType:
    return Group(
        _numbers(view, before),
        Text(),
        _late(view["latencies"]),
        Text(),
        _groups(view),
        *_forecasts(view),
        *_leases(view.get("leases", {})),
        Text(),
        _steps(view["steps"] if steps is None else steps),
        Text(),
        _workers(view, before),
        Text(),
        _requests(view),
    )


def _numbers(view: dict[str, Any], before: dict[str, Any]) -> RenderableType:
    load, rate = view["load"], rates(view, before)
    share = load["cached_tokens"] / load["prompt_tokens"] if load["prompt_tokens"] else 0
    held = 1 - load["free_blocks"] / max(1, load["num_blocks"])
    line = Text()
    line.append(view["model"], style="bold")
    line.append(f"  {view['strategy']}\n", style="dim")
    line.append(f"{load['running']} running, {load['waiting']} waiting; ")
    line.append(f"tokens/s: {rate['prompt_tokens']:,.0f} in, {rate['generated_tokens']:,.0f} out\n")
    line.append(f"{share:.1%} of prompts cached, {load['preemptions']} preemptions; {held:.0%} of the pool held")
    return line


def _late(latencies: dict[str, dict[str, float | None]]) -> RenderableType:
    """The middle and the slow end of each, of the last minute."""
    if all(each["p50_s"] is None for each in latencies.values()):
        return Text("no token in the last minute", style="dim")
    names = {"first_token": "first token", "next_token": "next token", "queue": "queue"}
    table = _table(("last minute", "<"), *((name, ">") for name in names.values()))
    for key, words in (("p50_s", "median"), ("p95_s", "p95")):
        late = (latencies[kind][key] for kind in names)
        table.add_row(words, *("" if seconds is None else human_seconds(seconds) for seconds in late))
    return table


def _groups(view: dict[str, Any]) -> RenderableType:
    table = _table(("group", ">"), ("kind", "<"), ("layers", ">"), ("held", ">"), ("known", ">"), ("block", ">"))
    for number, (group, state) in enumerate(zip(view["groups"], view["cache"]["groups"], strict=True)):
        table.add_row(
            str(number),
            group["kind"],
            str(len(group["layers"])),
            f"{state['held_blocks']:,}",
            f"{state['known_blocks']:,}",
            f"{group['block_tokens']} tokens",
        )
    cache = view["cache"]
    pages = f"pages: {cache['held_pages']:,} held, {cache['kept_pages']:,} kept, {cache['blank_pages']:,} blank"
    return Group(table, Text(pages, style="dim"))


def _forecasts(view: dict[str, Any]) -> list[RenderableType]:
    """What other sizes of the memory would find, where that is known."""
    return [Text(forecast_line(each), style="dim") for each in view["forecasts"]]


def _leases(counts: dict[str, int]) -> list[RenderableType]:
    """Where the server has some."""
    if not counts.get("limit_pages"):
        return []
    pages = f"{counts['held_pages']:,} of {counts['limit_pages']:,} pages"
    ends = ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in LEASE_ENDS)
    return [Text(f"leases: {counts['held']:,} held, {pages}; {ends}", style="dim")]


def forecast_line(forecast: dict[str, Any]) -> str:
    """For people: how much of prompts is found, and would be with half, twice and four times as much."""
    sizes = "  ".join(f"{scale:g}x {share:.1%}" for scale, share in forecast["found"])
    return f"of prompts found, by {forecast['kind']} memory: {sizes}"


def _steps(steps: list[dict[str, Any]]) -> RenderableType:
    latest = steps[-STEPS_DRAWN:]
    if not latest:
        return Text("no step has run yet", style="dim")
    most = max(1, *(step["run_us"] for step in latest))
    drawn = "".join(BARS[min(8, 1 + step["run_us"] * 7 // most)] for step in latest)
    return Text(f"steps  {drawn}  up to {most / 1000:.1f} ms")


def _workers(view: dict[str, Any], before: dict[str, Any]) -> RenderableType:
    passed = view["clock_s"] - before["clock_s"]
    columns = (("rank", ">"), ("host", "<"), ("device", "<"), ("busy", ">"), ("a step", ">"), ("memory", ">"))
    table = _table(*columns)
    for rank, worker in enumerate(view["workers"]):
        old = next((w for w in before["workers"] if w["process_id"] == worker["process_id"]), worker)
        ran, did = worker["run_us"] - old["run_us"], worker["steps"] - old["steps"]
        memory = human_bytes(worker["memory_bytes"])
        if worker["device_bytes"]:
            memory += f", {human_bytes(worker['device_used_bytes'])} of {human_bytes(worker['device_bytes'])} there"
        busy = f"{min(1, ran / passed / 1e6):.0%}" if passed > 0 else ""
        table.add_row(
            str(rank), worker["host"], worker["device"], busy, f"{ran / did / 1000:.1f} ms" if did else "", memory
        )
    return table if view["workers"] else Text("the workers are gone", style="red")


def _requests(view: dict[str, Any]) -> RenderableType:
    requests = view["requests"]
    if not requests:
        return Text("nothing runs, nothing waits", style="dim")
    table = _table(
        ("id", ">"), ("state", "<"), ("prompt", ">"), ("cached", ">"), ("not found", "<"), ("answer", ">"), ("age", ">")
    )
    for each in requests[:MOST_REQUESTS]:
        misses = ", ".join(f"{miss['tokens']:,} {miss['brief']}" for miss in each["misses"])
        table.add_row(
            str(each["id"]),
            each["state"],
            f"{each['prompt_tokens']:,}",
            "?" if each["cached_tokens"] is None else f"{each['cached_tokens']:,}",
            misses,
            f"{each['generated_tokens']:,}/{each['max_tokens']:,}",
            f"{each['age_s']:.1f} s",
        )
    more = len(requests) - MOST_REQUESTS
    return Group(table, Text(f"and {more:,} more", style="dim")) if more > 0 else table


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, side in columns:
        table.add_column(name, justify="right" if side == ">" else "left")
    return table
