"""Semantic Kernel: its chat service, functions that the model must call, an agent."""

from typing import Annotated, Literal

from openai import AsyncOpenAI
from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Order(BaseModel):
    wood: Literal["oak", "ash"]


class Shop:
    def __init__(self):
        self.asked = 0

    @kernel_function(name="price", description="What a board costs.")
    def price(self, boards: Annotated[bool, "whether sawn"]) -> str:
        self.asked += 1
        return "three"


service = OpenAIChatCompletion(MODEL, async_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))


def history() -> ChatHistory:
    told = ChatHistory(system_message="You inlay.")
    told.add_user_message("Which wood?")
    return told


def settings(**fields) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(**{"max_tokens": 24} | fields)


@probe("chat")
async def _():
    answer = await service.get_chat_message_content(history(), settings())
    expect(str(answer) and answer.metadata["usage"].completion_tokens, answer)
    return "text"


@probe("stream")
async def _():
    stream = service.get_streaming_chat_message_content(history(), settings(logit_bias=ONLY_C))
    pieces = [str(piece) async for piece in stream]
    expect(len(pieces) > 3 and "".join(pieces) == "c" * 24, pieces)
    return "pieces"


@probe("a function is required, and runs")
async def _():
    kernel, shop = Kernel(services=[service]), Shop()
    kernel.add_plugin(shop, "shop")
    required = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    asked = settings(max_tokens=300, function_choice_behavior=required, parallel_tool_calls=False)
    await service.get_chat_message_content(history(), asked, kernel=kernel)
    expect(shop.asked == 1, shop.asked)
    return "runs once"


@probe("structured output")
async def _():
    answer = await service.get_chat_message_content(history(), settings(response_format=Order, max_tokens=100))
    return f"a {type(Order.model_validate_json(str(answer))).__name__}"


@probe("agent")
async def _():
    from semantic_kernel.functions import KernelArguments

    agent = ChatCompletionAgent(
        service=service, name="joiner", plugins=[Shop()], arguments=KernelArguments(settings=settings())
    )
    expect(str(await agent.get_response("Which wood?")))
    return "text"


run()
