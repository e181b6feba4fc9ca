"""How the model that is served writes thoughts and calls, and by what that is known."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..formats.chosen import Reads, chosen, markers_of, parser_of
from ..formats.described import Format
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a served model, with its special tokens."""

    form: Format | None  # None: unknown; answers are text, in which calls are guessed
    markers: Mapping[int, str]  # those of its markers that are special tokens, by token
    ends: Mapping[int, str]  # special tokens that end an answer, or its calls
    is_asked: bool  # whether it was named; else the template shows it

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, calls: str | None, thoughts: str | None) -> "AnswerFormat":
        """calls, thoughts: names of formats. Raises `InvalidSetting` for those that are not known."""
        template = tokenizer.template if tokenizer is not None else None
        form = chosen(template, calls, thoughts)
        is_asked = calls is not None or thoughts is not None
        if form is None or tokenizer is None:
            return cls(form, {}, {}, is_asked)
        # Where answers are messages, the end of one is a marker among others.
        wanted = [text for text in markers_of(form) if form.kind == "channels" or text not in form.stops]
        markers, ends = tokenizer.special_tokens_of(wanted), tokenizer.special_tokens_of(form.stops)
        return cls(form, markers, ends, is_asked)

    def parser(self, tools: Mapping[str, Mapping[str, Any] | None], prompt_end: str, *, finds_calls: bool) -> Reads:
        """For one answer. tools: their parameters, by name."""
        assert self.form is not None, "ask whether there is a format"
        return parser_of(
            self.form,
            tools,
            prompt_end=prompt_end,
            finds_calls=finds_calls,
            single_tokens=frozenset(self.markers.values()) | frozenset(self.ends.values()),
        )


def format_notes(served: AnswerFormat, tokenizer: Tokenizer | None) -> Iterator[str]:
    """How answers are read, for people."""
    if tokenizer is None or not tokenizer.has_chat:
        return
    form = served.form
    if form is None:
        yield (
            "answers: unknown, since the chat template shows no format that is known; thoughts stay in the text, and "
            "calls are guessed. --tool-call-parser and --reasoning-parser name formats"
        )
        return
    thoughts = form.thoughts[0].open if form.thoughts else "analysis channel" if form.kind == "channels" else "none"
    calls = form.name if form.calls or form.kind == "channels" else "none, or guessed"
    by = "as asked" if served.is_asked else "by the chat template"
    yield f"answers: thoughts {thoughts}, calls {calls} ({by})"
