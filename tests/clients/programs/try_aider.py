"""aider: a message about a file, in a repository of its own.

The model is random, so each answer is held to a form: a whole file as aider reads it, a sentence, or no end at all.
"""

import json
import os
import re
import subprocess
from pathlib import Path

from commands import command
from probing import KEY, MODEL, URL, expect, probe, run

ANSWER_TOKENS = 64
BEFORE, AFTER = 'WOOD = "oak"\n', ('WOOD = "ash"\n', 'WOOD = "elm"\n')
WHOLE_FILE = {"regex": 'wood\\.py\n```\nWOOD = "(ash|elm)"\n```\n'}
SENTENCES = ("The wood is ash.", "The wood is elm.")
WITHOUT_END = {"regex": "[a-z]{1000}"}

folder = Path("work")
folder.mkdir(exist_ok=True)
subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
for name, value in (("user.name", "joiner"), ("user.email", "joiner@example.org")):
    subprocess.run(["git", "config", name, value], cwd=folder, check=True)
wood = folder / "wood.py"
LENGTHS = {
    "max_input_tokens": 32768, "max_output_tokens": ANSWER_TOKENS, "input_cost_per_token": 0, "output_cost_per_token": 0
}  # fmt: skip
(folder / "lengths.json").write_text(json.dumps({f"openai/{MODEL}": LENGTHS | {"litellm_provider": "openai"}}))


def aider(message: str, form: dict, *more: str) -> str:
    """What it prints. form: the server's `structured_outputs` for the answer."""
    extra = {"max_tokens": ANSWER_TOKENS, "extra_body": {"structured_outputs": form}}
    settings = {"name": f"openai/{MODEL}", "edit_format": "whole", "use_temperature": False, "extra_params": extra}
    (folder / "settings.yaml").write_text(json.dumps([settings]))  # JSON is YAML
    wood.write_text(BEFORE)
    before = os.getcwd()
    os.chdir(folder)
    try:
        return command(
            "aider", "--model", f"openai/{MODEL}", "--openai-api-base", URL, "--openai-api-key", KEY, "--yes-always",
            "--no-auto-commits", "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-pretty",
            "--no-suggest-shell-commands", "--no-gitignore", "--model-metadata-file", "lengths.json",
            "--model-settings-file", "settings.yaml", "--no-detect-urls", "--map-tokens", "1024", *more,
            "--message", message, "wood.py",
        )  # fmt: skip
    finally:
        os.chdir(before)


def received(said: str) -> int:
    """The tokens of the answer, as aider reports them."""
    found = re.search(r"Tokens: \S+ sent, (\d+) received\.", said)
    expect(found, said[-300:])
    return int(found[1])


@probe("a change, streamed")
def _():
    said = aider("Make it ash.", WHOLE_FILE)
    expect(received(said) > 0 and "Applied edit to wood.py" in said, said[-300:])
    expect(wood.read_text() in AFTER, wood.read_text(), said[-300:])
    return "the file is changed"


@probe("a change, not streamed")
def _():
    said = aider("Make it ash.", WHOLE_FILE, "--no-stream")
    expect("Applied edit to wood.py" in said and wood.read_text() in AFTER, wood.read_text(), said[-300:])
    expect(received(said) == len(f"wood.py\n```\n{wood.read_text()}```\n") + 1, said[-300:])  # by bytes; one is its end
    return f"the file is changed, {received(said)} tokens out"


@probe("a question")
def _():
    said = aider("Which wood?", {"choice": SENTENCES}, "--chat-mode", "ask")
    expect(received(said) > 0 and any(sentence in said for sentence in SENTENCES), said[-300:])
    expect(wood.read_text() == BEFORE, wood.read_text())
    return "the answer is shown, the file is as it was"


for name, more in (("an answer cut off", ()), ("an answer cut off, not streamed", ("--no-stream",))):

    @probe(name)
    def _(more=more):
        said = aider("Make it ash.", WITHOUT_END, *more)
        expect("has hit a token limit" in said and wood.read_text() == BEFORE, said[-300:])
        expect(re.search(rf"\b[a-z]{{{ANSWER_TOKENS}}}\b", said), said[-300:])
        return f"{ANSWER_TOKENS} tokens, then aider's own words on token limits"


@probe("prompt too long")
def _():
    said = aider("x" * 40_000, WHOLE_FILE)
    expect("has hit a token limit" in said and received(said) == 0, said[-300:])
    expect(wood.read_text() == BEFORE, wood.read_text())
    return "aider's own words on token limits, no answer"


run()
