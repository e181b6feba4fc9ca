"""Renders a folder of chat templates, each with a small conversation of tools and thoughts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from intarsia.deploy.formats.chosen import by_template
from intarsia.deploy.front_end.template_child import render

MOST_BYTES = 2**20

FUNCTION = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def conversation(arguments: Any, **call: Any) -> list[dict[str, Any]]:
    """A turn with thoughts and a call, and the one behind it."""
    called = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "reasoning_content": "One call.", "content": "", "tool_calls": [called]} | call,
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "And tomorrow?"},
    ]


def rendered(folder: Path) -> Iterator[str]:
    """A line for each template that does not render as it is, and one with the counts."""
    count = refused = unknown = 0
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        count += 1
        if by_template(template) is None:
            unknown += 1
            yield f"{path.stem}: its format is unknown"
        why = _refusal(template, conversation({"city": "Oslo"}))
        if why is None:
            continue
        if _refusal(template, conversation(json.dumps({"city": "Oslo"}))) is None:
            yield f"{path.stem}: renders, with the arguments of calls as text"
            continue
        refused += 1
        yield f"{path.stem}: refused, {why}"
    yield f"templates: {count - refused} of {count} render, {refused} refused; {count - unknown} of known formats"


def _refusal(template: str, messages: list[dict[str, Any]]) -> str | None:
    """Why a template does not render. None: it does."""
    question = {
        "template": template,
        "messages": messages,
        "tools": TOOLS,
        "variables": dict(TOKENS),
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    try:
        text = render(question, MOST_BYTES)
    except Exception as error:  # noqa: BLE001  templates raise what their authors wrote
        return f"{type(error).__name__}: {error}"
    return None if "tomorrow" in text else "it leaves out the last message"
