"""How the model that is served writes thoughts and calls, and by what that is known."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formats.answer_parser import AnswerParser
from ..formats.chosen import chosen, markers_of, parser_of
from ..formats.described import Format
from ..formats.grammar import Wanted, grammar_of
from ..formats.parser import begun_thoughts
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a served model, with its special tokens."""

    form: Format | None  # None: unknown; answers are text, in which calls are guessed
    markers: Mapping[int, str]  # those of its markers that are special tokens, by token
    ends: Mapping[int, str]  # special tokens that end an answer, or its calls
    is_asked: bool  # whether it was named; else the template shows it
    can_think: bool = False  # whether the template has thoughts

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
        can_think = any(each.close in (template or "") for each in form.thoughts) or form.kind == "channels"
        return cls(form, markers, ends, is_asked, can_think)

    def grammar(self, tools: Sequence[Wanted], prompt_end: str, *, is_parallel: bool, must_call: bool) -> str | None:
        """Of an answer that calls one of the tools, or several, after its thoughts. None: there is none, since the
        format is unknown, or cannot hold such tools."""
        if self.form is None:
            return None
        begun = begun_thoughts(self.form, prompt_end)
        has_ended = any(prompt_end.rstrip().endswith(mark) for each in self.form.thoughts for mark in each.closes)
        thoughts = begun or next(iter(self.form.thoughts), None)
        tokens = {text: token for token, text in self.markers.items()}
        return grammar_of(
            self.form,
            tools,
            tokens,
            thoughts=thoughts if begun is not None or (self.can_think and not has_ended) else None,
            has_begun_thinking=begun is not None,
            is_parallel=is_parallel,
            must_call=must_call,
        )

    def parser(
        self, tools: Mapping[str, Mapping[str, Any] | None], prompt_end: str, *, finds_calls: bool
    ) -> AnswerParser:
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
