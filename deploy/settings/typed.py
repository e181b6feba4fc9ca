"""Settings that come as texts or as values, put into their types: of a Serve application, of entries in a file."""

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from ...errors import InvalidSetting
from .setting import Setting, did_you_mean


def typed(
    rows: Sequence[Setting], given: Mapping[str, Any], others: Sequence[str] = (), where: str = ""
) -> dict[str, Any]:
    """What is given of these rows and of `model`, in their types. others: names that are read elsewhere, and left out
    here. where: before each refusal, whose settings they are.

    Raises `InvalidSetting`, naming the field.
    """
    known: dict[str, Any] = {"model": (str, ...)} | {row.name: (row.kind, row.default) for row in rows}
    for name in given:
        if name not in known and name not in others:
            hint = did_you_mean(name, [*known, *others])
            raise InvalidSetting(f"{where}{name} is no setting.{hint}", field=name)
    if "model" not in given:
        raise InvalidSetting(f"{where}model is missing", field="model")
    Settings: Any = pydantic.create_model("Settings", **known)
    own = {name: value for name, value in given.items() if name in known}
    try:
        settings = Settings(**own)
    except pydantic.ValidationError as error:
        raise fault_of(error, where) from None
    return {name: getattr(settings, name) for name in own}


def fault_of(error: pydantic.ValidationError, where: str = "") -> InvalidSetting:
    """The first of its faults."""
    fault = error.errors()[0]
    name = str(fault["loc"][0])
    return InvalidSetting(f"{where}{name}: {fault['msg']}, got {fault['input']!r}", field=name)
