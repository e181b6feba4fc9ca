"""`intarsia serve`, and what it has in common with `intarsia batch`: all that can be judged before anything slow is
imported or started is judged first."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from ...controller.startup import EngineSettings
from ...errors import InvalidSetting
from ..front_end.access import Access, AccessSettings
from ..settings.config_file import describe
from ..settings.options import engine_settings
from ..settings.setting import Setting, fields_of
from ..settings.table import ENGINE, SERVER, LogLevel
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


def settings_before_start(params: Mapping[str, Any]) -> EngineSettings:
    """The settings of an engine among the parameters of a command, once all is judged that can be before anything slow
    is imported or started. Raises `ModelError` and `InvalidSetting`."""
    model, given = str(params["model"]), _of(ENGINE, params)
    check_start(is_insecure_fine=given["insecure_ray"])
    if "host" in params:
        _check_host(params)
    if params["disable_hybrid_kv_cache_manager"]:
        given["strategy"] = _uniform(given["strategy"])
    settings = judged(model, engine_settings(model, **given))
    if "host" in params:
        check_ports(params["host"], {name: params[name] for name in ("port", "grpc_port")})
    return settings


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
