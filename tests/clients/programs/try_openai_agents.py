"""OpenAI's Agents SDK, by both interfaces."""

import sys
from pathlib import Path
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI
from probing import KEY, MODEL, URL, expect, probe, run
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
MODELS = {"chat": OpenAIChatCompletionsModel(MODEL, client), "responses": OpenAIResponsesModel(MODEL, client)}
PRICES = str(Path(__file__).with_name("mcp_prices.py"))
CHOICE = {"schema": {"enum": ["oak", "ash"]}, "name": "wood"}
ENDS = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": CHOICE}},
    "responses": {"text": {"format": {"type": "json_schema", **CHOICE}}},
}
"""Words that end: the SDK takes an answer of the responses interface that is cut for an error."""
calls: list[str] = []


class Order(BaseModel):
    wood: Literal["oak", "ash"]
    boards: Literal[1, 2]


@function_tool
def price(wood: Literal["oak", "ash"]) -> str:
    """What a board costs."""
    calls.append(wood)
    return "three"


def probes(api: str):
    model = MODELS[api]
    short = ModelSettings(max_tokens=24, extra_body=ENDS[api])

    @probe(f"{api}: an answer")
    async def _():
        result = await Runner.run(
            Agent("joiner", instructions="You inlay.", model=model, model_settings=short), "Wood?"
        )
        expect(result.final_output, result)
        return "text"

    @probe(f"{api}: streamed")
    async def _():
        result = Runner.run_streamed(Agent("joiner", model=model, model_settings=short), "Wood?")
        kinds = [event.type async for event in result.stream_events()]
        expect(kinds.count("raw_response_event") > 3 and result.final_output, kinds)
        return "pieces, then the answer"

    @probe(f"{api}: a tool, its result, an answer")
    async def _():
        calls.clear()
        settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(
            "joiner", model=model, tools=[price], model_settings=settings, tool_use_behavior="stop_on_first_tool"
        )
        result = await Runner.run(agent, "Wood?", max_turns=4)
        expect(calls and result.final_output, calls, result)
        return "the tool runs, its result is the answer"

    @probe(f"{api}: a tool, streamed")
    async def _():
        calls.clear()
        settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(
            "joiner", model=model, tools=[price], model_settings=settings, tool_use_behavior="stop_on_first_tool"
        )
        result = Runner.run_streamed(agent, "Wood?", max_turns=4)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        expect(calls and "tool_called" in names and "tool_output" in names, names)
        return "tool_called, tool_output"

    @probe(f"{api}: a tool of an MCP server")
    async def _():
        settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
        async with MCPServerStdio(
            {"command": sys.executable, "args": [PRICES]}, client_session_timeout_seconds=60
        ) as mcp:
            agent = Agent(
                "joiner", model=model, mcp_servers=[mcp], model_settings=settings,
                tool_use_behavior="stop_on_first_tool",
            )  # fmt: skip
            result = await Runner.run(agent, "Wood?", max_turns=4)
        expect("three for" in str(result.final_output), result)
        return "its tool runs, its result is the answer"

    @probe(f"{api}: a typed answer")
    async def _():
        agent = Agent("joiner", model=model, output_type=Order, model_settings=ModelSettings(max_tokens=200))
        result = await Runner.run(agent, "Wood?")
        return f"a {type(result.final_output).__name__}"

    @probe(f"{api}: a handoff")
    async def _():
        turner = Agent("turner", model=model, model_settings=short)
        settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
        result = await Runner.run(Agent("joiner", model=model, handoffs=[turner], model_settings=settings), "Wood?")
        expect(result.last_agent.name == "turner", result.last_agent)
        return "from one agent to the other"


for api in MODELS:
    probes(api)


@probe("a session in a conversation that is kept")
async def _():
    session = OpenAIConversationsSession(openai_client=client)
    settings = ModelSettings(max_tokens=24, extra_body=ENDS["responses"])
    agent = Agent("joiner", model=MODELS["responses"], model_settings=settings)
    for asked in ("Which wood?", "And now?"):
        await Runner.run(agent, asked, session=session)
    items = await session.get_items()
    expect([item.get("role") for item in items] == ["user", "assistant"] * 2, items)
    expect(await session.pop_item() == items[-1], items)
    expect(len(await session.get_items()) == 3, items)
    await session.clear_session()
    return "four items, the last is taken back, and then all"


run()
