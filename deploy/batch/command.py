"""`intarsia batch` as a command line says it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..start.before_ray import begin_ahead
from ..start.command import settings_before_start


def run(params: Mapping[str, Any]) -> int:
    """The exit status. Raises `ModelError` and `InvalidSetting`."""
    engine = settings_before_start(params)
    begin_ahead()

    from .run import BatchSettings, main

    source, out = Path(params["source"]), Path(params["out"])
    return main(BatchSettings(source, out, params["num_engines"], params["restart"], params["strict"]), engine)
