"""The console: one page that shows what the pool holds, who waits and why, and what the last steps did.

    GET /console           the page, which holds nothing secret and loads nothing from elsewhere
    GET /console/view      what it shows, as JSON; wants the admin key
                           ?since=STEP   only steps after that    ?recount=1  count every block from the tables, too
                           ?engine=NAME  one of several replicas' engines    ?pool=0  without the map

Text of prompts and answers is part of it only where the server was started so (`--console-prompts`).
"""

import asyncio
import base64
import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from ...controller.snapshot import EngineSnapshot, RequestSnapshot
from ...errors import InvalidRequest
from ...kvcache.pool_map import PoolMap
from ...proto.status import EngineInfo, SnapshotQuery
from ..front_end.front_end import FrontEnd
from ..front_end.misses import for_operator
from ..front_end.served_models import ServedModels

PAGE = (Path(__file__).parent / "page.html").read_text()

VIEW_PATH = "/console/view"


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """Settings of the console: what it may show."""

    show_prompts: bool = False


def add_console(app: FastAPI, models: ServedModels, settings: ConsoleSettings) -> None:
    """Its two routes. Of several models each engine is shown under its name.

    Who may see the second is the business of the application's doorkeeper.
    """
    headers = {"Content-Security-Policy": _policy(PAGE), "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}

    @app.get("/", include_in_schema=False)
    async def front(request: Request) -> Response:
        return RedirectResponse(f"{request.scope.get('root_path', '')}/console")

    @app.get("/console", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=headers)

    @app.get(VIEW_PATH, include_in_schema=False)
    async def view(
        request: Request, since: int = 0, pool: bool = True, recount: bool = False, engine: str = ""
    ) -> Response:
        of = {name: here for here in models.each() for name in here.engines()}
        engines = {name: here.engines()[name] for name, here in of.items()}
        name = engine or next(iter(engines))
        if name not in engines:
            raise InvalidRequest(f"there is no engine {name!r}; there are {', '.join(engines)}", field="engine")
        seen = await engines[name].questions.snapshot(SnapshotQuery(since, pool, settings.show_prompts, recount))
        takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
        shown = {"engines": sorted(engines), "engine": name}
        return await asyncio.to_thread(
            lambda: _packed(shown | as_json(engines[name].info, seen, of[name]), takes_gzip)  # prompts become texts
        )


def as_json(info: EngineInfo, seen: EngineSnapshot, front_end: FrontEnd) -> dict[str, Any]:
    """A view as plain values; bytes in base64."""
    return {
        "model": info.model,
        "strategy": info.strategy,
        "groups": [group._asdict() for group in info.groups],
        "clock_s": seen.clock_s,
        "load": seen.load._asdict(),
        "cache": seen.cache._asdict() | {"groups": [group._asdict() for group in seen.cache.groups]},
        "requests": [_request(each, front_end) for each in seen.requests],
        "ended": [_request(each, front_end) for each in seen.ended],
        "steps": [step._asdict() for step in seen.steps],
        "workers": [worker._asdict() for worker in seen.workers],
        "pool": _pool(seen.pool) if seen.pool is not None else None,
        "recount": seen.recount._asdict() if seen.recount is not None else None,
        "faults": seen.faults,
        "latencies": {name: spread._asdict() for name, spread in seen.latencies._asdict().items()},
        "forecasts": [forecast._asdict() for forecast in seen.forecasts],
        "leases": seen.leases._asdict(),
    }


def _request(request: RequestSnapshot, front_end: FrontEnd) -> dict[str, Any]:
    shown = request._asdict()
    shown["blocks"] = [_text(blocks) for blocks in request.blocks]
    shown["misses"] = for_operator(request.misses)
    del shown["tokens"]
    if request.tokens is not None and front_end.tokenizer is not None:
        prompt, answer = request.tokens
        shown["prompt_text"], shown["answer_text"] = front_end.decode(prompt), front_end.decode(answer)
    return shown


def _pool(pool: PoolMap) -> dict[str, Any]:
    return {
        "arenas": [{"owners": _text(arena.owners)} for arena in pool.arenas],
        "groups": [
            {"arena": group.arena, "per_large": group.per_large, "states": _text(group.states)} for group in pool.groups
        ],
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _packed(shown: dict[str, Any], takes_gzip: bool) -> Response:
    """Packs the answer as JSON, by gzip where the client takes it: most of it is long runs of the same byte."""
    body, headers = json.dumps(shown).encode(), {"Cache-Control": "no-store"}
    if takes_gzip:
        body, headers = gzip.compress(body, 1), headers | {"Content-Encoding": "gzip"}
    return Response(body, media_type="application/json", headers=headers)


def _policy(page: str) -> str:
    """Only the page's own scripts may run, and they may talk to its server only."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in found
        )

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
