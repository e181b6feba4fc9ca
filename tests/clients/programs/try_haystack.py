"""Haystack's generator, in a pipeline and in an agent."""

from typing import Literal

from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run
from pydantic import BaseModel


class Order(BaseModel):
    wood: Literal["oak", "ash"]


PARAMETERS = {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}, "required": ["wood"]}
PRICE = Tool("price", "What a board costs.", PARAMETERS, lambda wood: "three")
ASK = [ChatMessage.from_user("Which wood?")]


def generator(streaming_callback=None, **fields) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        Secret.from_token(KEY), MODEL, api_base_url=URL, max_retries=0, streaming_callback=streaming_callback,
        generation_kwargs={"max_completion_tokens": 24} | fields,
    )  # fmt: skip


@probe("chat")
def _():
    [reply] = generator().run(ASK)["replies"]
    expect(reply.text and reply.meta["usage"]["completion_tokens"], reply)
    return f"{reply.meta['usage']['prompt_tokens']} tokens in, {reply.meta['usage']['completion_tokens']} out"


@probe("stream")
def _():
    pieces = []
    [reply] = generator(pieces.append, logit_bias=ONLY_C).run(ASK)["replies"]
    expect(len(pieces) > 3 and reply.text == "c" * 24, pieces)
    return "pieces"


@probe("tool required")
def _():
    held = generator(tool_choice="required", parallel_tool_calls=False, max_completion_tokens=200)
    [call] = held.run(ASK, tools=[PRICE])["replies"][0].tool_calls
    expect(call.arguments["wood"] in ("oak", "ash"), call)
    return "calls price"


@probe("tool required, streamed")
def _():
    pieces = []
    held = generator(pieces.append, tool_choice="required", parallel_tool_calls=False, max_completion_tokens=200)
    [call] = held.run(ASK, tools=[PRICE])["replies"][0].tool_calls
    expect(call.arguments["wood"] in ("oak", "ash") and len(pieces) > 3, call)
    return "calls price"


@probe("structured output")
def _():
    [reply] = generator(response_format=Order, max_completion_tokens=100).run(ASK)["replies"]
    return f"a {type(Order.model_validate_json(reply.text)).__name__}"


@probe("pipeline")
def _():
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("Which {{what}}?")], ["what"]))
    pipeline.add_component("model", generator())
    pipeline.connect("prompt.prompt", "model.messages")
    expect(pipeline.run({"prompt": {"what": "wood"}})["model"]["replies"][0].text)
    return "text"


@probe("agent that ends with its tool")
def _():
    held = generator(tool_choice="required", parallel_tool_calls=False, max_completion_tokens=200)
    agent = Agent(chat_generator=held, tools=[PRICE], exit_conditions=["price"], max_agent_steps=3)
    found = agent.run(ASK)["messages"]
    expect(found[-1].tool_call_result.result == "three", found)
    return "the tool's answer"


run()
