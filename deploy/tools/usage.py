"""The error of a command that fails, or cannot be parsed: one sentence, exit status 2."""

import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from typer import Exit
from typer._click.core import Context
from typer._click.exceptions import BadParameter, ClickException, NoArgsIsHelpError, NoSuchOption, UsageError
from typer.core import TyperGroup

from ...errors import IntarsiaError
from ..settings.other_flags import OTHER_FLAGS

SIMILAR = 0.8
"""The least likeness of two spellings that counts as a slip, from 0 to 1. Less alike ones mean different things: --seed
is no --insecure."""


INTERRUPTED = 130
"""The exit status after Ctrl-C. Nothing is printed: the person who pressed it knows."""


class Commands(TyperGroup):
    """The commands of `intarsia`. An error of ours is one sentence and exit status 2, whichever command raises it."""

    def make_context(self, *args: Any, **kwargs: Any) -> Context:
        with _one_sentence():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Context) -> Any:
        words = [*ctx._protected_args, *ctx.args]
        with _one_sentence(words):
            return super().invoke(ctx)


class OneSentence(ClickException):
    """An error shown without the usage, which would push the sentence off the screen."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        print(f"error: {self.message}", file=file or sys.stderr)


@contextlib.contextmanager
def _one_sentence(words: Sequence[str] = ()) -> Iterator[None]:
    """words: of the command line."""
    try:
        yield
    except NoArgsIsHelpError:
        raise
    except UsageError as error:
        raise OneSentence(_worded(error, words)) from None
    except IntarsiaError as error:
        raise OneSentence(str(error)) from None
    except KeyboardInterrupt:
        raise Exit(INTERRUPTED) from None


def _worded(error: UsageError, words: Sequence[str]) -> str:
    command = error.ctx.command_path if error.ctx is not None else "intarsia"
    if isinstance(error, NoSuchOption) and error.ctx is not None:
        flag = _whole(error.option_name, words)
        return f"{command} has no {flag}{_instead(flag, error.ctx, command)}"
    message, faults = error.format_message().rstrip("."), getattr(error.__cause__, "errors", None)
    if isinstance(error, BadParameter) and faults is not None:
        message += f", got {faults()[0].get('input')!r}"
    return f"{message}. What there is: {command} --help"


def _whole(flag: str, words: Sequence[str]) -> str:
    """The whole flag that was given: of -pp, typer knows the first letter only."""
    given = (word.partition("=")[0] for word in words)
    return flag if flag.startswith("--") else next((word for word in given if word.startswith(flag)), flag)


def _instead(flag: str, context: Context, command: str) -> str:
    """The sentence about what to give instead of a flag, or how to find out."""
    ours = [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)]
    if "--tensor-parallel-size" in ours and flag in OTHER_FLAGS:
        return f": {OTHER_FLAGS[flag]}."
    near = difflib.get_close_matches(flag, [name for name in ours if name.startswith("--")], n=1, cutoff=SIMILAR)
    return f". Did you mean {near[0]}?" if near else f". What there is: {command} --help"
