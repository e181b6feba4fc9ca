"""Simon Willison's `llm`, at the command line."""

import json
from pathlib import Path

from commands import command
from probing import KEY, MODEL, URL, expect, probe, run

FUNCTION = "def price(wood: str) -> str:\n    'What a board costs.'\n    return 'three'\n"
OURS = f'model_name: {MODEL}, api_base: "{URL}", api_key_name: ours'
MODELS = f"""
- {{model_id: wood, {OURS}, supports_tools: true, supports_schema: true}}
- {{model_id: wood-text, {OURS}, completion: true}}
"""
folder = Path("llm")
folder.mkdir(exist_ok=True)
(folder / "extra-openai-models.yaml").write_text(MODELS)
(folder / "keys.json").write_text(json.dumps({"ours": KEY}))


def llm(*arguments: str) -> str:
    return command("llm", *arguments, LLM_USER_PATH=str(folder.resolve()))


for name, more in (("prompt", ()), ("prompt, not streamed", ("--no-stream",)), ("prompt with usage", ("--usage",))):

    @probe(name)
    def _(more=more):
        said = llm("-m", "wood", "-o", "max_tokens", "24", *more, "Which wood?")
        expect(said and ("--usage" not in more or "Token usage" in said), said)
        return "text"


@probe("completion")
def _():
    expect(llm("-m", "wood-text", "-o", "max_tokens", "16", "The inlay").strip())
    return "text"


@probe("conversation goes on")
def _():
    expect(llm("-c", "-o", "max_tokens", "16", "And which glue?").strip())
    return "text"


@probe("schema")
def _():
    schema = {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}, "required": ["wood"]}
    said = json.loads(llm("-m", "wood", "--schema", json.dumps(schema), "Which wood?"))
    expect(said["wood"] in ("oak", "ash"), said)
    return "an object that fits"


@probe("a tool at hand")
def _():
    expect(llm("-m", "wood", "-o", "max_tokens", "24", "--functions", FUNCTION, "Which wood?"))
    return "text"


@probe("endpoint: models")
def _():
    expect(MODEL in llm("openai", "endpoint", URL, "--key", KEY, "--models"))
    return "lists the model"


@probe("endpoint: responses")
def _():
    expect(llm("openai", "endpoint", URL, "-m", MODEL, "--key", KEY, "--responses", "-o", "max_tokens", "24", "Hi"))
    return "text"


run()
