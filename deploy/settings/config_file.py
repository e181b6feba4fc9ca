"""Where a setting of a command comes from: a flag, an environment variable, a file, or its default.

    --kv-cache-memory 4GiB        INTARSIA_KV_CACHE_MEMORY=4GiB        kv_cache_memory: 4GiB

Flags come first, then variables, then the file that --config names. All three have the same names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ...errors import InvalidSetting
from .setting import did_you_mean

PREFIX = "INTARSIA_"

MODELS = "models"
"""The key of a file under which several models stand, each with the settings of its engine."""

NOT_SETTINGS = frozenset({"config", "print_config", "help"})

SECRETS = ("key", "token", "secret", "password")
"""What is called so, or so at its end, is never printed."""


class ConfiguredCommand(TyperCommand):
    """A command all of whose options are environment variables too."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for param in self.params:
            if param.name in NOT_SETTINGS or param.name is None:
                continue
            old = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
            param.envvar = [variable_of(param.name), *old]
            param.show_envvar = False  # type: ignore[attr-defined]  the command's text says it once


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def use_file(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config. Raises `InvalidSetting` for a file that cannot be read, or sets an unknown name."""
    if path is not None:
        known = {param.name for param in context.command.params if param.name} - NOT_SETTINGS
        found = _read(path, known | ({MODELS} if context.command.name == "serve" else set()))
        context.meta[MODELS] = _models(path, found.pop(MODELS, None))
        context.default_map = {**(context.default_map or {}), **found}
    return path


def models_in(context: typer.Context) -> Sequence[Mapping[str, Any]]:
    """The entries of `models` in the file of --config. Empty: it has none."""
    return context.meta.get(MODELS, ())


def _models(path: Path, found: Any) -> Sequence[Mapping[str, Any]]:
    """Raises `InvalidSetting` for what is no list of settings."""
    if found is None:
        return ()
    if not isinstance(found, list) or not found or not all(isinstance(entry, dict) for entry in found):
        raise InvalidSetting(
            f"{MODELS} in {path} must be a list, each entry with a model and its settings", field=MODELS
        )
    return [{str(name).replace("-", "_"): value for name, value in entry.items()} for entry in found]


def _read(path: Path, known: set[str]) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"the configuration {path} cannot be read: {error}", field="config") from None
    except yaml.YAMLError as error:
        raise InvalidSetting(f"the configuration {path} is no YAML: {error}", field="config") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidSetting(f"the configuration {path} must map settings to values", field="config")
    # What flags take as JSON may be written as YAML.
    settings = {
        str(name).replace("-", "_"): json.dumps(value) if isinstance(value, dict) else value
        for name, value in found.items()
    }
    for name in settings:
        if name not in known:
            raise InvalidSetting(f"{path} sets {name}, which is no setting.{did_you_mean(name, known)}", field=name)
    return settings


def describe(context: typer.Context) -> str:
    """Every setting with where it comes from, as a file for --config."""
    import yaml

    models = [dict(each) for each in models_in(context)]
    listed = yaml.safe_dump({MODELS: models}, sort_keys=False) if models else ""
    return "".join(f"{line}\n" for line in _lines(context)) + listed


def _lines(context: typer.Context) -> Iterator[str]:
    import yaml
    from typer._click.core import ParameterSource

    sources = {
        ParameterSource.COMMANDLINE: "flag",
        ParameterSource.ENVIRONMENT: "environment",
        ParameterSource.DEFAULT_MAP: "file",
    }
    for name, value in context.params.items():
        if name in NOT_SETTINGS:
            continue
        value = None if value == () else value  # an option that may be given several times, and was not
        shown = "..." if name.rpartition("_")[2] in SECRETS and value is not None else value
        text = yaml.safe_dump({name: str(shown) if isinstance(shown, Path) else shown}).strip()
        source = sources.get(context.get_parameter_source(name))  # type: ignore[arg-type]
        yield f"{text}  # {source}" if source else text
