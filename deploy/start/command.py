"""`intarsia serve`, and what it has in common with `intarsia batch`: all that can be judged before anything slow is
imported or started is judged first."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import typer

from ...controller.startup import EngineSettings
from ...errors import InvalidSetting
from ..front_end.access import Access, AccessSettings
from ..settings.config_file import describe
from ..settings.setting import Setting, fields_of
from ..settings.table import ENGINE, SERVER, EngineArguments, LogLevel
from .before_ray import begin_ahead, check_start
from .before_start import check_ports, judged, weights_in_words
from .ending import leave
from .log_level import log_from


def run(context: typer.Context) -> None:
    """Serve as a command line says, until stopped."""
    params = context.params
    if params["print_config"]:
        print(describe(context), end="")
        return
    settings = settings_before_start(params)

    from .serve import serve, server_settings

    server = server_settings(**_of(SERVER, params))
    if params["log_level"] is not None:
        log_from(LogLevel(params["log_level"]))
    begin_ahead()
    print(f"loading {params['model']}: {weights_in_words(settings)} of weights ...", flush=True)

    async def serve_and_leave() -> None:
        await serve(settings, server)
        leave(0)  # there is nothing that the loop, Python or Ray should still do

    asyncio.run(serve_and_leave())


def settings_before_start(params: Mapping[str, Any], before_fetch: Callable[[], None] | None = None) -> EngineSettings:
    """The settings of an engine among the parameters of a command, once all is judged that can be before anything slow
    is imported or started.

    before_fetch: as `judged` has it; None: judges the server

    Raises `ModelError` and `InvalidSetting`."""
    model, given = str(params["model"]), _of(ENGINE, params)
    check_start(is_insecure_fine=given["insecure_ray"])
    if "host" in params:
        _check_host(params)
    if params["disable_hybrid_kv_cache_manager"]:
        given["strategy"] = _uniform(given["strategy"])
    settings = judged(model, cast(EngineArguments, given), before_fetch or partial(_check_server, params))
    if "host" in params:
        _check_ports(params)
    return settings


def _check_server(params: Mapping[str, Any]) -> None:
    """Raises `InvalidSetting` for what no server starts with."""
    from .serve import server_settings

    server_settings(**_of(SERVER, params))
    _check_ports(params)


def _check_ports(params: Mapping[str, Any]) -> None:
    check_ports(params["host"], {name: params[name] for name in ("port", "grpc_port")})


def _of(rows: Iterable[Setting], params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a command that are in these rows."""
    return {row.name: params[row.name] for row in rows if row.name in params}


def _check_host(params: Mapping[str, Any]) -> None:
    """Raises `InvalidSetting` for an address that strangers could reach."""
    given = fields_of(SERVER, _of(SERVER, params))["access"]
    Access(AccessSettings(**given)).check_host(params["host"])


def _uniform(strategy: str) -> str:
    if strategy not in ("auto", "uniform"):
        raise InvalidSetting(
            f"disable_hybrid_kv_cache_manager means strategy uniform, and strategy {strategy} is given; leave one out",
            field="strategy",
        )
    return "uniform"
