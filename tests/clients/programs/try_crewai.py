"""CrewAI: its model, and a crew of one with a task."""

import os
from typing import Literal

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from probing import KEY, MODEL, URL, expect, probe, run
from pydantic import BaseModel


class Order(BaseModel):
    wood: Literal["oak", "ash"]


@tool("price")
def price(wood: str) -> str:
    """What a board costs."""
    return "three"


def llm(route: str = "openai", **fields) -> LLM:
    usual = {"base_url": URL, "api_key": KEY, "max_tokens": 100}
    return LLM(model=f"{route}/{MODEL}", **usual | fields)


def crew(tools=(), **task) -> Crew:
    joiner = Agent(role="joiner", goal="choose wood", backstory="You inlay.", llm=llm(), tools=[*tools], max_iter=2)
    return Crew(
        agents=[joiner], tasks=[Task(description="Which wood?", expected_output="a wood", agent=joiner, **task)]
    )


@probe("call")
def _():
    expect(llm().call("Which wood?"))
    return "text"


@probe("call, streamed")
def _():
    expect(llm(stream=True).call("Which wood?"))
    return "text"


@probe("call of hosted_vllm/")
def _():
    expect(llm("hosted_vllm").call("Which wood?"))
    return "text"


@probe("call with a typed answer")
def _():
    found = llm().call("Which wood?", response_model=Order)
    return f"a {type(found if isinstance(found, Order) else Order.model_validate_json(found)).__name__}"


@probe("crew")
def _():
    expect(crew().kickoff().raw)
    return "text"


@probe("crew with a tool")
def _():
    expect(crew([price]).kickoff().raw)
    return "text"


@probe("crew with a typed task")
def _():
    return f"a {type(crew(output_pydantic=Order).kickoff().pydantic).__name__}"


run()
