"""Simon Willison's `llm`, at the command line."""

import json
import re
from pathlib import Path

from commands import command
from probing import KEY, MODEL, ONLY_C, URL, expect, probe, run

FUNCTION = "def price(wood: str) -> str:\n    'What a board costs.'\n    return 'three'\n"
OURS = f'model_name: {MODEL}, api_base: "{URL}", api_key_name: ours'
MODELS = f"""
- {{model_id: wood, {OURS}, supports_tools: true, supports_schema: true}}
- {{model_id: wood-text, {OURS}, completion: true}}
"""
LETTERS = "c" * 24
SAID = ("-o", "max_tokens", "24", "-o", "logit_bias", json.dumps(ONLY_C))
folder = Path("llm")
folder.mkdir(exist_ok=True)
(folder / "extra-openai-models.yaml").write_text(MODELS)
(folder / "keys.json").write_text(json.dumps({"ours": KEY}))


def llm(*arguments: str) -> str:
    return command("llm", *arguments, LLM_USER_PATH=str(folder.resolve()))


for name, more in (("prompt", ()), ("prompt, not streamed", ("--no-stream",)), ("prompt with usage", ("--usage",))):

    @probe(name)
    def _(more=more):
        said = llm("-m", "wood", *SAID, *more, "Which wood?")
        expect(said.splitlines()[0] == LETTERS, said)
        expect("--usage" not in more or re.search(r"Token usage: \d+ input, 24 output", said), said)
        return "the text"


@probe("completion")
def _():
    said = llm("-m", "wood-text", *SAID, "The inlay")
    expect(said.strip() == LETTERS, said)
    return "the text"


@probe("conversation goes on")
def _():
    said = llm("-c", *SAID, "And which glue?")
    expect(said.strip() == LETTERS, said)
    return "the text"


@probe("schema")
def _():
    schema = {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}, "required": ["wood"]}
    said = json.loads(llm("-m", "wood", "--schema", json.dumps(schema), "Which wood?"))
    expect(said["wood"] in ("oak", "ash"), said)
    return "an object that fits"


@probe("a tool at hand")
def _():
    said = llm("-m", "wood", *SAID, "--functions", FUNCTION, "Which wood?")
    expect(said.strip() == LETTERS, said)
    return "the text"


@probe("endpoint: models")
def _():
    expect(MODEL in llm("openai", "endpoint", URL, "--key", KEY, "--models"))
    return "lists the model"


@probe("endpoint: responses")
def _():
    said = llm("openai", "endpoint", URL, "-m", MODEL, "--key", KEY, "--responses", "-o", "max_tokens", "24", "Hi")
    expect(said.removesuffix("\n"), said)  # the command ends its line, whatever the answer
    return "text"


run()
