"""Calls that a request requires, from a real engine whose model knows nothing of tools."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from intarsia.deploy.front_end.front_end import FrontEnd, FrontEndSettings
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.openai.chat import ChatCall
from intarsia.deploy.openai.protocol import ChatRequest
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.tests import models
from intarsia.tests.conftest import Loop

SEEDS = 10

FAMILIES = (
    "hermes",
    "qwen3_coder",
    "mistral",
    "glm47",
    "deepseek_v32",
    "kimi_k2",
    "gemma4",
    "lfm2",
    "cohere",
    "nemotron_json",
)

SAW = {
    "type": "object",
    "properties": {"wood": {"type": "string", "maxLength": 3}, "rip": {"type": "boolean"}},
    "required": ["wood"],
    "additionalProperties": False,
}
LOOK = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"saw": SAW, "look": LOOK}


Served = tuple[RunningEngine, Path]


@pytest.fixture(scope="module")
def engine(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[Served]:
    folder = models.make_talker(tmp_path_factory.mktemp("caller"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    running = loop.run(start_engine(engine_settings(str(folder), kv_cache_memory="1MiB", served_model_name="caller")))
    yield running, folder
    loop.run(running.shutdown())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_required_and_named_calls_are_called_as_asked(engine: Served, loop: Loop, family: str):
    running, folder = engine
    tokenizer = Tokenizer.load(folder)
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
    named = {"type": "function", "function": {"name": "saw"}}

    async def ask(choice: object, seed: int) -> tuple[str, list[tuple[str, str]]]:
        front_end = FrontEnd(running.client, tokenizer, FrontEndSettings(tool_call_parser=family))
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": tools,
            "tool_choice": choice,
            "seed": seed,
            "max_tokens": 400,
        }
        call = ChatCall(
            front_end, ChatRequest.model_validate(body | {"parallel_tool_calls": False}), f"{family}-{seed}"
        )
        await call.prepare()
        assert call._conversation.asked.sampling.lark is not None
        [found] = (await call.answer()).choices
        called = [(each.function.name, each.function.arguments) for each in found.message.tool_calls or ()]
        assert not (found.message.content or "").strip()
        return found.finish_reason, called

    for seed in range(SEEDS):
        for choice in ("required", named):
            reason, called = loop.run(ask(choice, seed))
            assert (reason, len(called)) == ("tool_calls", 1), (seed, choice, called)
            [(name, arguments)] = called
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            assert choice == "required" or name == "saw"
