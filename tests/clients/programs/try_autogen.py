"""AutoGen: its client, an assistant with a tool, a team of two."""

from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import CreateResult, ModelInfo, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run
from pydantic import BaseModel


class Order(BaseModel):
    wood: Literal["oak", "ash"]


def price(wood: Literal["oak", "ash"]) -> str:
    return "three"


INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True,
    multiple_system_messages=True,
)  # fmt: skip
PRICE = FunctionTool(price, "What a board costs.")
ASK = [UserMessage(content="Which wood?", source="user")]


def client(**fields) -> OpenAIChatCompletionClient:
    usual = {"model": MODEL, "base_url": URL, "api_key": KEY, "model_info": INFO, "max_tokens": 24, "max_retries": 0}
    return OpenAIChatCompletionClient(**usual | fields)


@probe("create")
async def _():
    answer = await client().create(ASK)
    expect(answer.content and answer.usage.completion_tokens, answer)
    return f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out"


@probe("create_stream")
async def _():
    *pieces, last = [piece async for piece in client(logit_bias=ONLY_C).create_stream(ASK, include_usage=True)]
    expect(len(pieces) > 3 and "".join(pieces) == "c" * 24, pieces)
    expect(isinstance(last, CreateResult) and last.usage.completion_tokens == 24, last)
    return "pieces, then usage"


@probe("tool required")
async def _():
    answer = await client(max_tokens=200, parallel_tool_calls=False).create(ASK, tools=[PRICE], tool_choice="required")
    expect(answer.content[0].name == "price", answer)
    return "calls price"


@probe("structured output")
async def _():
    answer = await client(max_tokens=100).create(ASK, json_output=Order)
    return f"a {type(Order.model_validate_json(answer.content)).__name__}"


@probe("assistant with a typed answer")
async def _():
    result = await AssistantAgent("joiner", client(max_tokens=100), output_content_type=Order).run(task="Which wood?")
    return f"a {type(result.messages[-1].content).__name__}"


@probe("assistant with a tool at hand")
async def _():
    result = await AssistantAgent("joiner", client(), tools=[PRICE]).run(task="Which wood?")
    expect(result.messages[-1].content, result)
    return "words"


@probe("team of two")
async def _():
    team = [AssistantAgent(name, client()) for name in ("joiner", "turner")]
    result = await RoundRobinGroupChat(team, termination_condition=MaxMessageTermination(4)).run(task="Which wood?")
    expect(len(result.messages) == 4, result)
    return "4 messages"


run()
