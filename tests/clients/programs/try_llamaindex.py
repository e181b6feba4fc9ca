"""LlamaIndex, by its class for servers like OpenAI's."""

from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run
from pydantic import BaseModel


def llm(**fields) -> OpenAILike:
    usual = {"model": MODEL, "api_base": URL, "api_key": KEY, "max_tokens": 24, "max_retries": 0}
    return OpenAILike(**usual | {"context_window": 32768, "is_chat_model": True} | fields)


class Board(BaseModel):
    """A board."""

    wood: Literal["oak", "ash"]


class Order(BaseModel):
    """An order of timber."""

    board: Board
    count: Literal[1, 2]


def price(wood: Literal["oak", "ash"]) -> str:
    """What a board costs."""
    return "three"


ASK = [ChatMessage(role="user", content="Which wood?")]
TOOL = FunctionTool.from_defaults(price)
calling = llm(is_function_calling_model=True, strict=True, max_tokens=300)


@probe("complete")
def _():
    expect(llm(is_chat_model=False).complete("The inlay").text)
    return "text"


@probe("chat")
def _():
    expect(llm().chat(ASK).message.content)
    return "text"


@probe("chat, streamed")
def _():
    pieces = [piece.delta for piece in llm(additional_kwargs={"logit_bias": ONLY_C}).stream_chat(ASK)]
    expect(len(pieces) > 3 and "".join(piece or "" for piece in pieces) == "c" * 24, pieces)
    return "pieces"


@probe("chat, at once")
async def _():
    expect((await llm().achat(ASK)).message.content)
    return "text"


@probe("tool required")
def _():
    answer = calling.chat_with_tools([TOOL], user_msg="Which wood?", tool_required=True)
    [call, *_] = calling.get_tool_calls_from_response(answer)
    expect(call.tool_name == "price" and call.tool_kwargs["wood"] in ("oak", "ash"), call)
    return "calls price"


@probe("predict and call")
def _():
    answer = calling.predict_and_call([TOOL], user_msg="Which wood?", tool_required=True)
    expect("three" in answer.response, answer)
    return "the function's answer"


@probe("structured output by a tool")
def _():
    return f"a {type(calling.as_structured_llm(Order).chat(ASK).raw).__name__}"


@probe("structured output by schema")
def _():
    held = llm(should_use_structured_outputs=True, is_function_calling_model=True, max_tokens=300)
    return f"a {type(held.as_structured_llm(Order).chat(ASK).raw).__name__}"


@probe("function agent")
async def _():
    agent = FunctionAgent(tools=[TOOL], llm=llm(is_function_calling_model=True, max_tokens=100))
    expect(str(await agent.run("Which wood?")))
    return "an answer"


run()
