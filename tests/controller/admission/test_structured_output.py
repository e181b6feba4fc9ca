"""Forms of answers, compiled beside the steps."""

import asyncio

import pytest

from intarsia.controller.admission import structured_output
from intarsia.controller.admission.structured_output import StructuredOutput
from intarsia.errors import EngineUnavailable, IntarsiaError, InvalidRequest


class Compiler:
    """Is lost a few times, then compiles what is "good"."""

    def __init__(self, losses: int = 0):
        self.losses = losses
        self.asked = 0

    async def prepare_form(self, kind: str, text: str) -> None:
        self.asked += 1
        if self.asked <= self.losses:
            raise EngineUnavailable("a worker is gone")
        if text == "slow":
            await asyncio.sleep(3600)
        if text != "good":
            raise InvalidRequest(f"{kind} cannot be used: {text}", field=kind)


async def outcome(compiler: Compiler, text: str) -> IntarsiaError | None:
    done: asyncio.Future[IntarsiaError | None] = asyncio.get_running_loop().create_future()
    StructuredOutput(compiler).compile(("regex", text), done.set_result)
    assert not done.done(), "the caller does not wait"
    return await asyncio.wait_for(done, 10)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(structured_output, "LOOK_AGAIN_S", 0.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [("good", None), ("bad", "regex cannot be used: bad"), ("slow", "regex could not be compiled within 0.05 s")],
)
def test_a_form_is_compiled_or_refused_in_words(text: str, message: str | None):
    refusal = asyncio.run(outcome(Compiler(), text))
    if message is None:
        assert refusal is None
    else:
        assert isinstance(refusal, InvalidRequest) and message in refusal.message and refusal.field == "regex"


def test_workers_that_are_lost_are_waited_for():
    compiler = Compiler(losses=3)
    assert asyncio.run(outcome(compiler, "good")) is None
    assert compiler.asked == 4


def test_nothing_is_called_once_it_is_closed():
    async def scenario() -> list[IntarsiaError | None]:
        called: list[IntarsiaError | None] = []
        compiling = StructuredOutput(Compiler())
        compiling.compile(("regex", "good"), called.append)
        compiling.close()
        await asyncio.sleep(0.01)
        return called

    assert asyncio.run(scenario()) == []
