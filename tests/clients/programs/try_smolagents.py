"""smolagents, whose agents call tools or write programs."""

from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run
from smolagents import ChatMessage, CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def price(wood: str) -> str:
    """What a board costs.

    Args:
        wood: Its kind.
    """
    return "three"


def model(**fields) -> OpenAIModel:
    return OpenAIModel(MODEL, api_base=URL, api_key=KEY, **{"max_tokens": 200} | fields)


ASK = [ChatMessage(role="user", content=[{"type": "text", "text": "Which wood?"}])]


@probe("generate")
def _():
    answer = model(max_tokens=16).generate(ASK)
    expect(answer.content and answer.token_usage.output_tokens, answer)
    return f"{answer.token_usage.input_tokens} tokens in, {answer.token_usage.output_tokens} out"


@probe("generate_stream")
def _():
    pieces = [piece.content or "" for piece in model(max_tokens=16, logit_bias=ONLY_C).generate_stream(ASK)]
    expect(len(pieces) > 3 and "".join(pieces) == "c" * 16, pieces)
    return "pieces"


@probe("a tool is required")
def _():
    answer = model(max_tokens=2000).generate(ASK, tools_to_call_from=[price])
    expect(answer.tool_calls[0].function.name == "price", answer)
    return "calls price"


@probe("response_format")
def _():
    schema = {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}, "required": ["wood"]}
    held = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}
    expect(model().generate(ASK, response_format=held).content.startswith("{"))
    return "an object"


def steps(agent) -> str:
    result = agent.run("Which wood?", max_steps=2, return_full_result=True)
    wrong = [step["error"]["type"] for step in result.steps if step.get("error")]
    expect("AgentGenerationError" not in wrong, result.steps)
    return "runs its steps"


@probe("ToolCallingAgent")
def _():
    return steps(ToolCallingAgent(tools=[price], model=model(), verbosity_level=0))


@probe("ToolCallingAgent, streamed")
def _():
    return steps(ToolCallingAgent(tools=[price], model=model(), verbosity_level=0, stream_outputs=True))


@probe("CodeAgent")
def _():
    return steps(CodeAgent(tools=[price], model=model(), verbosity_level=0))


@probe("CodeAgent, held to a schema")
def _():
    return steps(CodeAgent(tools=[price], model=model(), verbosity_level=0, use_structured_outputs_internally=True))


run()
