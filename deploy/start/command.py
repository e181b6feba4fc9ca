"""`intarsia serve`, and what it has in common with `intarsia batch`: all that can be judged before anything slow is
imported or started is judged first."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import typer
from typer._click.exceptions import MissingParameter

from ...controller.startup import EngineSettings
from ...errors import IntarsiaError, InvalidSetting
from ..front_end.access import Access, AccessSettings
from ..settings.config_file import describe, models_in
from ..settings.setting import Setting, fields_of
from ..settings.table import ENGINE, SERVER, EngineArguments, LogLevel
from .before_ray import begin_ahead, check_start
from .before_start import check_ports, judged, weights_in_words
from .ending import leave
from .log_level import log_from

if TYPE_CHECKING:
    from .serve import ModelToServe

OF_A_MODEL = {"tool_call_parser", "reasoning_parser"}
"""Settings of a server that each of several models has for itself, beside those of its engine."""


def run(context: typer.Context) -> None:
    """Serve as a command line says, until stopped."""
    params = context.params
    if params["print_config"]:
        print(describe(context), end="")
        return
    named = models_before_start(context)

    from .serve import serve, server_settings

    server = server_settings(**_of(SERVER, params))
    if params["log_level"] is not None:
        log_from(LogLevel(params["log_level"]))
    begin_ahead()
    for name, each in named:
        print(f"loading {name}: {weights_in_words(each.engine)} of weights ...", flush=True)

    async def serve_and_leave() -> None:
        await serve([each for _, each in named], server)
        leave(0)  # there is nothing that the loop, Python or Ray should still do

    asyncio.run(serve_and_leave())


def models_before_start(context: typer.Context) -> "list[tuple[str, ModelToServe]]":
    """The model of the command line, or those that the file of --config lists, each with its name as it was given.
    Whatever is wrong with one of them is told before anything starts. Raises as `settings_before_start`."""
    params, entries = context.params, models_in(context)
    if entries and params["model"] is not None:
        raise InvalidSetting(
            f"the file of --config lists {len(entries)} models, and {params['model']} is named beside it; put it into "
            "the list, or leave one of the two out",
            field="models",
        )
    if not entries:
        if params["model"] is None:
            missing: Any = next(each for each in context.command.params if each.name == "model")
            raise MissingParameter(ctx=context, param=missing)
        return [_to_serve(params)]
    found = [_entry(params, number, entry) for number, entry in enumerate(entries)]
    for number, (_, each) in enumerate(found):
        if any(each.name == other.name for _, other in found[:number]):
            raise InvalidSetting(
                f"models[{number}]: another model is called {each.name!r}, too; give it a served_model_name of its own",
                field="served_model_name",
            )
    return found


def _entry(params: Mapping[str, Any], number: int, entry: Mapping[str, Any]) -> "tuple[str, ModelToServe]":
    """What an entry does not say is as the flags, or the rest of the file, have it for all models."""
    from ..settings.typed import typed

    where = f"models[{number}]: "
    given = typed([*ENGINE, *(row for row in SERVER if row.name in OF_A_MODEL)], entry, where=where)
    try:
        return _to_serve({**params, **given})
    except IntarsiaError as error:
        error.message = where + error.message
        raise


def _to_serve(params: Mapping[str, Any]) -> "tuple[str, ModelToServe]":
    settings = settings_before_start(params)

    from .serve import ModelToServe, server_settings

    return str(params["model"]), ModelToServe(settings, server_settings(**_of(SERVER, params)).front_end)


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
