"""Which format a checkpoint has: by its chat template and its special tokens, or by a name."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ...errors import InvalidSetting
from .answer_parser import AnswerParser
from .described import Format
from .harmony import MARKERS, Harmony
from .known import FORMATS, THINK_ONLY
from .parser import Parser
from .typed import Schema


def by_template(template: str) -> Format | None:
    """The format that a chat template writes; None: none that is known.

    One without calls that writes thoughts has those alone."""
    template = _plain(template)
    return next((each for each in FORMATS if all(sign in template for sign in each.signs)), None)


def by_name(name: str) -> Format | None:
    """By its name, or one that other servers have for it."""
    wanted = _normal(name)
    return next((each for each in FORMATS if wanted in map(_normal, (each.name, *each.aliases))), None)


def by_thoughts(name: str) -> Format | None:
    wanted = _normal(name)
    names = ((each, (each.name, *each.thought_aliases)) for each in FORMATS if each.thoughts or each.kind != "marked")
    return next((each for each, own in names if wanted in map(_normal, own)), None)


def chosen(template: str | None, calls: str | None = None, thoughts: str | None = None) -> Format | None:
    """The format of a checkpoint with this template. None: it is unknown.

    calls, thoughts: names, in place of what the template shows; "none" for none. Raises `InvalidSetting` for names that
    are not known."""
    form = by_template(template) if template else None
    if calls is not None:
        own = _named("tool_call_parser", calls, by_name)
        form = own or replace(form or THINK_ONLY, calls=())
    if thoughts is not None:
        own = _named("reasoning_parser", thoughts, by_thoughts)
        if own is not None and own.kind != "marked":
            return own
        form = replace(
            form or Format("thoughts alone"),
            thoughts=own.thoughts if own else (),
            wrappers=own.wrappers if own else (),
        )
    return form


def names() -> Mapping[str, tuple[str, ...]]:
    """The names of all formats, each with the other names that are understood."""
    return {each.name: tuple(sorted({*each.aliases, *each.thought_aliases} - {each.name})) for each in FORMATS}


def parser_of(
    form: Format,
    tools: Mapping[str, Mapping[str, Any] | None],
    *,
    prompt_end: str = "",
    finds_calls: bool = True,
    single_tokens: Collection[str] = (),
) -> AnswerParser:
    """tools: the parameters of each tool, by name. single_tokens: those of the tokenizer that are one token each."""
    made = Harmony if form.kind == "channels" else Parser
    schemas = {name: Schema(parameters) for name, parameters in tools.items()}
    own = frozenset(single_tokens) & frozenset(markers_of(form))
    return made(form, schemas, prompt_end=prompt_end, finds_calls=finds_calls, single_tokens=own)


def markers_of(form: Format) -> tuple[str, ...]:
    """All texts that are no words of an answer. Those of them that are special tokens have to reach the parser."""
    return MARKERS if form.kind == "channels" else form.markers


def _named(field: str, name: str, find: Any) -> Format | None:
    if _normal(name) == "none":
        return None
    found = find(name)
    if found is None:
        known = ", ".join(sorted(each.name for each in FORMATS))
        raise InvalidSetting(f"{field}: {name} is not known. Give one of {known}, or none.", field=field)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[\s_.-]+", "_", name.strip().lower())


def _plain(template: str) -> str:
    """A template puts some markers together out of pieces: quotes may be escaped in it, line breaks too."""
    return template.replace('\\"', '"').replace("\\n", "\n")
