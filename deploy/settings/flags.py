"""Flags of commands, made of the table of settings."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import typer

from .setting import Setting, several, tokens

Command = Callable[..., None]


def with_settings(rows: Sequence[Setting]) -> Callable[[Command], Command]:
    """Gives a command a flag for each row, after its parameter `model`. Their values are in the context's `params`."""

    def made_of(command: Command) -> Command:
        own = list(inspect.signature(command).parameters.values())
        place = [parameter.name for parameter in own].index("model") + 1
        whole = [*own[:place], *map(_parameter, rows), *own[place:]]

        def run(context: typer.Context, **given: Any) -> None:
            command(context, **{parameter.name: given[parameter.name] for parameter in own[1:]})

        made: Any = functools.update_wrapper(run, command)
        made.__signature__ = inspect.Signature(whole)
        made.__annotations__ = {parameter.name: parameter.annotation for parameter in whole}
        return made

    return made_of


def _parameter(row: Setting) -> inspect.Parameter:
    """A setting as a parameter that typer reads."""
    kind, default = _kind(row), row.for_servers
    return inspect.Parameter(
        row.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=str(default) if kind is str and default is not None else default,
        annotation=Annotated[kind | None if row.may_be_none else kind, _option(row)],
    )


def _kind(row: Setting) -> Any:
    """The type of one value on the command line. Numbers of tokens are read at once; of bytes, when all flags are
    known."""
    if row.read is tokens:
        return int
    if row.read is several:
        return list[str]
    return next(iter(get_args(row.kind)), row.kind)


def _option(row: Setting) -> Any:
    long = f"--{row.name.replace('_', '-')}"
    names = (long, row.short) if row.short else (long,) if row.default is False else ()  # else typer names it itself
    return typer.Option(
        *names,
        envvar=row.variable or None,
        help=f"{row.help}  [default: {row.unset}]" if row.unset and row.for_servers is None else row.help,
        parser=_parser(row) if row.read is tokens else None,
        min=None if row.most is None else 0,
        max=row.most,
    )


def _parser(row: Setting) -> Callable[[Any], Any]:
    def tokens(value: Any) -> Any:
        return row.value({row.name: value})

    return tokens
