"""LangChain, and an agent of it."""

from typing import Literal

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run
from pydantic import BaseModel


def chat(**fields) -> ChatOpenAI:
    return ChatOpenAI(**{"model": MODEL, "base_url": URL, "api_key": KEY, "max_tokens": 24, "max_retries": 0} | fields)


class Board(BaseModel):
    """A board."""

    wood: Literal["oak", "ash"]


class Order(BaseModel):
    """An order of timber."""

    board: Board
    count: Literal[1, 2]


@tool
def price(wood: Literal["oak", "ash"]) -> str:
    """What a board costs."""
    return "three"


@probe("invoke")
def _():
    answer = chat().invoke([("system", "You inlay."), ("human", "Which wood?")])
    expect(answer.content and answer.usage_metadata["output_tokens"], answer)
    return f"{answer.usage_metadata['input_tokens']} tokens in, {answer.usage_metadata['output_tokens']} out"


@probe("stream with usage")
def _():
    pieces = list(chat(stream_usage=True, logit_bias=ONLY_C).stream("Which wood?"))
    expect(len(pieces) > 3 and "".join(piece.content for piece in pieces) == "c" * 24, pieces)
    expect(any(piece.usage_metadata for piece in pieces), pieces)
    return "pieces, then usage"


@probe("batch")
def _():
    return f"{len(chat().batch(['oak', 'ash', 'elm']))} answers"


@probe("log-probabilities")
def _():
    answer = chat(logprobs=True, top_logprobs=2, max_tokens=4).invoke("Which wood?")
    expect(answer.response_metadata["logprobs"]["content"], answer)
    return "for each token"


for method in ("json_schema", "function_calling"):

    @probe(f"structured output by {method}")
    def _(method=method):
        found = chat(max_tokens=300).with_structured_output(Order, method=method).invoke("Which wood?")
        return f"a {type(found).__name__}"


for choice in ("required", "auto", "price"):

    @probe(f"tool, {choice}")
    def _(choice=choice):
        asked = chat(max_tokens=100).bind_tools([price], tool_choice=choice, parallel_tool_calls=False)
        answer = asked.invoke("Which wood?")
        expect(choice == "auto" or answer.tool_calls[0]["args"]["wood"] in ("oak", "ash"), answer)
        return "words" if choice == "auto" else "calls price"


@probe("tool, streamed")
def _():
    asked = chat(max_tokens=100).bind_tools([price], tool_choice="required", parallel_tool_calls=False)
    pieces = list(asked.stream("Which wood?"))
    whole = sum(pieces[1:], pieces[0])
    expect(whole.tool_calls and sum(bool(piece.tool_call_chunks) for piece in pieces) > 2, pieces)
    return "arguments in pieces, a whole call"


@probe("a call and its result go back")
def _():
    call = {"name": "price", "args": {"wood": "oak"}, "id": "1"}
    told = [("human", "Which wood?"), AIMessage("", tool_calls=[call]), ToolMessage("three", tool_call_id="1")]
    expect(chat().bind_tools([price]).invoke(told).content)
    return "words"


@probe("agent with a typed answer")
def _():
    agent = create_agent(chat(max_tokens=300), [price], response_format=Order)
    found = agent.invoke({"messages": [("human", "Which wood?")]})
    return f"a {type(found['structured_response']).__name__}"


@probe("responses")
def _():
    expect(chat(use_responses_api=True).invoke("Which wood?").text)
    return "text"


@probe("responses, structured and streamed")
def _():
    asked = chat(use_responses_api=True, max_tokens=300)
    found = asked.with_structured_output(Order).invoke("Which wood?")
    expect(len(list(asked.bind_tools([price], tool_choice="required").stream("Which wood?"))) > 3)
    return f"a {type(found).__name__}, pieces"


@probe("completion")
def _():
    expect(OpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=8).invoke("The inlay"))
    return "text"


@probe("prompt too long")
def _():
    from langchain_core.exceptions import ContextOverflowError

    try:
        chat().invoke("x" * 40_000)
    except ContextOverflowError as error:
        return type(error).__name__
    raise AssertionError("no error")


run()
