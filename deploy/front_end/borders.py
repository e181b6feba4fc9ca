"""Where conversations part: the end of what a system prompt and tools become in a prompt.

Two conversations with the same instructions share their prompts' beginnings. Layers with states can go on only where a
state was saved, so the engine is told where that beginning ends, before another conversation asks for it.

    this conversation     <system> You are ... <user> What is oak?
    another one           <system> You are ... <user> \u241f
                                                     ^ the border: as far as the tokens are the same

What a template makes of the other conversation is remembered by its instructions, so it is rendered once.
"""

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from ...errors import IntarsiaError, InvalidRequest
from ...proto.status import EngineInfo

OTHER_WORDS = "\u241f"
"""What the user says in the other conversation: hardly a text begins so."""

INSTRUCTING = ("system", "developer")
"""Roles of messages that conversations have in common."""

MOST_REMEMBERED = 256
"""Beginnings."""

MOST_REMEMBERED_TOKENS = 1 << 20
"""Of all beginnings together; 8 MiB."""

Rendering = Callable[[Sequence[Mapping[str, Any]]], Awaitable[list[int]]]
"""Makes a prompt of messages, with the tools and variables of the request at hand."""


class Borders:
    """Finds them. One for each front end."""

    def __init__(self, info: EngineInfo):
        # A layer that sees all tokens can go on anywhere.
        self.are_useful = info.enable_prefix_caching and any(group.kind != "full" for group in info.groups)
        self._beginnings: OrderedDict[bytes, list[int]] = OrderedDict()
        self.num_tokens = 0  # remembered

    async def of(
        self, messages: Sequence[Mapping[str, Any]], about: Sequence[Any], prompt: Sequence[int], render: Rendering
    ) -> tuple[int, ...]:
        """Lengths of `prompt`, in tokens. about: what a prompt depends on beside its messages, as plain values.

        Empty if no state is kept, if nothing instructs, or if the template refuses the other conversation.
        """
        instructions = _instructions(messages)
        if not self.are_useful or len(instructions) == len(messages) or not (instructions or any(about)):
            return ()
        other = await self._beginning(instructions, about, render)
        border = same(prompt, other)
        return (border,) if 0 < border < len(prompt) else ()

    async def _beginning(
        self, instructions: Sequence[Mapping[str, Any]], about: Sequence[Any], render: Rendering
    ) -> list[int]:
        """The prompt of the other conversation."""
        name = sha256(json.dumps([instructions, about], default=str).encode()).digest()
        if (known := self._beginnings.get(name)) is not None:
            self._beginnings.move_to_end(name)
            return known
        try:
            tokens = await render([*instructions, {"role": "user", "content": OTHER_WORDS}])
        except InvalidRequest:
            tokens = []  # the template will refuse it the next time, too
        except IntarsiaError:
            return []
        if name not in self._beginnings:  # no other request has been here meanwhile
            self._beginnings[name] = tokens
            self.num_tokens += len(tokens)
        while len(self._beginnings) > MOST_REMEMBERED or self.num_tokens > MOST_REMEMBERED_TOKENS:
            _, forgotten = self._beginnings.popitem(last=False)
            self.num_tokens -= len(forgotten)
        return tokens


def _instructions(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Those that stand before all others."""
    count = next((n for n, each in enumerate(messages) if each.get("role") not in INSTRUCTING), len(messages))
    return messages[:count]


def same(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the front that are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # whole stretches are compared at once
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
