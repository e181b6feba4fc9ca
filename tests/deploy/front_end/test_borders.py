import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.front_end import borders as module
from intarsia.deploy.front_end.borders import Borders
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.errors import InvalidRequest, Overloaded

SYSTEM = {"role": "system", "content": "You know all about oaks, and tell it in few words."}
USER = {"role": "user", "content": "How old is the oldest one?"}
OTHER = {"role": "user", "content": "Where does it stand?"}


def info(*kinds: str, caching: bool = True) -> Any:
    return SimpleNamespace(enable_prefix_caching=caching, groups=[SimpleNamespace(kind=kind) for kind in kinds])


class Chat:
    """The demo's tokenizer and template."""

    def __init__(self, *kinds: str, caching: bool = True):
        tokenizer = Tokenizer.load(DEMO_MODEL_DIR)
        assert tokenizer is not None and tokenizer.has_chat
        self.tokenizer, self.borders = tokenizer, Borders(info(*kinds, caching=caching))
        self.rendered = 0
        self.refusal: Exception | None = None

    async def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        self.rendered += 1
        if self.refusal is not None:
            raise self.refusal
        return self.tokenizer.chat(messages)

    def prompt(self, *messages: Mapping[str, Any]) -> list[int]:
        return self.tokenizer.chat(messages)

    def ask(self, *messages: Mapping[str, Any], about: Sequence[Any] = ([], {})) -> tuple[int, ...]:
        return asyncio.run(self.borders.of(messages, about, self.prompt(*messages), self._render))


def test_the_border_is_where_another_conversation_parts():
    chat = Chat("full", "state")
    [border] = chat.ask(SYSTEM, USER)
    one, other = chat.prompt(SYSTEM, USER), chat.prompt(SYSTEM, OTHER)
    parts = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert border == parts > len(chat.tokenizer.encode(SYSTEM["content"])) // 2


def test_the_other_conversation_is_rendered_once_for_all_of_the_same_instructions():
    chat = Chat("full", "state")
    assert chat.ask(SYSTEM, USER) == chat.ask(SYSTEM, OTHER) == chat.ask(SYSTEM, USER, OTHER)
    assert chat.rendered == 1
    chat.ask(SYSTEM, USER, about=([{"type": "function"}], {}))
    assert chat.rendered == 2


@pytest.mark.parametrize(
    ("kinds", "caching"), [(("full",), True), (("full", "state"), False)], ids=["only full layers", "no caching"]
)
def test_nothing_is_rendered_where_a_border_would_be_of_no_use(kinds: tuple[str, ...], caching: bool):
    chat = Chat(*kinds, caching=caching)
    assert chat.ask(SYSTEM, USER) == () and chat.rendered == 0


def test_a_conversation_without_instructions_has_no_border():
    chat = Chat("full", "state")
    assert chat.ask(USER) == chat.ask(SYSTEM) == () and chat.rendered == 0


def test_a_template_that_refuses_the_other_conversation_is_asked_once():
    chat = Chat("full", "state")
    chat.refusal = InvalidRequest("no")
    assert chat.ask(SYSTEM, USER) == chat.ask(SYSTEM, USER) == () and chat.rendered == 1


def test_an_overload_is_no_refusal_of_the_template():
    chat = Chat("full", "state")
    chat.refusal = Overloaded("too many")
    assert chat.ask(SYSTEM, USER) == ()
    chat.refusal = None
    assert chat.ask(SYSTEM, USER) != ()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    chat = Chat("full", "state")
    monkeypatch.setattr(module, "MOST_REMEMBERED_TOKENS", 100)
    for n in range(20):
        chat.ask({"role": "system", "content": f"You are number {n}."}, USER)
    assert 0 < chat.borders.num_tokens <= 100
