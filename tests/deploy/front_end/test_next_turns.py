"""What is prepared for the next turn is what the template writes then, whatever it leaves out of an answer."""

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from intarsia.controller.request import Request
from intarsia.controller.scheduling.preparation import LEAST_TOKENS, Wanted
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.deploy.front_end.next_turns import Answered, NextTurns
from intarsia.deploy.front_end.template_child import render
from intarsia.errors import InvalidRequest
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Full, Sliding, State
from intarsia.proto.status import EngineLoad, PreparedPrompt
from intarsia.proto.step import Step, StepResult
from intarsia.tests.controller.scheduling.by_hand import request_of
from intarsia.tests.kvcache.plans import plan_of

AGENTS = Path(__file__).parents[3].parent / "shared" / "data" / "agents"

Messages = Sequence[Mapping[str, Any]]


class Script:
    """Workers that draw what they are told to."""

    def __init__(self) -> None:
        self.reply: Sequence[int] = ()
        self._slots: dict[int, list[int]] = {}  # computed, known, of them prompt

    def run(self, step: Step) -> StepResult:
        for slot in step.retire:
            del self._slots[slot]
        for admit in step.admit:
            self._slots[admit.slot] = [admit.computed_tokens, len(admit.tokens), admit.sampling.prompt_tokens]
        drawn = []
        for slot, tokens in [
            *((slot, 1) for slot in step.decode),
            *((each.slot, each.tokens) for each in step.advance),
        ]:
            state = self._slots[slot]
            state[0] += tokens
            if state[0] == state[1]:
                drawn.append(self.reply[state[1] - state[2]])
                state[1] += 1
        return StepResult(step.epoch, step.number, tuple(drawn))


class Engine:
    """A scheduler and a cache, as a front end sees them. Tokens are bytes, so that nothing depends on a tokenizer."""

    def __init__(self, *, waiting: int = 0):
        plan = plan_of(Full(), Sliding(64), State(), blocks=2000, block_tokens=16)
        self._manager = CacheManager(plan)
        self._scheduler = Scheduler(SchedulerSettings(max_num_batched_tokens=256), self._manager)
        self._script = Script()
        self._waiting = waiting
        self._count = 0
        self.prepared: list[PreparedPrompt] = []
        self.passed: Sequence[int] = ()
        self.lease = ""
        self.questions = self

    def answer(self, prompt: Sequence[int], reply: Sequence[int]) -> int:
        """How many tokens of the prompt were found."""
        self._script.reply = reply
        request = self._request(prompt, len(reply))
        self._scheduler.add(request)
        self._run()
        return request.cached_tokens

    async def load(self) -> EngineLoad:
        return EngineLoad(0, self._waiting, 1, 0, 1, *[0] * 8)

    async def prepare(
        self, tokens: list[int], tenant: str, salt: str, kept: int, passed: Sequence[int], lease: str
    ) -> PreparedPrompt:
        self.lease = lease
        request = self._request(tokens, 1)
        request.is_prepared = True
        self.passed = passed
        self._scheduler.preparation.add(Wanted(request, kept, passed, self.prepared.append))
        self._run()
        return self.prepared[-1]

    def _request(self, prompt: Sequence[int], answer_tokens: int) -> Request:
        self._count += 1
        return request_of(prompt, answer_tokens, self._count)

    def _run(self) -> None:
        while self._scheduler.has_work:
            step = self._scheduler.plan_step()
            if step is not None:
                self._scheduler.commit(self._script.run(step))


class Template:
    """One of a real model, and the bytes that it makes of conversations."""

    def __init__(self, template: str, tools: Any = None):
        self._template = template
        self._tools = tools

    def text(self, messages: Messages, *, begins: bool = True) -> str:
        question = {
            "template": self._template,
            "messages": copy.deepcopy(list(messages)),
            "tools": self._tools,
            "variables": {"bos_token": "<s>", "eos_token": "</s>"},
            "add_generation_prompt": begins,
            "continue_final_message": False,
        }
        try:
            return render(question, 1 << 20)
        except Exception as refused:  # noqa: BLE001  templates raise what their authors wrote
            for message in question["messages"]:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            try:
                return render(question, 1 << 20)
            except Exception:  # noqa: BLE001  templates raise what their authors wrote
                raise InvalidRequest(str(refused)) from None

    async def __call__(self, messages: Messages) -> list[int]:
        return list(self.text(messages).encode())


class Turn(NamedTuple):
    """What the turn after an answer had to compute."""

    with_it: int
    without: int
    alone: int  # of what is new: the message and the beginning of an answer
    kept: int  # of what was drawn, the tokens that are the next turn's, too
    drawn: int


def turns(template: Template, messages: Messages) -> list[Turn]:
    """Answer after answer, each with the history prepared and, in another engine, without."""

    async def play() -> list[Turn]:
        found: list[Turn] = []
        for place, reply in enumerate(messages):
            following = next((n for n in range(place + 1, len(messages) + 1) if _asks(messages, n)), None)
            if reply["role"] != "assistant" or following is None:
                continue
            try:
                prompt, whole = template.text(messages[:place]), template.text(messages[: place + 1], begins=False)
                then = template.text(messages[:following])
            except InvalidRequest:
                continue  # it has no calls, say
            engines = Engine(), Engine()
            tokens = list(prompt.encode()), list((whole[_same(prompt, whole) :] or ".").encode())
            for engine in engines:
                engine.answer(*tokens)
            prepares = NextTurns(engines[0])  # type: ignore[arg-type]
            prepares.expect(Answered(messages[:place], [reply], [*tokens[0], *tokens[1]], "", "id"), template)
            await prepares.idle()
            words = messages[place + 1]["content"]
            begins = then.rfind(words if words in then else json.dumps(words, ensure_ascii=False)[1:-1])
            if begins < 0:
                continue
            prompt_then, alone = list(then.encode()), len(then[begins:].encode())
            with_it, without = [len(prompt_then) - engine.answer(prompt_then, [1]) for engine in engines]
            drawn = [*tokens[0], *tokens[1]]
            found.append(Turn(with_it, without, alone, _same(drawn, prompt_then), len(drawn)))
        return found

    return asyncio.run(play())


def _asks(messages: Messages, end: int) -> bool:
    """Is the model to write after so many messages?"""
    return messages[end - 1]["role"] in ("user", "tool") and (
        end == len(messages) or messages[end]["role"] == "assistant"
    )


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def conversations() -> dict[str, Messages]:
    messages = json.loads((AGENTS / "conversation.json").read_text())["messages"]
    for each in messages:
        each.pop("name", None)  # as clients have it
    silent = [{name: value for name, value in each.items() if name != "reasoning_content"} for each in messages]
    chat = [each for each in messages if each["role"] != "tool" and not each.get("tool_calls")]
    return {"thoughts sent": messages, "not sent": silent, "chat": chat}


@pytest.mark.skipif(not AGENTS.is_dir(), reason="the templates of real models are not here")
@pytest.mark.parametrize("kind", ["thoughts sent", "not sent", "chat"])
def test_the_next_turn_computes_its_own_words_alone_with_every_template(kind: str):
    tools = json.loads((AGENTS / "conversation.json").read_text())["tools"]
    found: list[Turn] = []
    for path in sorted((AGENTS / "templates").glob("*.jinja")):
        for turn in turns(Template(path.read_text(), None if kind == "chat" else tools), conversations()[kind]):
            found.append(turn)
            # A few tokens between an answer and what follows are left to the turn itself.
            assert turn.with_it < turn.alone + LEAST_TOKENS, (path.stem, turn)
            if turn.kept < turn.drawn:
                assert turn.with_it <= 1.15 * turn.alone, (path.stem, turn)
    stripped = [turn for turn in found if turn.kept < turn.drawn]
    assert len(found) > 90 and len(stripped) > 40
    new, with_it, without = [
        sum(each) for each in zip(*((t.alone, t.with_it, t.without) for t in stripped), strict=True)
    ]
    print(
        f"{kind}: of {len(found)} turns {len(stripped)} leave out something; of {new} new tokens {with_it} are "
        f"computed, and {without} without preparation"
    )


def test_while_requests_wait_nothing_is_rendered():
    rendered = []

    async def render(messages: Messages) -> list[int]:
        rendered.append(messages)
        return [1, 2, 3]

    async def play() -> None:
        prepares = NextTurns(Engine(waiting=1))  # type: ignore[arg-type]
        prepares.expect(Answered([], [{"role": "assistant", "content": "a"}], [1, 2], "", "id"), render)
        assert prepares.num_under_way == 1
        await prepares.idle()

    asyncio.run(play())
    assert not rendered


WRITTEN = "{% for m in messages %}{{ m.role }}: {{ m.content[:3] }}{{ m.reasoning_content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("ways", "gives_up"),
    [([False], True), ([False, True], False), ([True, False], False), ([True], False)],
    ids=["never sent", "perhaps not sent", "perhaps sent", "sent"],
)
def test_what_was_drawn_is_given_up_if_it_comes_back_in_no_way(ways: list[bool], gives_up: bool):
    template, engine = Template(WRITTEN), Engine()
    messages = [{"role": "user", "content": "what is oak?"}]
    plain = {"role": "assistant", "content": "a long answer"}
    replies = [plain | {"reasoning_content": "because of many reasons"} if way else plain for way in ways]
    prompt = [*template.text(messages, begins=False).encode(), *b"assistant: a lbecause of many reasons"]

    async def play() -> None:
        prepares = NextTurns(engine)  # type: ignore[arg-type]
        prepares.expect(Answered(messages, replies, prompt, "", "id", "lease-1"), template)
        await prepares.idle()

    asyncio.run(play())
    assert [each.end for each in engine.prepared] == ["computed"] and engine.lease == "lease-1"
    assert bool(engine.passed) is gives_up


def test_a_template_that_refuses_the_turn_costs_nothing():
    async def render(messages: Messages) -> list[int]:
        raise InvalidRequest("roles must alternate", field="messages")

    async def play() -> None:
        prepares = NextTurns(Engine())  # type: ignore[arg-type]
        prepares.expect(Answered([], [{"role": "assistant", "content": "a"}], [1, 2], "", "id"), render)
        await prepares.idle()

    asyncio.run(play())


def test_no_more_is_expected_than_may_be_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("intarsia.deploy.front_end.next_turns.MOST_AT_ONCE", 2)

    async def play() -> None:
        prepares = NextTurns(Engine())  # type: ignore[arg-type]
        for _ in range(5):
            prepares.expect(Answered([], [{"role": "assistant", "content": "a"}], [1, 2], "", "id"), Template(WRITTEN))
        assert prepares.num_under_way == 2
        await prepares.idle()

    asyncio.run(play())
