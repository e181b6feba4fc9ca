"""`intarsia batch` as a command line says it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..start.before_ray import begin_ahead
from ..start.command import settings_before_start
from .journal import Input

if TYPE_CHECKING:
    from .run import BatchSettings


def run(params: Mapping[str, Any]) -> int:
    """The exit status. Raises `ModelError` and `InvalidSetting`."""
    engine = settings_before_start(params, partial(_check_batch, params))
    begin_ahead()

    from .run import main

    return main(_settings(params), engine)


def _settings(params: Mapping[str, Any]) -> "BatchSettings":
    from .run import BatchSettings

    source, out = Path(params["source"]), Path(params["out"])
    return BatchSettings(source, out, params["num_engines"], params["restart"], params["strict"])


def _check_batch(params: Mapping[str, Any]) -> None:
    """Raises `InvalidSetting` for what no batch is answered with."""
    Input(_settings(params).source)
