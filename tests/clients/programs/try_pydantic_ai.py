"""Pydantic AI: output types with enums, nested and recursive ones, as tools and by the server's grammar."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=URL, api_key=KEY)
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=provider),
    "responses": OpenAIResponsesModel(MODEL, provider=provider),
}


class Wood(Enum):
    OAK = "oak"
    ASH = "ash"


class Board(BaseModel):
    wood: Wood
    side: Literal["left", "right"]


class Table(BaseModel):
    """Nested: a model in a model."""

    top: Board
    legs: list[Wood] = Field(min_length=1, max_length=4)


class Branch(BaseModel):
    """Recursive: of its own kind."""

    wood: Wood
    fork: Branch | None = None


TYPES = {"enum": Board, "nested": Table, "recursive": Branch}
SETTINGS = {"max_tokens": 600, "temperature": 1.0}


def agent(api: str, output) -> Agent:
    return Agent(MODELS[api], output_type=output, retries=3, model_settings=SETTINGS)


def typed(api: str, name: str, way):
    async def one():
        result = await agent(api, way(TYPES[name])).run("Which wood?")
        expect(isinstance(result.output, TYPES[name]), result.output)
        return f"a {type(result.output).__name__}"

    return one


for api in MODELS:
    for name in TYPES:
        for way in (ToolOutput, NativeOutput):
            probe(f"{api}, {name} as {way.__name__}")(typed(api, name, way))


@probe("chat, text streamed")
async def _():
    settings = {"max_tokens": 24, "logit_bias": ONLY_C}
    async with Agent(MODELS["chat"]).run_stream("Which wood?", model_settings=settings) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    expect(len(pieces) > 3 and "".join(pieces) == "c" * 24, pieces)
    return "text in pieces"


@probe("chat, object streamed")
async def _():
    async with agent("chat", ToolOutput(Table)).run_stream("Which wood?") as result:
        seen = [partial async for partial in result.stream_output(debounce_by=None)]
    expect(isinstance(seen[-1], Table) and len(seen) > 1, seen)
    return "a Table, in growing pieces"


@probe("chat, prompted output is asked for as JSON")
async def _():
    try:
        await agent("chat", PromptedOutput(Board)).run("Which wood?")
    except UnexpectedModelBehavior as error:
        expect("output retries" in str(error), error)
        return "JSON, which a random model's cannot fit"
    return "a Board"


@probe("chat, a function tool and its result")
async def _():
    used = []
    asker = Agent(MODELS["chat"], output_type=ToolOutput(Board), retries=9, model_settings=SETTINGS)

    @asker.tool_plain
    def price(wood: Wood) -> int:
        used.append(wood)
        return 3

    for _ in range(8):
        result = await asker.run("Which wood?")
        expect(isinstance(result.output, Board), result)
        if used:
            return "the tool is called, a Board follows"
    return "a Board each time, without the tool"


run()
